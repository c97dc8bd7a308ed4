"""Quotas: floors, ceilings, weights and borrowing; nobody passes its ceiling, and nobody takes what a floor keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cachemgr.ids import TenantId
from cachemgr.quotas import Quota, blocks_are
from common.errors import InvalidArgument, ResourceExhausted
from tests.cachemgr.core_rig import Rig, Running

B = 4
A, C = TenantId("a"), TenantId("c")


def used(rig: Rig, tenant: str) -> int:
    return rig.manager.quota_usage(TenantId(tenant)).used_blocks


def prompts(rig: Rig, tenant: str, numbers: range, blocks: int = 2) -> None:
    """Serves prompts of whole blocks, each with tokens of its own."""
    for number in numbers:
        rig.serve(range(number * 1000, number * 1000 + blocks * B), tenant=tenant)


def resident(rig: Rig, tenant: str, numbers: range, blocks: int = 2) -> list[int]:
    """Which of those prompts are still there in whole; looking changes their recency."""
    found = []
    for number in numbers:
        tokens = range(number * 1000, number * 1000 + blocks * B)
        views = rig.manager.list_prefixes(limit=1000, tenant=TenantId(tenant)).items
        starts = {rig.cells[view.blocks[0]][0] for view in views if len(view.blocks) == blocks}
        found += [number] if (tenant.encode().ljust(32, b"."), (tokens[0],)) in starts else []
    return found


def test_a_flood_leaves_a_floor_whole() -> None:
    """What one tenant has below its floor is still a hit after another filled the pool many times over."""
    rig = Rig(num_blocks=32)
    rig.manager.set_quota(A, Quota(floor_blocks=12))
    prompts(rig, "a", range(6))
    prompts(rig, "b", range(100, 150))
    rig.check()
    assert used(rig, "a") == 12
    assert resident(rig, "a", range(6)) == list(range(6))


def test_without_a_floor_the_flood_takes_its_share() -> None:
    """The control: without a floor the same flood leaves the tenant its share, which is less than it had."""
    rig = Rig(num_blocks=16)
    prompts(rig, "a", range(6))
    rig.manager.set_quota(C, Quota(weight=2.0))
    prompts(rig, "c", range(100, 150))
    assert used(rig, "a") < 12


def test_a_floor_is_refused_to_others_with_numbers() -> None:
    """A request that would need what a floor keeps is told what can be had, and that waiting will not help."""
    rig = Rig(num_blocks=16)
    rig.manager.set_quota(A, Quota(floor_blocks=10))
    prompts(rig, "a", range(5))
    with pytest.raises(ResourceExhausted) as caught:
        rig.acquire(range(7 * B), tenant="b")
    assert (caught.value.reason, caught.value.needed, caught.value.usable) == ("EXCEEDS_USABLE", 7, 6)
    rig.finish(rig.acquire(range(6 * B), tenant="b"))
    rig.finish(rig.acquire(range(9000, 9000 + 16 * B - 6 * B), tenant="a"))  # its own floor is no limit to itself
    rig.quiet()


def test_credit_never_takes_a_floor() -> None:
    """Blocks that a decoder is lent ahead of need come from what floors leave."""
    rig = Rig(num_blocks=16)
    rig.manager.set_quota(A, Quota(floor_blocks=10))
    prompts(rig, "a", range(8))
    assert len(rig.manager.credit(rig.session, 16, 0)) == 6
    assert used(rig, "a") == 10


def test_a_ceiling_holds_against_an_empty_pool() -> None:
    """A tenant at its ceiling drops its own idle blocks for new ones, however much of the pool is free."""
    rig = Rig(num_blocks=64)
    rig.manager.set_quota(A, Quota(ceiling_blocks=8))
    prompts(rig, "a", range(10))
    assert used(rig, "a") == 8
    assert resident(rig, "a", range(10)) == [6, 7, 8, 9]
    held = rig.acquire(range(50_000, 50_000 + 6 * B), tenant="a")
    with pytest.raises(ResourceExhausted) as caught:
        rig.acquire(range(60_000, 60_000 + 3 * B), tenant="a")
    error = caught.value
    assert (error.reason, error.subject, error.needed, error.usable) == ("QUOTA_EXCEEDED", "tenant_blocks", 3, 2)
    rig.acquire(range(60_000, 60_000 + 3 * B), tenant="b")
    rig.finish(held)
    rig.check()


def test_what_is_shared_is_charged_once() -> None:
    """A second request for a resident prompt needs nothing new below the ceiling but its last block."""
    rig = Rig(num_blocks=64)
    rig.manager.set_quota(A, Quota(ceiling_blocks=7))
    shared = range(5 * B)
    rig.serve(shared, tenant="a")
    both = [rig.acquire([*shared, 900 + number], tenant="a") for number in range(2)]
    assert used(rig, "a") == 7
    with pytest.raises(ResourceExhausted, match="ceiling leaves 0"):
        rig.acquire([*shared, 990], tenant="a")
    for sequence in both:
        rig.finish(sequence)
    rig.quiet()


def test_growth_above_a_ceiling_refuses_that_sequence_alone() -> None:
    """A sequence whose growth passes the ceiling is refused with numbers; its blocks come back; others go on."""
    rig = Rig(num_blocks=64)
    rig.manager.set_quota(A, Quota(ceiling_blocks=4))
    first = rig.acquire(range(2 * B), tenant="a")
    second = rig.acquire(range(500, 500 + 2 * B), tenant="a")
    other = rig.acquire(range(2 * B), tenant="b")
    rig.report(wanted=3)
    for sequence in (first, other):
        rig.compute(sequence)
        assert rig.grow(sequence, 7)
        rig.compute(sequence)
    answer = rig.report(rig.message(first), rig.message(other))
    (refusal,) = answer.refusals
    assert refusal.lease_id == first.lease_id
    assert isinstance(refusal.error, ResourceExhausted)
    assert (refusal.error.reason, refusal.error.needed, refusal.error.usable) == ("QUOTA_EXCEEDED", 1, 0)
    rig.report()  # acknowledges: the refused blocks are free
    assert (used(rig, "a"), used(rig, "b")) == (2, 3)
    rig.finish(second)
    rig.finish(other)
    rig.check()


def test_growth_may_push_out_own_idle_blocks() -> None:
    """Below the ceiling's reach of idle blocks, growth goes on: the oldest of its own goes."""
    rig = Rig(num_blocks=64)
    rig.manager.set_quota(A, Quota(ceiling_blocks=4))
    prompts(rig, "a", range(1))
    grower = rig.acquire(range(500, 500 + 2 * B), tenant="a")
    rig.report(wanted=1)
    rig.compute(grower)
    assert rig.grow(grower, 7)
    rig.compute(grower)
    assert rig.report(rig.message(grower)).refusals == []
    assert used(rig, "a") == 4
    rig.finish(grower)
    rig.check()


