"""The last resort: when only prefixes of a wider scope with private tails below are left, tails go, and no more."""

from __future__ import annotations

import pytest

from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from common.errors import ResourceExhausted
from tests.cachemgr.core_rig import Rig
from tests.cachemgr.test_quotas import used

B = 4
TEAM = "@group:team"
PRIVATE, SHARED = range(4 * B), range(1000, 1000 + 4 * B)


def cached(rig: Rig, tokens: range | list[int], tenant: str, num_tokens: int = 0) -> int:
    """Tokens that a prompt of these and one more finds."""
    scope = TEAM if num_tokens else ""
    sequence = rig.acquire([*tokens, 7], tenant=tenant, scope=scope, num_tokens=num_tokens)
    found = sequence.computed
    rig.finish(sequence)
    return found


def crowded(*tenants: str, num_blocks: int, floor: int) -> Rig:
    """Each tenant has, first, 4 private blocks, then 2 below 4 blocks of the team's, all idle, all within its floor."""
    rig = Rig(num_blocks=num_blocks)
    for tenant in tenants:
        rig.manager.set_quota(TenantId(tenant), Quota(floor_blocks=floor))
        rig.serve(PRIVATE, tenant=tenant)
    for place, tenant in enumerate(tenants):
        rig.serve([*SHARED, *range(2000 + place, 2000 + place + 2 * B)], tenant=tenant, scope=TEAM, num_tokens=4 * B)
    return rig


@pytest.mark.parametrize(("wanted", "shared_left"), [(3, 4), (4, 4), (5, 3), (6, 2)])
def test_at_the_floor_nothing_goes_but_tails(wanted: int, shared_left: int) -> None:
    """What a tenant has elsewhere stays up to its floor, though it was used longer ago; of the team's prefix goes what
    is needed beside the tail."""
    rig = crowded("a", num_blocks=12, floor=6)
    rig.acquire(range(9000, 9000 + wanted * B), tenant="b")
    assert (used(rig, "a"), used(rig, TEAM)) == (4, shared_left)
    rig.check()
    assert cached(rig, [*PRIVATE[:-1]], "a") == 4 * B - 1


def test_a_tenants_blocks_above_its_floor_go_before_any_tail() -> None:
    """While something is left that is nobody's floor, tails stay; the control: one block more."""
    for wanted, left in ((4, 6), (5, 4)):
        rig = crowded("a", num_blocks=14, floor=6)
        rig.serve(range(5000, 5000 + 2 * B), tenant="c")
        rig.acquire(range(9000, 9000 + wanted * B), tenant="b")
        assert used(rig, "a") == (left if wanted == 5 else 6)
        rig.check()


def test_no_more_tails_go_than_it_takes() -> None:
    """Of two tenants at their floors the one whose tail was used longer ago gives it, the other keeps its own."""
    rig = crowded("a", "c", num_blocks=18, floor=6)
    rig.acquire(range(9000, 9000 + 4 * B), tenant="b")
    assert (used(rig, "a"), used(rig, "c"), used(rig, TEAM)) == (4, 6, 4)
    rig.check()


def test_a_tail_in_use_stays_with_its_prefix() -> None:
    """A tail that a sequence holds is no room, nor is the prefix above it."""
    rig = crowded("a", num_blocks=12, floor=6)
    running = rig.acquire([*SHARED, *range(2000, 2000 + 2 * B), 7], tenant="a", scope=TEAM, num_tokens=4 * B)
    with pytest.raises(ResourceExhausted):
        rig.acquire(range(9000, 9000 + 3 * B), tenant="b")
    rig.finish(running)
    rig.check()


def test_for_a_prefix_in_a_wider_scope_the_own_blocks_of_who_asks_go() -> None:
    """A tenant at its floor may give its own idle blocks for new ones of a scope; those of another floor stay."""
    rig = Rig(num_blocks=8)
    for tenant in ("a", "c"):
        rig.manager.set_quota(TenantId(tenant), Quota(floor_blocks=3))
        rig.serve(range(3 * B), tenant=tenant)
    rig.acquire(range(1000, 1000 + 5 * B), tenant="a", scope=TEAM, num_tokens=4 * B)
    assert (used(rig, "a"), used(rig, "c"), used(rig, TEAM)) == (1, 3, 4)
    rig.check()
