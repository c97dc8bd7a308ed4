"""The short way of a report's commonest news: it does what the long way does, and only what is plain goes it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cachemgr import reports, steady_reports
from cachemgr.ids import LeaseId, TenantId
from cachemgr.journal import IndexJournal
from cachemgr.manager import CacheManager
from cachemgr.quotas import Quota
from cachemgr.results import Acquired, SequenceReport
from common.errors import ResourceExhausted
from tests.cachemgr.core_rig import pack, root_of
from tests.cachemgr.journal_rig import make_memory

BLOCKS, TOKENS = 60, 4
NOTHING = np.zeros(0, np.int32)


@dataclass(eq=False)
class Running:
    """A lease: its known tokens, those sealed, and the blocks of its table."""

    lease_id: LeaseId
    tokens: int
    sealed: int
    blocks: int
    copy: bool


@dataclass(eq=False)
class Steps:
    """A decoder that runs a few sequences, and what it was answered."""

    random: random.Random
    ceiling: int
    memory: Any = field(default_factory=lambda: make_memory(BLOCKS, TOKENS))
    running: list[Running] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = CacheManager(num_blocks=BLOCKS, block_tokens=TOKENS, epoch=1, journal=IndexJournal(self.memory))
        self.session = self.manager.attach(decoder_name="decoder", process_id=1, now_ns=0)
        self.credit: list[int] = []
        if self.ceiling:
            self.manager.set_quota(TenantId("a"), Quota(ceiling_blocks=self.ceiling))

    def begin(self, now_ns: int) -> None:
        prompt = [self.random.randrange(2) for _ in range(self.random.randrange(1, 12))]
        tenant = self.random.choice("ab")
        try:
            got = self.manager.acquire(
                self.session,
                tenant=TenantId(tenant),
                root=root_of(tenant),
                tokens=pack(prompt),
                request_id="r",
                sample=0,
                no_store=self.random.random() < 0.1,
                priority=self.random.choice((10, 50)),
                ttl_ns=self.random.choice((0, 9)),
                now_ns=now_ns,
            )
        except ResourceExhausted:
            return
        assert isinstance(got, Acquired)
        self.answers.append((got.lease_id, got.blocks.tolist(), got.cached_tokens))
        sealed = got.cached_tokens
        self.running.append(Running(got.lease_id, len(prompt), sealed, len(got.blocks), got.copy is not None))

    def step(self, now_ns: int) -> None:
        if len(self.running) < 5 and self.random.random() < 0.5:
            self.begin(now_ns)
        said = []
        for one in list(self.running):
            fresh = self.random.choice((0, 1, 1, 1, 1, 2, 5))
            tokens = pack([self.random.randrange(2) for _ in range(fresh)])
            one.tokens += fresh
            missing = -(-one.tokens // TOKENS) - one.blocks
            taken = [self.credit.pop() for _ in range(min(missing, len(self.credit)))] if missing > 0 else []
            if self.random.random() < 0.02:
                taken = [*taken, 1]  # another's, or nobody's
            one.blocks += len(taken)
            lag = self.random.choice((0, 0, 0, 1))
            one.sealed = max(one.sealed, min(one.tokens - lag, one.blocks * TOKENS))
            release = self.random.random() < 0.05
            blocks = np.array(taken, np.int32) if taken else NOTHING
            said.append(SequenceReport(one.lease_id, blocks, tokens, one.sealed, one.copy, release))
            one.copy = False
            if release:
                self.running.remove(one)
        done = self.manager.report(
            self.session, said, returned=NOTHING, wanted=3, applied_revision=self.manager.revision, now_ns=now_ns
        )
        self.credit += done.credit.tolist()
        refused = [item.lease_id for item in done.refusals]
        self.running = [one for one in self.running if one.lease_id not in refused]
        replaced = [(item.lease_id, item.first_index, item.blocks.tolist()) for item in done.replacements]
        self.answers.append((replaced, refused, done.credit.tolist(), done.revision))
        assert self.manager.check_integrity() == []

    def seen(self) -> Any:
        events = [
            (number, item.kind, item.owner, item.lease, item.blocks.tolist(), item.generation)
            for number, item in self.manager._state.events.since(0)
        ]
        return self.answers, events, self.manager.snapshot(), self.memory.tobytes()


@pytest.mark.parametrize("ceiling", [0, 14])
@pytest.mark.parametrize("seed", range(10))
def test_the_short_way_does_what_the_long_way_does(seed: int, ceiling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, events, blocks and the journal's bytes are the same whether the short way is there or not; and it takes
    most of what is said."""

    def run() -> Any:
        steps = Steps(random.Random(seed), ceiling)
        for number in range(60):
            steps.step(number)
        return steps.seen()

    num_long = num_all = 0

    def counted(state: Any, session: Any, sequences: Any, waiting: Any) -> Iterator[SequenceReport]:
        nonlocal num_long
        for sequence in steady_reports.others(state, session, sequences, waiting):
            num_long += 1
            yield sequence

    def everything(state: Any, session: Any, sequences: Iterable[Any], waiting: Any) -> Iterator[SequenceReport]:
        nonlocal num_all
        for fields in sequences:
            num_all += 1
            yield SequenceReport._make(fields)

    monkeypatch.setattr(reports, "others", counted)
    short = run()
    monkeypatch.setattr(reports, "others", everything)
    assert run() == short
    assert 0 < num_long < 0.7 * num_all
