"""What waiting cannot bring is refused with numbers; what it can bring is not."""

from __future__ import annotations

import pytest

from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from common.errors import ResourceExhausted
from tests.cachemgr.core_rig import Rig, pack, root_of
from tests.cachemgr.kept_rig import KeptRig

B = 4
A = TenantId("a")
TEAM = "@group:team"


def refused(rig: Rig, num_blocks: int, tenant: str = "b", start: int = 9000) -> tuple[str, int, int]:
    """Reason and numbers of the refusal of a prompt of so many new blocks."""
    with pytest.raises(ResourceExhausted) as caught:
        rig.acquire(range(start, start + num_blocks * B), tenant=tenant)
    return caught.value.reason, caught.value.needed, caught.value.usable


def pin(rig: Rig, tokens: range, tenant: str = "a") -> int:
    """Pins a resident prompt."""
    name = TenantId(tenant)
    return rig.manager.pin(name, root=root_of(tenant), tokens=pack(tokens), now_ns=0).pin


def test_what_a_floor_keeps_is_no_reason_to_wait() -> None:
    """Cached blocks below another's floor: refused for good. Positive controls: one block less fits, and so does all of
    it without the floor, and for the owner of the floor itself."""
    rig = Rig(num_blocks=16)
    rig.manager.set_quota(A, Quota(floor_blocks=6))
    rig.serve(range(4 * B), tenant="a")
    assert refused(rig, 13) == ("EXCEEDS_USABLE", 13, 12)
    rig.finish(rig.acquire(range(9000, 9000 + 12 * B), tenant="b"))
    rig.finish(rig.acquire(range(5000, 5000 + 16 * B), tenant="a"))
    rig.manager.set_quota(A, Quota())
    rig.finish(rig.acquire(range(9000, 9000 + 16 * B), tenant="b"))
    rig.check()


def test_what_a_lease_holds_may_come_back() -> None:
    """Behind a running sequence of the tenant with the floor a request waits; once that is cached it is refused, and
    where nothing of it was stored it fits."""
    for no_store in (False, True):
        rig = Rig(num_blocks=16)
        rig.manager.set_quota(A, Quota(floor_blocks=6))
        running = rig.acquire(range(4 * B), tenant="a", no_store=no_store)
        assert refused(rig, 13) == ("POOL_FULL", 13, 12)
        rig.compute(running)
        rig.finish(running)
        if no_store:
            rig.finish(rig.acquire(range(9000, 9000 + 13 * B), tenant="b"))
        else:
            assert refused(rig, 13) == ("EXCEEDS_USABLE", 13, 12)
        rig.check()


def test_a_pin_counts_against_all_but_those_who_share_it() -> None:
    """Pinned blocks are nobody's to have, the owner's neither, but a prompt that begins with them has them."""
    rig = Rig(num_blocks=16)
    rig.manager.set_quota(A, Quota(pin_blocks=5))
    rig.serve(range(4 * B), tenant="a")
    made = pin(rig, range(4 * B))
    assert refused(rig, 13) == ("EXCEEDS_USABLE", 13, 12)
    assert refused(rig, 13, tenant="a") == ("EXCEEDS_USABLE", 13, 12)
    rig.finish(rig.acquire(range(16 * B), tenant="a"))
    rig.manager.unpin(made)
    rig.finish(rig.acquire(range(9000, 9000 + 16 * B), tenant="b"))
    rig.check()


def test_pins_fill_the_floor_of_their_owner() -> None:
    """A pinned block counts as one of the floor's, not beside it."""
    rig = Rig(num_blocks=16)
    rig.manager.set_quota(A, Quota(floor_blocks=6, pin_blocks=4))
    rig.serve(range(4 * B), tenant="a")
    pin(rig, range(4 * B))
    rig.serve(range(1000, 1000 + 5 * B), tenant="a")
    assert refused(rig, 11) == ("EXCEEDS_USABLE", 11, 10)
    rig.finish(rig.acquire(range(9000, 9000 + 10 * B), tenant="b"))
    rig.check()


@pytest.mark.parametrize("no_store", [False, True])
def test_kept_conversations_below_a_floor_stay(no_store: bool) -> None:
    """A kept branch of a tenant at its floor does not give way, so nobody waits for it; a floor's owner's own do."""
    rig = KeptRig(num_blocks=12)
    rig.manager.set_quota(TenantId("b"), Quota(floor_blocks=4))
    rig.kept(range(100, 100 + 4 * B), b"k", tenant="b", no_store=no_store)
    assert refused(rig, 9, tenant="a") == ("EXCEEDS_USABLE", 9, 8)
    rig.finish(rig.acquire(range(9000, 9000 + 12 * B), tenant="b"))
    rig.check()
    rig.drop(b"k", tenant="b")


def test_a_busy_pool_is_waited_for_whatever_floors_there_are() -> None:
    """Empty floors keep nothing, and blocks of a session's credit come back."""
    rig = Rig(num_blocks=16)
    rig.manager.set_quota(A, Quota(floor_blocks=8))
    running = rig.acquire(range(8 * B), tenant="b")
    assert refused(rig, 16) == ("POOL_FULL", 16, 8)
    rig.finish(running)
    rig.report(wanted=4)
    assert refused(rig, 16) == ("POOL_FULL", 16, 12)


def test_blocks_that_a_request_shares_count_once() -> None:
    """What it shares of a wider scope fills that scope's floor: with 3 blocks shared and 1 more of the scope cached,
    more than 15 of 16 is refused for good."""
    rig = Rig(num_blocks=16)
    rig.manager.set_quota(TenantId(TEAM), Quota(floor_blocks=6))
    rig.serve(range(4 * B), scope=TEAM, num_tokens=4 * B)
    running = rig.acquire(range(7000, 7000 + 8 * B), tenant="c")

    def refusal(num_blocks: int) -> tuple[str, int]:
        tokens = [*range(3 * B), *range(9000, 9000 + (num_blocks - 3) * B)]
        with pytest.raises(ResourceExhausted) as caught:
            rig.acquire(tokens, tenant="b", scope=TEAM, num_tokens=3 * B)
        return caught.value.reason, caught.value.usable

    assert refusal(16) == ("EXCEEDS_USABLE", 15)
    assert refusal(15)[0] == "POOL_FULL"
    rig.finish(running)
    rig.check()


def test_while_a_daemon_is_adopting_nobody_is_refused_for_good() -> None:
    """What is cached then may be claimed: the request waits, and is refused when that is over."""
    rig = Rig(num_blocks=16)
    rig.manager.set_quota(A, Quota(floor_blocks=6))
    rig.serve(range(4 * B), tenant="a")
    rig.manager._state.frozen = True
    assert refused(rig, 13)[0] == "POOL_FULL"
    rig.manager._state.frozen = False
    assert refused(rig, 13)[0] == "EXCEEDS_USABLE"
