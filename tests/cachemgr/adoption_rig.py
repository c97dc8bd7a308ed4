"""A rig whose daemon can die: a journal beside the manager, and a new manager that adopts what it says."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from cachemgr.claim_plans import Claim
from cachemgr.ids import BlockArray, SessionId, TenantId
from cachemgr.journal import IndexJournal
from cachemgr.manager import CacheManager
from cachemgr.recovery import recover
from cachemgr.resuming import Held, Resumed
from common.errors import TesseraError
from tests.cachemgr.core_rig import Rig, Running, pack, root_of, span_of
from tests.cachemgr.journal_rig import make_memory


def claim_of(sequence: Running, *, no_store: bool = False) -> Claim:
    """What the decoder of a sequence presents."""
    return Claim(
        Held(
            sequence.lease_id,
            pack(sequence.tokens),
            np.array(sequence.table, np.int32),
            sequence.computed,
            sequence.copy,
        ),
        TenantId(sequence.tenant),
        root_of(sequence.tenant),
        "request",
        0,
        no_store=no_store,
        prefix=span_of(sequence.scope, sequence.prefix_tokens) if sequence.scope else None,
    )


class DyingRig(Rig):
    """`die` ends the manager as kill -9 would; `adopt` puts a new one in its place; `claim` brings a session back."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        block_tokens: int = 4,
        name_bits: int = 128,
        window_tokens: int = 0,
        num_window_blocks: int = 0,
    ) -> None:
        self.num_blocks, self.num_window_blocks = num_blocks, num_window_blocks
        self.memory = make_memory(num_blocks, block_tokens, num_window_blocks)
        super().__init__(
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            name_bits=name_bits,
            window_tokens=window_tokens,
            num_window_blocks=num_window_blocks,
        )
        self.journal = IndexJournal(self.memory)
        self.manager = self._manager()
        self.credit, self.revision = {}, {}
        self.mirrors: dict[SessionId, dict[int, int]] = {}  # by the session of the manager that died
        self.session = self.attach()

    def _manager(self) -> CacheManager:
        return CacheManager(
            num_blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            window_tokens=self.window_tokens,
            epoch=self.journal.epoch,
            on_free=self._poison,
            journal=self.journal,
            num_window_blocks=self.num_window_blocks,
            on_window_free=self._poison_windows,
        )

    def die(self) -> None:
        """The manager is gone; a new one has adopted what the journal says."""
        self.journal = IndexJournal(self.memory)
        self.mirrors = dict(self.windows_of)
        found = recover(self.journal)
        self.manager = self._manager()
        self.journal.keep_only(self.manager.adopt(found, 0))

    def claim(self, session: SessionId, sequences: Sequence[Running], credit: Sequence[int] = ()) -> Resumed:
        """A new session with what an old one held; its sequences have their new leases, or are gone."""
        said = self.said(session, sequences, credit)
        mirror = self.mirrors[session]
        fresh = self.attach()
        self.windows_of[fresh] = mirror
        answer = self.manager.claim(
            fresh,
            [claim_of(sequence) for sequence in sequences],
            np.array(credit, np.int32),
            now_ns=0,
            window_blocks=said,
        )
        if self.grouped:
            mirror.update(self.manager.window_pairs(self.manager.held_blocks(fresh)).tolist())
        self.credit[fresh] = list(credit)
        for sequence, lease in zip(list(sequences), answer.leases, strict=True):
            sequence.session, sequence.lease_id = fresh, lease
            sequence.reported, sequence.taken = len(sequence.tokens), []
            sequence.copied = False
            if not lease:
                self.sequences.remove(sequence)
        for swap in answer.replacements:
            holder = next(sequence for sequence in self.sequences if sequence.lease_id == swap.lease_id)
            end = swap.first_index + len(swap.blocks)
            holder.table[swap.first_index : end] = swap.blocks.tolist()
        self.revision[fresh] = answer.revision
        if session == self.session:
            self.session = fresh
        return answer

    def said(self, session: SessionId, sequences: Sequence[Running], credit: Sequence[int] = ()) -> BlockArray:
        """The window blocks of what sequences and credit may still read or write, as the decoder knows them."""
        needed = list(credit)
        for sequence in sequences if self.grouped else ():
            needed += sequence.table[max(0, sequence.computed + 1 - self.window_tokens) // self.block_tokens :]
            if sequence.copy is not None:
                needed.append(sequence.copy.source)
        mirror = self.mirrors[session]
        pairs = [(block, mirror[block]) for block in needed] if self.grouped else []
        return np.array(pairs, np.int32).reshape(-1, 2)

    def come_back(self) -> list[Resumed]:
        """Every session claims all that it holds; then the new manager serves."""
        answers = []
        for session, credit in list(self.credit.items()):
            held = [sequence for sequence in self.sequences if sequence.session == session]
            del self.credit[session]
            answers.append(self.claim(session, held, credit))
        self.manager.finish_adoption(now_ns=0)
        return answers


def wander(rig: DyingRig, rng: random.Random, steps: int) -> None:
    """Random work of a few decoders and tenants that collide a lot."""
    for _ in range(steps):
        act = rng.random()
        sequence = rng.choice(rig.sequences) if rig.sequences else None
        if sequence is None or act < 0.3:
            stem = [rng.randrange(3) for _ in range(rng.choice((3, 4, 8, 9)))]
            tokens = [*stem, *(rng.randrange(50) for _ in range(rng.randrange(6)))]
            scope, shared = ("@public", rng.choice((4, 8))) if rng.random() < 0.3 and len(tokens) >= 8 else ("", 0)
            try:
                rig.acquire(
                    tokens,
                    tenant=rng.choice("ab"),
                    session=rng.choice(list(rig.credit)),
                    scope=scope,
                    num_tokens=shared,
                    no_store=False,
                )
            except TesseraError:
                continue
        elif act < 0.5:
            rig.compute(sequence, rng.randint(sequence.computed, len(sequence.tokens)))
        elif act < 0.6:
            if sequence.computed == len(sequence.tokens) and not sequence.copy:
                rig.grow(sequence, rng.randrange(3))
        elif act < 0.7:
            rig.report(session=sequence.session, wanted=rng.randrange(3))
        elif act < 0.85:
            rig.report(rig.message(sequence), session=sequence.session)
        elif act < 0.92 and sequence.computed and not sequence.copy and not sequence.copied:
            rig.report(rig.message(sequence), session=sequence.session)
            rig.fork(sequence, [1, 2], rng.randint(1, sequence.computed))
        else:
            rig.finish(sequence)
