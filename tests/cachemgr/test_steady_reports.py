"""The short way of a report's commonest news: it does what the long way does, and only what is plain goes it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cachemgr import radix, reports, sealing, steady_reports
from cachemgr.ids import LeaseId, TenantId
from cachemgr.journal import IndexJournal
from cachemgr.manager import CacheManager
from cachemgr.quotas import Quota
from cachemgr.recovery import recover
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
    most: int = 5
    looks: bool = True
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
        if len(self.running) < self.most and self.random.random() < 0.5:
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
            elif one.sealed == one.tokens < one.blocks * TOKENS and self.random.random() < 0.1:  # told of once more
                one.tokens += 1
                one.sealed += 1
                said.append(SequenceReport(one.lease_id, NOTHING, pack([1]), one.sealed))
        done = self.manager.report(
            self.session, said, returned=NOTHING, wanted=3, applied_revision=self.manager.revision, now_ns=now_ns
        )
        self.credit += done.credit.tolist()
        refused = [item.lease_id for item in done.refusals]
        self.running = [one for one in self.running if one.lease_id not in refused]
        replaced = [(item.lease_id, item.first_index, item.blocks.tolist()) for item in done.replacements]
        self.answers.append((replaced, refused, done.credit.tolist(), done.revision))
        if self.looks:
            assert self.manager.check_integrity() == []

    def seen(self) -> Any:
        events = [
            (number, item.kind, item.owner, item.lease, item.blocks.tolist(), item.generation)
            for number, item in self.manager._state.events.since(0)
        ]
        return self.answers, events, self.manager.snapshot(), self.memory.tobytes()


@pytest.mark.parametrize(
    ("ceiling", "most", "few", "looks", "grown"),
    [(0, 5, 6, True, 256), (14, 5, 6, True, 256), (0, 12, 1, False, 2), (14, 12, 0, False, 256)],
)
@pytest.mark.parametrize("seed", range(10))
def test_the_short_way_does_what_the_long_way_does(
    seed: int, ceiling: int, most: int, few: int, looks: bool, grown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers, events, blocks and the journal's bytes are the same whether the short way is there or not, whether the
    blocks of many sequences are listed one by one or together, how long a leaf may grow, and whether anybody looks
    between the reports; and it takes most of what is said."""
    monkeypatch.setattr(sealing, "FEW", few)
    for module in (sealing, radix):
        monkeypatch.setattr(module, "MAX_GROWN_BLOCKS", grown)

    def run() -> Any:
        steps = Steps(random.Random(seed), ceiling, most=most, looks=looks)
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


@dataclass(eq=False)
class Together:
    """Sequences that began together and fill their blocks in the same reports, `num` of them."""

    num: int
    window_tokens: int = 0
    num_window_blocks: int = 0

    def __post_init__(self) -> None:
        self.memory = make_memory(BLOCKS, TOKENS, self.num_window_blocks)
        self.manager = CacheManager(
            num_blocks=BLOCKS, block_tokens=TOKENS, epoch=1, journal=IndexJournal(self.memory),
            window_tokens=self.window_tokens, num_window_blocks=self.num_window_blocks,
        )  # fmt: skip
        self.session = self.manager.attach(decoder_name="decoder", process_id=1, now_ns=0)
        self.leases = [self.acquire(self.prompt(number)).lease_id for number in range(self.num)]
        self.report(b"", TOKENS, [])
        self.credit = self.manager.credit(self.session, self.num, 0).tolist()

    def prompt(self, number: int) -> bytes:
        return pack([number] * TOKENS)

    def acquire(self, tokens: bytes) -> Acquired:
        got = self.manager.acquire(
            self.session, tenant=TenantId("a"), root=root_of("a"), tokens=tokens, request_id="r", sample=0, now_ns=0
        )
        assert isinstance(got, Acquired)
        return got

    def report(self, tokens: bytes, sealed: int, taken: list[int]) -> None:
        said = [
            SequenceReport(lease, np.array(taken[number : number + 1], np.int32), tokens, sealed)
            for number, lease in enumerate(self.leases)
        ]
        done = self.manager.report(
            self.session, said, returned=NOTHING, wanted=0, applied_revision=self.manager.revision, now_ns=0
        )
        assert not done.refusals

    def fill(self) -> None:
        """Each fills its second block."""
        self.report(pack([7] * TOKENS), 2 * TOKENS, self.credit)


@pytest.mark.parametrize("num", [4, 8])
def test_what_a_report_left_for_later_is_there_for_whoever_looks(num: int) -> None:
    """A report's answer waits for no block to be listed. The next prompt begins with those blocks; a view, the events
    and the journal have them, few or many."""
    for look in ("acquire", "snapshot", "events", "journal"):
        steps = Together(num)
        before = len(recover(IndexJournal(steps.memory.copy())).blocks)
        steps.fill()
        assert len(steps.manager._core.late) == num
        if look == "acquire":
            assert steps.acquire(steps.prompt(3) + pack([7] * TOKENS + [1])).cached_tokens == 2 * TOKENS
        elif look == "snapshot":
            assert steps.manager.snapshot().indexed_blocks == 2 * num
        elif look == "events":
            published = [item for _, item in steps.manager.events.since(0) if item.kind == "blocks_published"]
            assert sum(len(item.blocks) for item in published) == 2 * num
        else:
            assert len(recover(IndexJournal(steps.memory.copy())).blocks) == before == num
            assert steps.manager.take_ready_waits() == []  # as the service does behind each answer
            assert len(recover(IndexJournal(steps.memory.copy())).blocks) == 2 * num
        assert not steps.manager._core.late


def test_nothing_is_left_for_later_that_the_answer_may_depend_on() -> None:
    """Windows pass over blocks, and credit that is wanted may have to be taken from what is cached."""
    windowed = Together(4, window_tokens=TOKENS + 1)
    windowed.fill()
    assert not windowed.manager._core.late
    grouped = Together(4, window_tokens=TOKENS + 1, num_window_blocks=40)
    grouped.fill()
    assert not grouped.manager._core.late
    wanting = Together(4)
    said = [SequenceReport(lease, np.array([block], np.int32), pack([7] * TOKENS), 2 * TOKENS)
            for lease, block in zip(wanting.leases, wanting.credit, strict=True)]  # fmt: skip
    done = wanting.manager.report(wanting.session, said, returned=NOTHING, wanted=BLOCKS, applied_revision=0, now_ns=0)
    assert len(done.credit) == BLOCKS - 8
    assert not wanting.manager._core.late