def test_fork_rollback_and_make_writable_respect_a_ceiling() -> None:
    """A branch that needs a copy of a tail needs a block of the tenant's."""
    rig = Rig(num_blocks=64)
    sequence = rig.acquire(range(B + 2), tenant="a")
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    rig.manager.set_quota(A, Quota(ceiling_blocks=2))
    assert rig.fork(sequence, [1], B + 1) == []
    rig.manager.set_quota(A, Quota(ceiling_blocks=3))
    (branch,) = rig.fork(sequence, [1], B + 1)
    rig.run_copy(branch)
    rig.report(rig.message(branch))
    shared = rig.fork(branch, [2], B)
    assert len(shared) == 1
    rig.check()


def test_idle_room_is_lent_and_taken_back_by_weight() -> None:
    """One tenant may fill the pool alone; a second with three times its weight takes three quarters, and no more."""
    rig = Rig(num_blocks=32)
    rig.manager.set_quota(C, Quota(weight=3.0))
    prompts(rig, "a", range(20))
    assert used(rig, "a") == 32
    prompts(rig, "c", range(100, 150))
    assert (used(rig, "a"), used(rig, "c")) == (8, 24)
    prompts(rig, "a", range(200, 220))
    assert (used(rig, "a"), used(rig, "c")) == (8, 24)


def test_usage_and_refusals_of_quotas() -> None:
    """Usage names quota, blocks and share; numbers that no pool could keep are refused."""
    rig = Rig(num_blocks=32)
    rig.manager.set_quota(A, Quota(floor_blocks=8, weight=1.0, pin_blocks=3))
    rig.serve(range(3 * B), tenant="a")
    rig.serve(range(B), tenant="b")
    usage = rig.manager.quota_usage(A)
    assert (usage.quota.pin_blocks, usage.used_blocks, usage.idle_blocks, usage.share_blocks) == (3, 3, 3, 20)
    assert rig.manager.quota_usage(TenantId("nobody")).used_blocks == 0
    for bad in (
        Quota(floor_blocks=-1),
        Quota(floor_blocks=5, ceiling_blocks=4),
        Quota(weight=0.0),
        Quota(weight=float("nan")),
    ):
        with pytest.raises(InvalidArgument):
            rig.manager.set_quota(C, bad)
    with pytest.raises(ResourceExhausted) as caught:
        rig.manager.set_quota(C, Quota(floor_blocks=25))
    assert (caught.value.needed, caught.value.usable) == (25, 24)
    rig.manager.set_quota(A, Quota())
    rig.manager.set_quota(C, Quota(floor_blocks=25))


NAMES = ("a", "b", "c")
NUM_BLOCKS = 24


