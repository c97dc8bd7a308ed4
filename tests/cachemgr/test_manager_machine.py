"""Any history of two decoders, two tenants and colliding prompts keeps every invariant of the cache manager."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from cachemgr.blocks import BlockState
from cachemgr.ids import SessionId, TenantId
from cachemgr.results import SequenceReport
from common.errors import FailedPrecondition, ResourceExhausted
from tests.cachemgr.core_rig import Rig, Running, root_of

BLOCK_TOKENS = 2
NUM_BLOCKS = 14
PROMPTS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=11)
TENANTS = st.sampled_from(["a", "b"])


class ManagerMachine(RuleBasedStateMachine):
    """Drives the manager through `Rig`, whose arena tells what is cached without asking the index."""

    running = Bundle("running")

    @initialize(name_bits=st.sampled_from([128, 1]))
    def start(self, name_bits: int) -> None:
        self.rig = Rig(num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, name_bits=name_bits)
        self.sessions = [self.rig.session, self.rig.attach()]
        self.gone: list[SessionId] = []
        self.admitted = self.hits = self.hit_tokens = 0
        self.purged: set[str] = set()

    def _alive(self, sequence: Running) -> bool:
        return sequence in self.rig.sequences

    def _resident(self, tenant: str, tokens: list[int]) -> tuple[int, int]:
        """(tokens in whole cached blocks, tokens in all) of the longest cached prefix, from the arena alone."""
        views = self.rig.manager.list_blocks(limit=NUM_BLOCKS).items
        cells = {
            self.rig.cells[view.block][slot]: slot
            for view in views
            if view.published
            for slot in range(view.num_tokens)
        }
        whole_blocks = {
            self.rig.cells[view.block][-1] for view in views if view.published and view.num_tokens == BLOCK_TOKENS
        }
        whole = 0
        while whole + BLOCK_TOKENS < len(tokens) and self._cell(tenant, tokens, whole + BLOCK_TOKENS) in whole_blocks:
            whole += BLOCK_TOKENS
        reach = whole
        while reach + 1 < len(tokens) and self._cell(tenant, tokens, reach + 1) in cells:
            reach += 1
        return whole, reach

    @staticmethod
    def _cell(tenant: str, tokens: list[int], count: int) -> object:
        return (root_of(tenant), tuple(tokens[:count]))

    @rule(
        target=running, tenant=TENANTS, tokens=PROMPTS, which=st.integers(0, 1),
        no_read=st.sampled_from([False, False, False, True]), no_store=st.sampled_from([False, False, False, True]),
        resumed=st.booleans(), priority=st.integers(0, 2),
    )  # fmt: skip
    def begin(
        self, tenant: str, tokens: list[int], which: int, no_read: bool, no_store: bool, resumed: bool, priority: int
    ) -> object:
        return self.acquire(tenant, tokens, which, no_read, no_store, resumed, priority)

    def acquire(
        self, tenant: str, tokens: list[int], which: int, no_read: bool, no_store: bool, resumed: bool, priority: int
    ) -> Running | None:
        whole, reach = (0, 0) if no_read else self._resident(tenant, tokens)
        before = self.rig.manager.snapshot()
        try:
            sequence = self.rig.acquire(
                tokens, tenant=tenant, session=self.sessions[which], no_read=no_read, no_store=no_store,
                resumed=resumed, priority=priority,
            )  # fmt: skip
        except ResourceExhausted as error:
            assert error.usable < error.needed
            after = self.rig.manager.snapshot()
            assert before == after
            return None
        assert sequence.computed in (whole, reach)
        if sequence.computed != reach:  # the copy was given up: with its source pinned it would not have fitted
            fresh = -(-len(tokens) // BLOCK_TOKENS) - whole // BLOCK_TOKENS
            assert fresh > before.usable_blocks - whole // BLOCK_TOKENS - 1
        assert sequence.computed <= len(tokens) - 1
        assert (sequence.copy is not None) == (sequence.computed % BLOCK_TOKENS > 0)
        if not resumed:
            self.admitted += 1
            self.hits += sequence.computed > 0
            self.hit_tokens += sequence.computed
        return sequence

    @rule(sequence=running, part=st.integers(1, 11), wanted=st.integers(0, 2), acknowledge=st.booleans())
    def step(self, sequence: Running | None, part: int, wanted: int, acknowledge: bool) -> None:
        if sequence is None or not self._alive(sequence):
            return
        self.rig.compute(sequence, min(len(sequence.tokens), sequence.computed + part))
        answer = self.rig.report(
            self.rig.message(sequence), session=sequence.session, wanted=wanted,
            applied_revision=None if acknowledge else 0,
        )  # fmt: skip
        assert answer.refusals == []

    @rule(sequence=running, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def decode(self, sequence: Running | None, tokens: list[int]) -> None:
        if sequence is None or not self._alive(sequence):
            return
        if not self.rig.credit[sequence.session]:
            self.ask_credit(self.sessions.index(sequence.session), 2)
        for token in tokens:
            if not self.rig.grow(sequence, token):
                break
        self.rig.compute(sequence)
        answer = self.rig.report(self.rig.message(sequence), session=sequence.session)
        assert answer.refusals == []

    @rule(sequence=consumes(running), tell=st.sampled_from([True, True, False]))
    def release(self, sequence: Running | None, tell: bool) -> None:
        if sequence is None or not self._alive(sequence):
            return
        if tell:
            self.rig.compute(sequence)
        self.rig.report(self.rig.message(sequence, release=True), session=sequence.session)

    @rule(target=running, sequence=running, share=st.integers(1, 11))
    def fork(self, sequence: Running | None, share: int) -> object:
        if sequence is None or not self._alive(sequence) or sequence.copy is not None:
            return None
        self.rig.report(self.rig.message(sequence), session=sequence.session)
        count = min(share, sequence.computed)
        if not count:
            return None
        before = self.rig.manager.snapshot()
        made = self.rig.fork(sequence, [1, 2], count)
        if not made:
            assert count % BLOCK_TOKENS and before.usable_blocks < 2
            return None
        assert all((branch.copy is not None) == (count % BLOCK_TOKENS > 0) for branch in made)
        return made[0]

    @rule(sequence=running, keep=st.integers(1, 11))
    def rollback(self, sequence: Running | None, keep: int) -> None:
        if sequence is None or not self._alive(sequence) or sequence.copy is not None:
            return
        self.rig.report(self.rig.message(sequence), session=sequence.session)
        keep = min(keep, len(sequence.tokens))
        try:
            plan = self.rig.manager.rollback(sequence.session, sequence.lease_id, keep, 0)
        except ResourceExhausted:
            return
        sequence.tokens = sequence.tokens[:keep]
        sequence.reported = keep
        sequence.computed = min(sequence.computed, keep)
        sequence.table = sequence.table[: -(-keep // BLOCK_TOKENS)]
        if plan is not None:
            assert plan.num_tokens == sequence.computed % BLOCK_TOKENS
            sequence.table[sequence.computed // BLOCK_TOKENS] = plan.target
            sequence.copy = plan
        assert (
            sequence.copy is not None or self.rig.manager.make_writable(sequence.session, sequence.lease_id, 0) is None
        )

    @rule(which=st.integers(0, 1), wanted=st.integers(0, 4))
    def ask_credit(self, which: int, wanted: int) -> None:
        session = self.sessions[which]
        usable = self.rig.manager.snapshot().usable_blocks
        granted = self.rig.manager.credit(session, wanted, 0).tolist()
        assert len(granted) == min(wanted, usable)
        self.rig.credit[session] += granted

    @rule(which=st.integers(0, 1), count=st.integers(0, 4))
    def return_credit(self, which: int, count: int) -> None:
        session = self.sessions[which]
        self.rig.report(session=session, returned=self.rig.credit[session][:count])

    @rule(count=st.integers(1, 4), tenant=st.sampled_from([None, "a", "b"]))
    def evict(self, count: int, tenant: str | None) -> None:
        before = self.rig.manager.snapshot()
        dropped = self.rig.manager.evict(num_blocks=count, tenant=None if tenant is None else TenantId(tenant))
        cached = {view.tenant: view.cached_blocks for view in before.tenants}
        most = before.cached_blocks if tenant is None else cached.get(TenantId(tenant), 0)
        assert dropped == min(count, most)

    def _evict_everything(self) -> None:
        try:
            self.rig.manager.evict(everything=True)
        except FailedPrecondition:
            shot = self.rig.manager.snapshot()
            assert self.rig.sequences or shot.indexed_blocks > shot.cached_blocks
        else:
            assert self.rig.manager.snapshot().indexed_blocks == 0

    def _purge(self, tenant: str) -> None:
        self.rig.manager.purge(TenantId(tenant))
        assert self.rig.manager.list_prefixes(tenant=TenantId(tenant)).items == []

    def _detach(self, which: int, dead: bool) -> None:
        session = self.sessions[which]
        active = self.rig.manager.snapshot()
        outcome = self.rig.manager.detach(session, process_dead=dead, now_ns=0)
        assert outcome.leases == sum(sequence.session == session for sequence in self.rig.sequences)
        assert (outcome.quarantined_blocks == 0) if dead else (outcome.freed_blocks == 0)
        after = self.rig.manager.snapshot()
        assert after.quarantined_blocks == active.quarantined_blocks + outcome.quarantined_blocks
        if outcome.quarantined_blocks:
            self.gone.append(session)
        self.rig.sequences = [sequence for sequence in self.rig.sequences if sequence.session != session]
        self.sessions[which] = self.rig.attach()

    def _bad_report(self, sequence: Running | None, sealed: int, neighbour: Running | None) -> None:
        """A report that lies ends its own lease and no other."""
        if sequence is None or not self._alive(sequence):
            return
        messages = [SequenceReport(sequence.lease_id, sealed_tokens=sealed)]
        beside = neighbour is not None and self._alive(neighbour) and neighbour is not sequence
        if neighbour is not None and beside and neighbour.session == sequence.session:
            messages.append(self.rig.message(neighbour))
        answer = self.rig.report(*messages, session=sequence.session)
        assert [refusal.lease_id for refusal in answer.refusals] == [sequence.lease_id]
        self.rig.credit[sequence.session] += sequence.taken

    @rule(
        kind=st.sampled_from(["lie", "lie", "reset", "purge", "dead", "lost"]), which=st.integers(0, 1), tenant=TENANTS,
        sealed=st.sampled_from([-1, 1000]), sequence=running, neighbour=running,
    )  # fmt: skip
    def disaster(
        self, kind: str, which: int, tenant: str, sealed: int, sequence: Running | None, neighbour: Running | None
    ) -> None:
        """What ends more than one sequence, in one rule so that it stays rare."""
        if kind == "lie":
            self._bad_report(sequence, sealed, neighbour)
        elif kind == "reset":
            self._evict_everything()
        elif kind == "purge":
            self._purge(tenant)
        else:
            self._detach(which, kind == "dead")

    @rule(tenant=TENANTS, tokens=PROMPTS, which=st.integers(0, 1), priority=st.integers(0, 2))
    def serve(self, tenant: str, tokens: list[int], which: int, priority: int) -> None:
        """A whole request at once."""
        sequence = self.acquire(tenant, tokens, which, False, False, False, priority)
        if sequence is not None:
            self.rig.finish(sequence)

    @rule(tenant=TENANTS, tokens=PROMPTS, both=st.booleans())
    def serve_twice(self, tenant: str, tokens: list[int], both: bool) -> None:
        """Two decoders compute the same prompt side by side: one copy remains."""
        made = [self.acquire(tenant, tokens, which, both, False, False, 0) for which in (0, 1)]
        alive = [sequence for sequence in made if sequence is not None]
        for sequence in alive:
            self.rig.compute(sequence)
            self.rig.report(self.rig.message(sequence), session=sequence.session, applied_revision=0)
        self.rig.check()
        for sequence in alive:
            self.rig.report(self.rig.message(sequence, release=True), session=sequence.session)

    @precondition(lambda self: self.gone)
    @rule()
    def process_gone(self) -> None:
        session = self.gone.pop()
        assert self.rig.manager.process_gone(session) > 0
        assert self.rig.manager.process_gone(session) == 0

    @invariant()
    def cells_and_structures_are_right(self) -> None:
        self.rig.check()

    @invariant()
    def views_agree_with_the_decoders(self) -> None:
        shot = self.rig.manager.snapshot()
        states = [view.state for view in self.rig.manager.list_blocks(limit=NUM_BLOCKS).items]
        counts = (shot.free_blocks, shot.active_blocks, shot.cached_blocks, shot.quarantined_blocks)
        assert counts == tuple(states.count(state) for state in BlockState)
        assert sum(counts) == NUM_BLOCKS
        assert (shot.hits + shot.misses, shot.hits, shot.hit_tokens) == (self.admitted, self.hits, self.hit_tokens)
        assert shot.leases == len(self.rig.sequences)
        held = np.zeros(NUM_BLOCKS + 1, int)
        for sequence in self.rig.sequences:
            held[[block for block in sequence.table if block not in sequence.taken]] += 1
        for view in self.rig.manager.list_blocks(limit=NUM_BLOCKS).items:
            assert view.references - view.published >= held[view.block]

    def teardown(self) -> None:
        """When everything ends, nothing is held."""
        if not hasattr(self, "rig"):
            return
        for sequence in list(self.rig.sequences):
            self.rig.report(self.rig.message(sequence, release=True), session=sequence.session)
        for session in self.sessions:
            self.rig.report(session=session, returned=self.rig.credit[session])
        for session in self.gone:
            self.rig.manager.process_gone(session)
        self.rig.quiet()
        assert self.rig.manager.snapshot().active_blocks == 0


ManagerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestManagerMachine = ManagerMachine.TestCase
