"""Who gives way where sequences of one tenant reach its ceiling in the same report: the last ones, and never all."""

from __future__ import annotations

import pytest

from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from common.errors import ResourceExhausted
from tests.cachemgr.core_rig import Rig, Running
from tests.cachemgr.test_quotas import used

B = 4
A = TenantId("a")


def full(rig: Rig, num: int, *, ceiling: int, blocks: int = 2, tenant: str = "a") -> list[Running]:
    """So many sequences whose blocks are all computed and none reported; the tenant has no block left for a further."""
    made = [rig.acquire(range(1000 * n, 1000 * n + blocks * B), tenant=tenant) for n in range(1, num + 1)]
    rig.manager.set_quota(TenantId(tenant), Quota(ceiling_blocks=ceiling))
    for sequence in made:
        rig.compute(sequence)
    rig.report(wanted=2 * num)
    return made


def grown(rig: Rig, *sequences: Running) -> list[Running]:
    """Each has a token that needs a block of its own."""
    for sequence in sequences:
        assert rig.grow(sequence, 7)
    return list(sequences)


@pytest.mark.parametrize("is_published", [False, True])
def test_the_last_of_several_gives_way_and_the_others_go_on(is_published: bool) -> None:
    """Of three that need a block in the same step at the ceiling, the worst ranked ends with the numbers; its blocks
    stay as they are until the decoder acknowledges, and the tenant is never above its ceiling."""
    rig = Rig()
    first, second, third = full(rig, 3, ceiling=6)
    if is_published:
        rig.report(*map(rig.message, (first, second, third)))
    before = {block: list(rig.cells[block]) for block in third.table}
    answer = rig.report(*map(rig.message, grown(rig, first, second, third)))
    (refusal,) = answer.refusals
    assert refusal.lease_id == third.lease_id
    assert isinstance(refusal.error, ResourceExhausted)
    assert (refusal.error.reason, refusal.error.needed, refusal.error.usable) == ("QUOTA_EXCEEDED", 1, 0)
    assert used(rig, "a") <= 6
    assert {block: rig.cells[block] for block in third.table[:2]} == before
    for sequence in (first, second):
        rig.compute(sequence)
    rig.check()
    rig.report()  # acknowledges
    assert rig.manager.snapshot().free_blocks + rig.manager.snapshot().cached_blocks == 32 - 6 - 3  # credit
    rig.finish(first)
    rig.finish(second)
    rig.check()


@pytest.mark.parametrize("is_published", [False, True])
def test_one_that_ends_makes_room_for_all_that_it_can(is_published: bool) -> None:
    """Where the last has blocks enough to give, all others go on; no more of its cached blocks go than they need."""
    rig = Rig()
    *others, last = full(rig, 4, ceiling=16, blocks=4)
    if is_published:
        rig.report(*map(rig.message, (*others, last)))
    answer = rig.report(*map(rig.message, grown(rig, *others, last)))
    assert [refusal.lease_id for refusal in answer.refusals] == [last.lease_id]
    assert used(rig, "a") == (16 if is_published else 15)
    rig.report()
    rig.check()
    rig.manager.set_quota(A, Quota())
    assert rig.acquire(range(4000, 4000 + 4 * B)).computed == (B if is_published else 0)


def test_nobody_ends_in_vain() -> None:
    """Where those behind the best ranked have too little to give for it, it ends itself and they go on."""
    rig = Rig()
    first, second, third = full(rig, 3, ceiling=6, blocks=2)
    rig.report(*map(rig.message, (first, second, third)), wanted=6)
    for _ in range(4 * B + 1):
        assert rig.grow(first, 7)
    answer = rig.report(*map(rig.message, (first, *grown(rig, second, third))))
    assert [refusal.lease_id for refusal in answer.refusals] == [first.lease_id]
    rig.check()


def test_what_another_holds_is_not_given() -> None:
    """Two branches that share all of their blocks have nothing to give: then the better ranked ends, and they go on."""
    rig = Rig()
    first, second = full(rig, 2, ceiling=4)
    rig.report(rig.message(first), rig.message(second))
    (branch,) = rig.fork(second, [1], 2 * B)
    answer = rig.report(*map(rig.message, grown(rig, first, second, branch)))
    assert [refusal.lease_id for refusal in answer.refusals] == [first.lease_id]
    rig.check()


def test_a_release_in_the_same_report_makes_room_first() -> None:
    """Nobody ends where the report says of another that it is over, wherever it stands there."""
    rig = Rig()
    first, second = full(rig, 2, ceiling=4)
    grown(rig, first)
    answer = rig.report(rig.message(first), rig.message(second, release=True))
    assert answer.refusals == []
    assert used(rig, "a") <= 4
    rig.check()


def test_tenants_give_way_each_for_itself() -> None:
    """One tenant's ceiling ends no sequence of another, and both end their own last one in the same report."""
    rig = Rig()
    sequences = [*full(rig, 2, ceiling=4), *full(rig, 2, ceiling=4, tenant="b")]
    answer = rig.report(*map(rig.message, grown(rig, *sequences)))
    assert {refusal.lease_id for refusal in answer.refusals} == {sequences[1].lease_id, sequences[3].lease_id}
    rig.check()
