"""Time to live: what has outlived it goes first, and by itself; a use moves it on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cachemgr import expiry
from common.errors import InvalidArgument
from tests.cachemgr.core_rig import Rig

B = 4


def serve(rig: Rig, tokens: Sequence[int], ttl_ns: int, priority: int = 50) -> int:
    sequence = rig.acquire(tokens, ttl_ns=ttl_ns, priority=priority)
    cached = sequence.computed
    rig.finish(sequence)
    return cached


def test_a_prefix_goes_after_its_time() -> None:
    """At its time, not before, and nothing that has more time."""
    rig = Rig()
    serve(rig, range(2 * B + 2), 100)
    serve(rig, range(500, 500 + B), 0)
    rig.manager.tick(99)
    assert rig.manager.snapshot().cached_blocks == 4
    rig.manager.tick(100)
    rig.quiet()
    assert rig.manager.snapshot().cached_blocks == 1
    assert rig.manager.snapshot().evictions == 3


def test_a_use_moves_it_on_and_never_back() -> None:
    """Its time counts from the last use; a use without one keeps it for good; a shorter one changes nothing."""
    rig = Rig()
    for start in (0, 500, 900):
        serve(rig, range(start, start + 2 * B), 100)
    rig.now_ns = 60
    serve(rig, range(2 * B), 100)
    serve(rig, range(500, 500 + 2 * B), 0)
    serve(rig, range(900, 900 + 2 * B), 5)
    rig.manager.tick(100)
    rig.check()
    assert rig.manager.snapshot().cached_blocks == 4
    rig.manager.tick(160)
    rig.check()
    assert rig.manager.snapshot().cached_blocks == 2
    rig.manager.tick(10**15)
    assert rig.manager.snapshot().cached_blocks == 2


def test_what_is_held_outlives_its_time_and_goes_then() -> None:
    """An expired prefix that a sequence reads stays until the sequence ends, and is gone with a later tick."""
    rig = Rig()
    serve(rig, range(2 * B), 100)
    rig.now_ns = 50
    held = rig.acquire([*range(2 * B), 7], ttl_ns=10)
    for now_ns in (100, 200):
        rig.manager.tick(now_ns)
        rig.compute(held)
        rig.check()
    rig.now_ns = 300
    rig.finish(held)
    rig.manager.tick(310)
    rig.check()
    rig.manager.tick(310 + 2 * 10**9)
    rig.quiet()
    assert rig.manager.snapshot().cached_blocks == 0


def test_a_branch_expires_before_what_it_hangs_below() -> None:
    """A shared beginning lives as long as the longest of what hangs below it."""
    rig = Rig()
    serve(rig, [*range(2 * B), *range(100, 100 + B)], 100)
    serve(rig, [*range(2 * B), *range(200, 200 + B)], 300)
    rig.manager.tick(100)
    rig.check()
    assert rig.manager.snapshot().cached_blocks == 3
    rig.manager.tick(300)
    rig.quiet()
    assert rig.manager.snapshot().cached_blocks == 0


def test_the_expired_goes_before_the_unimportant() -> None:
    """When room is needed, what is past its time goes first, whatever its priority; without a tick."""
    rig = Rig(num_blocks=6)
    serve(rig, range(500, 500 + 2 * B), 0, priority=0)
    serve(rig, range(2 * B), 100, priority=100)
    serve(rig, range(900, 900 + 2 * B), 0, priority=0)
    rig.now_ns = 100
    serve(rig, range(1300, 1300 + 2 * B), 0)
    rig.check()
    assert serve(rig, [*range(500, 500 + 2 * B - 1)], 0) == 2 * B - 2


def test_a_negative_time_is_refused() -> None:
    """A time to live is 0 or more."""
    with pytest.raises(InvalidArgument, match="ttl"):
        Rig().acquire(range(B), ttl_ns=-1)


def test_entries_of_nodes_that_are_gone_do_not_pile_up() -> None:
    """Prefixes that were evicted before their time leave nothing behind for good."""
    rig = Rig(num_blocks=8)
    for number in range(3000):
        serve(rig, range(number * 10, number * 10 + B), 10**15)
    queue = rig.manager._state.index.forest.queue
    assert len(queue.expiries) <= 1200


def test_one_look_is_bounded_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much expires at once, a tick does a bounded part of it; the ticks after it do the rest."""
    monkeypatch.setattr(expiry, "MOST", 3)
    rig = Rig()
    for number in range(8):
        serve(rig, range(number * 10, number * 10 + B), 100)
    left = []
    for _ in range(4):
        rig.manager.tick(100)
        rig.check()
        left.append(rig.manager.snapshot().cached_blocks)
    assert left == [5, 2, 0, 0]