class QuotaMachine(RuleBasedStateMachine):
    """Any history of three tenants with floors, ceilings and weights keeps invariant 8 and refuses with a reason."""

    @initialize()
    def start(self) -> None:
        self.rig = Rig(num_blocks=NUM_BLOCKS, block_tokens=2)
        self.quotas = {name: Quota() for name in NAMES}
        self.before = dict.fromkeys(NAMES, 0)
        self.over = dict.fromkeys(NAMES, 0)  # what a lowered ceiling left above it
        self.actor = ""

    @rule(name=st.sampled_from(NAMES), floor=st.integers(0, 8), ceiling=st.sampled_from([0, 4, 9, 24]),
          weight=st.sampled_from([0.5, 1.0, 3.0]))  # fmt: skip
    def set_quota(self, name: str, floor: int, ceiling: int, weight: float) -> None:
        self.actor = ""
        quota = Quota(min(floor, ceiling) if ceiling else floor, ceiling, weight)
        self.rig.manager.set_quota(TenantId(name), quota)
        self.quotas[name] = quota
        self.over[name] = used(self.rig, name)

    def _limits(self, name: str) -> tuple[int, int]:
        """(blocks that can be had of the pool, blocks that the ceiling leaves), all idle blocks of its own counted."""
        shot = self.rig.manager.snapshot()
        views = {view.tenant: view for view in shot.tenants}
        room = shot.free_blocks
        for other in NAMES:
            view = views.get(TenantId(other))
            if view is not None:
                spare = view.cached_blocks + view.active_blocks - self.quotas[other].floor_blocks
                room += view.cached_blocks if other == name else max(0, min(view.cached_blocks, spare))
        ceiling = self.quotas[name].ceiling_blocks
        own = views.get(TenantId(name))
        left = NUM_BLOCKS if not ceiling else max(0, ceiling - (own.active_blocks if own else 0))
        return room, left

    @rule(name=st.sampled_from(NAMES), start=st.integers(0, 12), count=st.integers(1, 14), keep=st.booleans())
    def admit(self, name: str, start: int, count: int, keep: bool) -> None:
        """All new tokens, so that what is needed is known without asking the index."""
        self.actor = name
        room, left = self._limits(name)
        tokens = [10_000 * self.rig.manager.revision + start, *range(1, count)]
        needed = -(-count // 2)
        try:
            sequence = self.rig.acquire(tokens, tenant=name)
        except ResourceExhausted as error:
            assert needed > (left if error.reason == "QUOTA_EXCEEDED" else room), error
            return
        assert needed <= min(room, left)
        if not keep:
            self.rig.finish(sequence)

    @rule(index=st.integers(0, 9), steps=st.integers(1, 4))
    def decode(self, index: int, steps: int) -> None:
        if not self.rig.sequences:
            return
        sequence: Running = self.rig.sequences[index % len(self.rig.sequences)]
        self.actor = ""  # credit is nobody's
        if not self.rig.credit[sequence.session]:
            self.rig.report(wanted=2)
            self._no_floor_was_touched()
        self.actor = sequence.tenant
        for token in range(steps):
            if not self.rig.grow(sequence, token):
                break
        self.rig.compute(sequence)
        answer = self.rig.report(self.rig.message(sequence), applied_revision=0)
        for refusal in answer.refusals:
            assert isinstance(refusal.error, ResourceExhausted) and refusal.error.reason == "QUOTA_EXCEEDED"
        self.rig.report()  # acknowledges, so that what is given up goes now and in nobody else's turn

    @rule(index=st.integers(0, 9))
    def finish(self, index: int) -> None:
        if self.rig.sequences:
            sequence = self.rig.sequences[index % len(self.rig.sequences)]
            self.actor = sequence.tenant
            self.rig.finish(sequence)

    def _no_floor_was_touched(self) -> None:
        for name in NAMES:
            now = used(self.rig, name)
            if name != self.actor:
                assert now >= min(self.before[name], self.quotas[name].floor_blocks), name
            self.before[name] = now

    @invariant()
    def nobody_is_above_its_ceiling_or_pushed_below_its_floor(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.check()
        for name in NAMES:
            ceiling = self.quotas[name].ceiling_blocks
            self.over[name] = min(self.over[name], max(used(self.rig, name), ceiling))
            assert not ceiling or used(self.rig, name) <= max(ceiling, self.over[name])
        self._no_floor_was_touched()


QuotaMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestQuotaMachine = QuotaMachine.TestCase


def test_eviction_of_others_is_in_one_order() -> None:
    """Of several owners the lower priority goes first, then what was used longer ago, whoever's it is."""
    rig = Rig(num_blocks=12)
    rig.serve(range(2 * B), tenant="a", priority=10)
    rig.serve(range(2 * B), tenant="b")
    rig.serve(range(100, 100 + 2 * B), tenant="a")
    rig.serve(range(100, 100 + 2 * B), tenant="b")
    order = []
    while rig.manager.snapshot().cached_blocks:
        before = {view.block: (view.tenant, rig.cells[view.block][0]) for view in rig.manager.list_blocks().items}
        free = {view.block for view in rig.manager.list_blocks().items if view.generation}
        rig.manager.evict(num_blocks=1)
        gone = {view.block for view in rig.manager.list_blocks().items if view.generation} - free
        order += [before[block][0] for block in gone]
    assert order == ["a", "a", "b", "b", "a", "a", "b", "b"]
    assert np.array_equal(rig.manager.take_scrub(), np.zeros(0, np.int32))


def test_a_refusal_counts_as_one_says_it() -> None:
    """One block is needed, two blocks are."""
    assert (blocks_are(1), blocks_are(2), blocks_are(0)) == ("1 block is", "2 blocks are", "0 blocks are")
