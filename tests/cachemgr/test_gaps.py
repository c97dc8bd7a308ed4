"""Gaps: a hit needs what the window of its next token touches, and eviction takes any block that nobody holds."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cachemgr.admin_messages import prefix_message
from cachemgr.gaps import GappedIndex
from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from cachemgr.radix import Match
from cachemgr.windows import passed_blocks
from tests.cachemgr.adoption_rig import DyingRig
from tests.cachemgr.core_rig import Rig, root_of

B = 4
WINDOW = 10  # a token after n * B others reads the last three blocks


def found(rig: Rig, tokens: list[int] | range, **named: object) -> int:
    """Cached tokens of these and one more; nothing is computed or published."""
    sequence = rig.acquire([*tokens, 7], no_store=True, **named)  # type: ignore[arg-type]
    cached = sequence.computed
    rig.run_copy(sequence)
    rig.check()
    rig.report(rig.message(sequence, release=True))
    return cached


def test_a_hit_needs_its_window_alone() -> None:
    """When the head of a path is evicted, all of it is a hit as before, and no part of it that reads the head."""
    rig = Rig(num_blocks=64, window_tokens=WINDOW)
    rig.serve(range(12 * B))
    assert rig.manager.evict(num_blocks=9) == 9
    assert [found(rig, range(count * B)) for count in (12, 11, 3, 1)] == [12 * B, 0, 0, 0]
    assert rig.manager.evict(num_blocks=1) == 1  # now its end goes, and what remains is a hit for nobody
    assert found(rig, range(12 * B)) == 0
    assert rig.manager.evict(everything=True) == 2
    assert not rig.manager.list_prefixes().items


def test_the_head_of_a_running_path_can_go() -> None:
    """What a sequence has passed is room for others while it runs; it goes on, and its end is a hit to the last."""
    rig = Rig(num_blocks=16, window_tokens=WINDOW)
    running = rig.acquire(range(12 * B))
    rig.compute(running)
    rig.report(rig.message(running))
    assert (rig.manager.snapshot().active_blocks, rig.manager.snapshot().usable_blocks) == (3, 13)
    other = rig.acquire(range(1000, 1000 + 12 * B))
    rig.compute(other)
    rig.check()
    rig.report(rig.message(other, release=True))
    assert found(rig, range(12 * B)) == 12 * B
    assert found(rig, range(6 * B)) == 0
    rig.finish(running)
    rig.quiet()


def test_a_gap_is_filled_by_who_computes_it_again() -> None:
    """A prompt whose head is gone is computed from its beginning; the blocks that are there stay, the gaps are filled:
    then every part of it is a hit."""
    rig = Rig(num_blocks=64, window_tokens=WINDOW)
    rig.serve(range(12 * B))
    rig.manager.evict(num_blocks=9)
    before = rig.manager.snapshot().indexed_blocks
    sequence = rig.acquire(range(10 * B))
    assert sequence.computed == 0
    answer = None
    for end in range(B, 10 * B + 1, B):
        rig.compute(sequence, end)
        answer = rig.report(rig.message(sequence))
        rig.check()
    assert answer is not None and len(answer.replacements) == 1  # the tenth block is there already
    assert rig.manager.snapshot().indexed_blocks == before + 9
    rig.finish(sequence)
    assert [found(rig, range(count * B)) for count in (12, 11, 3, 1)] == [12 * B, 11 * B, 3 * B, B]
    rig.quiet()


def test_gaps_of_a_long_seal_are_filled_at_once() -> None:
    """As before, sealed in one message, where the path has been cut into nodes meanwhile."""
    rig = Rig(num_blocks=64, window_tokens=WINDOW)
    rig.serve(range(12 * B))
    rig.serve([*range(5 * B), *range(700, 700 + 4 * B)])
    rig.manager.evict(num_blocks=9)
    sequence = rig.acquire(range(12 * B), no_read=True)
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    rig.check()
    rig.finish(sequence)
    assert found(rig, range(12 * B)) == 12 * B
    assert found(rig, range(5 * B)) == 5 * B
    rig.quiet()


def test_what_hangs_below_a_gap_keeps_it() -> None:
    """Two paths part behind a head that is gone: each is a hit by its own window; when both go nothing is left."""
    rig = Rig(num_blocks=64, window_tokens=WINDOW)
    paths = [[*range(4 * B), *range(first, first + 5 * B)] for first in (100, 200)]
    for path in paths:
        rig.serve(path)
    rig.manager.set_priority(TenantId("a"), root=root_of("a"), tokens=np.array(paths[1], "<i4").tobytes(), priority=90)
    rig.manager.set_priority(TenantId("a"), root=root_of("a"), tokens=np.array(paths[0], "<i4").tobytes(), priority=80)
    rig.manager.set_priority(
        TenantId("a"), root=root_of("a"), tokens=np.array(paths[0][: 4 * B], "<i4").tobytes(), priority=1
    )
    assert rig.manager.evict(num_blocks=4) == 4
    assert [found(rig, path) for path in (*paths, paths[0][: 4 * B])] == [9 * B, 9 * B, 0]
    shown = [prefix_message(view, 0) for view in rig.manager.list_prefixes().items]
    assert [(list(item.blocks).count(0), item.references) for item in shown] == [(4, 0), (0, 0), (0, 0)]
    rig.manager.evict(everything=True)
    assert not rig.manager.list_prefixes().items
    rig.quiet()


def test_scopes_may_have_gaps() -> None:
    """A private tail is a hit where its window is there, though the wider prefix before is gone in part."""
    rig = Rig(num_blocks=64, window_tokens=WINDOW)
    tokens = [*range(6 * B), *range(300, 300 + 5 * B)]
    rig.serve(tokens, scope="@group:team", num_tokens=6 * B)
    assert found(rig, tokens, scope="@group:team", num_tokens=6 * B) == 11 * B
    rig.manager.evict(num_blocks=5, tenant=TenantId("@group:team"))
    rig.check()
    assert found(rig, tokens, scope="@group:team", num_tokens=6 * B) == 11 * B
    assert found(rig, tokens[: 6 * B], scope="@group:team", num_tokens=6 * B) == 0
    assert rig.manager.purge(TenantId("@group:team")) == 6
    rig.quiet()


def test_a_scope_of_gaps_alone_can_be_purged() -> None:
    """When all of a wider prefix is gone but what hangs below it, the purge of the scope drops that, and both trees."""
    rig = Rig(num_blocks=64, window_tokens=WINDOW)
    tokens = [*range(6 * B), *range(300, 300 + 5 * B)]
    rig.serve(tokens, scope="@group:team", num_tokens=6 * B)
    assert rig.manager.evict(num_blocks=6, tenant=TenantId("@group:team")) == 6
    assert found(rig, tokens, scope="@group:team", num_tokens=6 * B) == 11 * B
    assert rig.manager.purge(TenantId("@group:team")) == 5
    assert not rig.manager.list_prefixes().items
    rig.quiet()


def test_a_path_of_gaps_may_be_longer_than_the_stack() -> None:
    """A conversation has a node for each turn. When its beginning was evicted under its last turn, and that goes too,
    all of the empty nodes go with it."""
    rig, turns = Rig(num_blocks=500, window_tokens=WINDOW), 400
    for turn in range(1, turns):
        assert rig.serve(range(turn * B)) == max(0, (turn - 1) * B)
    last = rig.acquire(range(turns * B))
    assert rig.manager.evict(num_blocks=turns) == turns - 1 - 3
    rig.finish(last)
    assert len(rig.manager.list_prefixes(0, turns).items) == turns
    assert rig.manager.evict(everything=True) == 4
    assert not rig.manager.list_prefixes().items
    rig.quiet()


def test_why_a_gap_is_no_hit_is_explained() -> None:
    """What is gone in the middle of a path was evicted, and is said to be."""
    rig = Rig(num_blocks=64, window_tokens=WINDOW)
    rig.serve(range(12 * B))
    rig.manager.evict(num_blocks=9)
    told = rig.manager.explain(TenantId("a"), root=root_of("a"), tokens=np.arange(6 * B, dtype="<i4").tobytes())
    assert (told.resident_tokens, told.reason.name, told.evicted_for) == (0, "EVICTED", "operator")


def test_what_was_published_is_told_with_its_tokens() -> None:
    """Also where the head of what an event published is gone by now; nothing is told when its end is."""
    rig = Rig(num_blocks=64, window_tokens=WINDOW)
    rig.serve(range(12 * B))
    (event,) = [event for _, event in rig.manager.events.since(0) if event.kind == "blocks_published"]
    for evicted in (0, 9):
        if evicted:
            rig.manager.evict(num_blocks=evicted)
        told = rig.manager.published_blocks(event)
        assert told is not None and told.tokens == np.arange(12 * B, dtype="<i4").tobytes()
    rig.manager.evict(num_blocks=1)
    assert rig.manager.published_blocks(event) is None


def test_pins_keep_what_a_hit_needs() -> None:
    """A pinned path is a hit whatever is evicted, by the blocks that its window touches."""
    rig = Rig(num_blocks=64, window_tokens=WINDOW)
    rig.serve(range(12 * B))
    rig.manager.set_quota(TenantId("a"), Quota(pin_blocks=8))
    tokens = np.arange(11 * B, dtype="<i4").tobytes()
    pin = rig.manager.pin(TenantId("a"), root=root_of("a"), tokens=tokens, now_ns=0)
    assert rig.manager.evict(num_blocks=60) == 9
    rig.check()
    assert found(rig, range(11 * B)) == 11 * B
    rig.manager.unpin(pin.pin)
    rig.manager.evict(everything=True)
    rig.quiet()


def test_a_new_manager_forgets_what_stands_behind_a_gap() -> None:
    """The journal's records say which block comes before each: of a path with a gap what follows is not adopted, and a
    sequence that runs there goes on, publishing nothing."""
    rig = DyingRig(num_blocks=24, window_tokens=WINDOW)
    sequence = rig.acquire(range(10 * B))
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    rig.manager.evict(num_blocks=2)
    rig.die()
    rig.come_back()
    rig.check()
    lease = rig.manager._state.book.leases[sequence.lease_id]
    assert not lease.store and len(lease.held) == 3
    rig.finish(sequence)
    rig.quiet()


@pytest.mark.parametrize("window", [1, 4, 5, 10, 17])
def test_the_longest_usable_part_is_found(window: int) -> None:
    """Against the naive search: the most tokens for which every block that the next token reads is there."""
    rng = random.Random(window)
    index = GappedIndex(64, B, np.zeros(65, np.int32), window)
    for _ in range(300):
        count, rest = rng.randrange(1, 12), rng.randrange(B)
        blocks = np.array([0 if rng.random() < 0.3 else place + 1 for place in range(count)], np.intp)
        source = 0 if not rest or rng.random() < 0.3 else 60
        got = index.usable(Match(blocks, source, rest, None))
        lengths = [count * B + rest] if source else []
        lengths += [place * B for place in range(count, -1, -1)]
        best = next(n for n in lengths if blocks[passed_blocks(n, window, B) : n // B].all())
        assert len(got.blocks) * B + got.num_tail_tokens == best
        passed = passed_blocks(best, window, B)
        assert not got.blocks[:passed].any() and got.blocks[passed:].all()
        assert all(place // B >= passed for place in range(max(0, best + 1 - window), best))
