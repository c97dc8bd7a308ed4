"""A simulated decoder over the real `CacheManager`: it writes what it computes into a pretend arena.

Each cell of the arena holds the whole prefix that its key and value depend on, (root, tokens up to here), so that a
wrong share, a stale block, a lost copy or a block freed too early shows as a wrong cell, whatever the manager believes.

With layer groups there are window blocks beside, with cells of their own, which a decoder finds by the pairs that it
was told with each answer: it never looks into the manager's columns for another block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cachemgr.ids import BlockRun, LeaseId, SessionId, TenantId
from cachemgr.manager import CacheManager
from cachemgr.results import Acquired, CopyPlan, Reported, ScopeSpan, SequenceReport

NO_BLOCKS = np.zeros(0, np.int32)


def pack(tokens: Sequence[int]) -> bytes:
    """Packed little-endian int32."""
    return np.array(tokens, "<i4").tobytes()


def root_of(tenant: str) -> bytes:
    """A root of 32 bytes for a tenant."""
    return tenant.encode().ljust(32, b".")


def span_of(scope: str, num_tokens: int) -> ScopeSpan:
    """The first tokens of a prompt in a wider scope, for example "@group:team"."""
    return ScopeSpan(TenantId(scope), root_of(scope), num_tokens)


@dataclass(eq=False)
class Running:
    """One sequence as its decoder sees it."""

    session: SessionId
    lease_id: LeaseId
    tenant: str
    tokens: list[int]
    table: list[int]
    computed: int
    copy: CopyPlan | None
    reported: int = 0
    copied: bool = False
    taken: list[int] = field(default_factory=list)
    scope: str = ""
    prefix_tokens: int = 0


class Rig:
    """A manager, its decoders' sequences and the pretend arena."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        block_tokens: int = 4,
        window_tokens: int = 0,
        name_bits: int = 128,
        fail_allocation: int = 0,
        num_window_blocks: int = 0,
    ):
        self.now_ns = 0
        self.block_tokens = block_tokens
        self.window_tokens = window_tokens
        self.grouped = num_window_blocks > 0
        self.cells: dict[int, list[object]] = {b: [None] * block_tokens for b in range(1, num_blocks + 1)}
        self.window_cells: dict[int, list[object]] = {w: [None] * block_tokens for w in range(1, num_window_blocks + 1)}
        self.windows_of: dict[SessionId, dict[int, int]] = {}  # what each decoder was told
        self.manager = CacheManager(
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            window_tokens=window_tokens,
            epoch=7,
            name_bits=name_bits,
            fail_allocation=fail_allocation,
            on_free=self._poison,
            num_window_blocks=num_window_blocks,
            on_window_free=self._poison_windows,
        )
        self.sequences: list[Running] = []
        self.credit: dict[SessionId, list[int]] = {}
        self.revision: dict[SessionId, int] = {}
        self.session = self.attach()

    def _poison(self, blocks: BlockRun) -> None:
        for block in blocks.tolist():
            self.cells[block] = ["poison"] * self.block_tokens

    def _poison_windows(self, blocks: BlockRun) -> None:
        for block in blocks.tolist():
            self.window_cells[block] = ["poison"] * self.block_tokens

    def tell(self, session: SessionId, blocks: Sequence[int], copy: CopyPlan | None = None) -> None:
        """An answer that names these blocks, and with them their window blocks."""
        windows = self.manager._core.window_blocks
        if windows is not None:
            named = [*blocks, *((copy.source, copy.target) if copy is not None else ())]
            self.windows_of[session].update(windows.pairs_of(np.array(named, np.intp)).tolist())

    def attach(self) -> SessionId:
        session = self.manager.attach(decoder_name="decoder", process_id=1, now_ns=0)
        self.credit[session] = []
        self.revision[session] = 0
        self.windows_of[session] = {}
        return session

    def acquire(
        self,
        tokens: Sequence[int],
        *,
        tenant: str = "a",
        session: SessionId | None = None,
        no_read: bool = False,
        no_store: bool = False,
        resumed: bool = False,
        priority: int = 50,
        ttl_ns: int = 0,
        scope: str = "",
        num_tokens: int = 0,
    ) -> Running:
        """A lease; the copy, if any, is still to run. The first `num_tokens` tokens lie in `scope`, if one is named."""
        session = self.session if session is None else session
        answer: Acquired = self.manager.acquire(
            session,
            tenant=TenantId(tenant),
            root=root_of(tenant),
            tokens=pack(tokens),
            request_id="request",
            sample=0,
            no_read=no_read,
            no_store=no_store,
            resumed=resumed,
            priority=priority,
            ttl_ns=ttl_ns,
            prefix=span_of(scope, num_tokens) if scope else None,
            now_ns=self.now_ns,
        )
        sequence = Running(
            session, answer.lease_id, tenant, list(tokens), answer.blocks.tolist(), answer.cached_tokens, answer.copy
        )
        self.tell(session, sequence.table, answer.copy)
        sequence.reported = len(tokens)
        sequence.scope = scope
        sequence.prefix_tokens = num_tokens // self.block_tokens * self.block_tokens if scope else 0
        self.sequences.append(sequence)
        return sequence

    def cell_of(self, sequence: Running, position: int) -> object:
        """What must stand at a position."""
        shared = position < sequence.prefix_tokens
        return (root_of(sequence.scope if shared else sequence.tenant), tuple(sequence.tokens[: position + 1]))

    def run_copy(self, sequence: Running) -> None:
        if sequence.copy is not None:
            plan = sequence.copy
            self.cells[plan.target][: plan.num_tokens] = self.cells[plan.source][: plan.num_tokens]
            if self.grouped:
                source, target = (self._window(sequence, block) for block in (plan.source, plan.target))
                target[: plan.num_tokens] = source[: plan.num_tokens]
            sequence.copy = None
            sequence.copied = True

    def _window(self, sequence: Running, block: int) -> list[object]:
        """The window block of a block, as the sequence's decoder knows it."""
        window = self.windows_of[sequence.session].get(block)
        assert window, f"nobody told a window block of block {block}"
        return self.window_cells[window]

    def compute(self, sequence: Running, up_to: int | None = None) -> None:
        """Runs the copy, then writes the cells of tokens up to `up_to` (all by default). With layer groups a table may
        be shorter than its prompt: then it is made longer by credit, and computed as far as that reaches."""
        self.run_copy(sequence)
        end, size = len(sequence.tokens) if up_to is None else up_to, self.block_tokens
        if self.grouped:
            credit = self.credit[sequence.session]
            while len(sequence.table) * size < end and credit:
                sequence.taken.append(credit.pop(0))
                sequence.table.append(sequence.taken[-1])
            end = min(end, len(sequence.table) * size)
        for position in range(sequence.computed, end):
            block = sequence.table[position // size]
            self.cells[block][position % size] = self.cell_of(sequence, position)
            if self.grouped:
                self._window(sequence, block)[position % size] = self.cell_of(sequence, position)
        sequence.computed = max(sequence.computed, end)

    def grow(self, sequence: Running, token: int) -> bool:
        """Appends a token, with a block from the credit where one is needed; False where there is none."""
        if len(sequence.tokens) // self.block_tokens > len(sequence.table):
            return False  # its prompt is not all computed
        if len(sequence.tokens) // self.block_tokens == len(sequence.table):
            credit = self.credit[sequence.session]
            if not credit:
                return False
            block = credit.pop(0)
            sequence.table.append(block)
            sequence.taken.append(block)
        sequence.tokens.append(token)
        return True

    def message(self, sequence: Running, *, release: bool = False) -> SequenceReport:
        """What this sequence has to report."""
        report = SequenceReport(
            sequence.lease_id,
            taken_blocks=np.array(sequence.taken, np.int32),
            tokens=pack(sequence.tokens[sequence.reported :]),
            sealed_tokens=sequence.computed if sequence.copy is None else 0,
            copied=sequence.copied,
            release=release,
        )
        sequence.taken, sequence.copied, sequence.reported = [], False, len(sequence.tokens)
        return report

    def report(
        self,
        *messages: SequenceReport,
        session: SessionId | None = None,
        returned: Sequence[int] = (),
        wanted: int = 0,
        applied_revision: int | None = None,
    ) -> Reported:
        """Sends a report and applies its answer; acknowledges all that was applied before unless told otherwise."""
        session = self.session if session is None else session
        applied = self.revision[session] if applied_revision is None else applied_revision
        answer = self.manager.report(
            session,
            messages,
            returned=np.array(returned, np.int32),
            wanted=wanted,
            applied_revision=applied,
            now_ns=self.now_ns,
        )
        self.credit[session] = [block for block in self.credit[session] if block not in set(returned)]
        self.credit[session] += answer.credit.tolist()
        self.tell(
            session, [*answer.credit.tolist(), *(b for item in answer.replacements for b in item.blocks.tolist())]
        )
        over = {message.lease_id for message in messages if message.release}
        over |= {refusal.lease_id for refusal in answer.refusals}
        self.sequences = [sequence for sequence in self.sequences if sequence.lease_id not in over]
        for replacement in answer.replacements:
            for sequence in self.sequences:
                if sequence.lease_id == replacement.lease_id:
                    end = replacement.first_index + len(replacement.blocks)
                    sequence.table[replacement.first_index : end] = replacement.blocks.tolist()
        self.revision[session] = self.manager.revision
        return answer

    def finish(self, sequence: Running) -> Reported:
        """Computes all of a sequence and releases it."""
        self.compute(sequence)
        return self.report(self.message(sequence, release=True), session=sequence.session)

    def serve(
        self,
        tokens: Sequence[int],
        *,
        tenant: str = "a",
        priority: int = 50,
        no_store: bool = False,
        scope: str = "",
        num_tokens: int = 0,
    ) -> int:
        """A whole request: acquire, compute, release. Returns its cached tokens."""
        sequence = self.acquire(
            tokens, tenant=tenant, priority=priority, no_store=no_store, scope=scope, num_tokens=num_tokens
        )
        cached = sequence.computed
        self.finish(sequence)
        return cached

    def fork(self, parent: Running, samples: Sequence[int], num_tokens: int) -> list[Running]:
        branches = self.manager.fork(parent.session, parent.lease_id, samples, num_tokens, 0)
        made = []
        for branch in branches:
            child = Running(
                parent.session,
                branch.lease_id,
                parent.tenant,
                parent.tokens[:num_tokens],
                branch.blocks.tolist(),
                num_tokens,
                branch.copy,
            )
            self.tell(parent.session, child.table, branch.copy)
            child.reported = num_tokens
            child.scope = parent.scope
            child.prefix_tokens = min(parent.prefix_tokens, num_tokens // self.block_tokens * self.block_tokens)
            made.append(child)
        self.sequences += made
        return made

    def check(self) -> None:
        """Every computed position that the next token of a sequence reads holds what it must; the manager's own check
        passes."""
        violations = self.manager.check_integrity()
        assert violations == [], violations
        for sequence in self.sequences:
            first = max(0, sequence.computed + 1 - self.window_tokens) if self.window_tokens else 0
            for position in range(0 if self.grouped else first, sequence.computed):
                block, slot = divmod(position, self.block_tokens)
                number = sequence.table[block]
                if sequence.copy is not None and number == sequence.copy.target:
                    number = sequence.copy.source
                self._check_cell(self.cells[number][slot], sequence, position)
                if self.grouped and position >= first:
                    self._check_cell(self._window(sequence, number)[slot], sequence, position)

    def _check_cell(self, cell: object, sequence: Running, position: int) -> None:
        """What stands at a position is right; what a tenant had in a wider scope may have become its own by a copy."""
        expected = self.cell_of(sequence, position)
        if cell != expected:
            assert isinstance(cell, tuple) and cell[0].startswith(b"@") and position >= sequence.prefix_tokens
            assert cell[1] == tuple(sequence.tokens[: position + 1])

    def quiet(self) -> None:
        """Nothing is held: no lease, no active block but credit, nothing quarantined."""
        self.check()
        shot = self.manager.snapshot()
        assert (shot.leases, shot.quarantined_blocks) == (0, 0)
        assert shot.active_blocks == shot.credit_blocks
        assert shot.free_blocks + shot.cached_blocks + shot.active_blocks == shot.total_blocks
