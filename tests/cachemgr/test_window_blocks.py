"""Window blocks by themselves: attached to one block each, taken only where nobody needs them, the oldest first."""

from __future__ import annotations

import numpy as np
import pytest

from cachemgr.blocks import BlockPool
from cachemgr.ids import BlockRun
from cachemgr.ownership import ANYONE, CLEAN, NO_OWNER
from cachemgr.window_blocks import ASKED, WindowBlocks

NUM_BLOCKS = 12
NUM_WINDOW_BLOCKS = 6


def run_of(*blocks: int) -> BlockRun:
    return np.array(blocks, np.intp)


class Rig:
    """A pool with window blocks, and what was freed of them."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.windows = WindowBlocks(NUM_WINDOW_BLOCKS, NUM_BLOCKS, lambda blocks: self.freed.extend(blocks.tolist()))
        self.pool = BlockPool(NUM_BLOCKS, self.windows.detach)
        self.kept = np.zeros(NUM_BLOCKS + 1, np.int32)
        self.floors: dict[int, int] = {}

    def begin(self, count: int, owner: int = 1) -> BlockRun:
        blocks = self.pool.allocate(count, owner)
        self.windows.attach(blocks, owner)
        return blocks

    def cache(self, blocks: BlockRun) -> None:
        self.pool.publish(blocks)
        self.pool.unhold(blocks)

    def room(self, *besides: int) -> int:
        return self.windows.room(self.pool, self.kept, self.floors, run_of(*besides))

    def reclaim(self, count: int) -> int:
        return self.windows.reclaim(self.pool, self.kept, self.floors, count)


def test_a_block_has_a_window_block_of_its_own_until_it_is_freed() -> None:
    """Window blocks go with their blocks, each to one; what is freed is told, and can be attached again."""
    rig = Rig()
    blocks = rig.begin(4)
    given = rig.windows.of[blocks].tolist()
    assert sorted(given) == [1, 2, 3, 4]
    assert rig.windows.pairs_of(blocks).tolist() == [[block, rig.windows.of[block]] for block in blocks.tolist()]
    rig.pool.unhold(blocks[1:3])
    assert sorted(rig.freed) == sorted(given[1:3])
    assert rig.windows.num_free == 4
    assert rig.windows.pairs_of(blocks).tolist() == [[blocks[0], given[0]], [blocks[3], given[3]]]
    assert set(rig.windows.of[rig.begin(4)].tolist()) == {2, 3, 5, 6}


def test_more_than_are_free_are_not_attached() -> None:
    """Attaching more than there are is an error of the caller and changes nothing."""
    rig = Rig()
    blocks = rig.pool.allocate(7, 1)
    with pytest.raises(ValueError, match="7 window blocks asked, 6 free"):
        rig.windows.attach(blocks, 1)
    assert rig.windows.num_free == NUM_WINDOW_BLOCKS


@pytest.mark.parametrize("count", [0, 13])
def test_no_pool_has_no_window_block_or_more_than_blocks(count: int) -> None:
    """A block has at most one, so more are never used."""
    with pytest.raises(ValueError, match="num_window_blocks"):
        WindowBlocks(count, NUM_BLOCKS)


def test_what_somebody_needs_is_not_taken() -> None:
    """Only where each holder has passed a block, or nobody holds it, its window block can be had."""
    rig = Rig()
    blocks = rig.begin(6)
    assert (rig.room(), rig.reclaim(1)) == (0, 0)
    rig.pool.hold(blocks[:2])  # a second holder
    rig.windows.passed(blocks[:2])
    assert rig.room() == 0
    rig.windows.passed(blocks[:1])
    assert (rig.room(), rig.room(int(blocks[0])), rig.room(int(blocks[1]))) == (1, 0, 1)
    rig.cache(blocks[4:])
    assert rig.room() == 3
    rig.windows.needed_again(blocks[:1])
    assert rig.room() == 2
    assert rig.reclaim(1) == 1
    assert rig.windows.num_free == 1


def test_the_oldest_go_first_and_ends_of_used_paths_last() -> None:
    """What was passed goes in the order in which it was passed; then what prompts end with; then what a used path needs
    at its end, unless a sequence went on from there."""
    rig = Rig()
    blocks = rig.begin(6)
    rig.cache(blocks)
    first, second, third = blocks[:2], blocks[2:4], blocks[4:]
    rig.windows.use(second)
    rig.windows.leave_end(second)
    rig.windows.use(third)
    rig.windows.use(first, ASKED)
    rig.windows.passed(third)
    rig.windows.needed_again(third)
    rig.windows.passed(second)
    rig.windows.needed_again(second)
    order = []
    for count in range(1, 7):
        before = set(np.flatnonzero(rig.windows.of).tolist())
        rig.reclaim(count)
        order += list(before - set(np.flatnonzero(rig.windows.of).tolist()))
    assert order == [*second.tolist(), *first.tolist(), *third.tolist()]


def test_many_are_taken_at_a_time() -> None:
    """A look at the columns takes more than was asked for, so that it is rare."""
    windows = WindowBlocks(64, 64)
    pool = BlockPool(64, windows.detach)
    blocks = pool.allocate(64, 1)
    windows.attach(blocks, 1)
    pool.publish(blocks)
    pool.unhold(blocks)
    assert windows.reclaim(pool, np.zeros(65, np.int32), {}, 1) == 2


def test_what_is_in_quarantine_stays() -> None:
    """Its writer may live."""
    rig = Rig()
    blocks = rig.begin(6)
    rig.pool.unhold(blocks[:3], quarantine=True)
    assert rig.room() == 0
    rig.pool.end_quarantine(blocks[:3])
    assert rig.room() == 3


def test_a_floor_shields_what_an_owner_has_cached_or_kept() -> None:
    """Others cannot take what a floor's part of the window blocks covers; the newest stay; what a running sequence has
    passed is not shielded."""
    rig = Rig()
    rig.windows.lasting = 2
    theirs = rig.begin(3, owner=2)
    own = rig.begin(3, owner=1)
    rig.cache(own)
    rig.cache(theirs[:2])
    rig.windows.use(theirs[:1])
    assert rig.room() == 5
    rig.floors = {2: 12}
    assert rig.room() == 4
    rig.reclaim(4)
    assert rig.windows.of[theirs[0]] > 0 == rig.windows.of[theirs[1]]
    rig.windows.passed(theirs[2:])
    assert rig.room() == 5
    rig.kept[theirs[2]] = 1  # its one holder is a kept branch
    assert rig.room() == 4


def test_what_moves_keeps_its_content_and_its_age() -> None:
    """The listed block has what the other copy had; nothing is freed."""
    rig = Rig()
    blocks = rig.begin(2)
    source, target = blocks.tolist()
    rig.windows.detach(blocks[1:])
    rig.freed.clear()
    given = rig.windows.of[source]
    rig.windows.move(source, target)
    assert (rig.windows.of[source], rig.windows.of[target]) == (0, given)
    assert not rig.freed


def test_claims_take_these_very_ones() -> None:
    """What a claim names is attached; one that names what is taken, or is no number, changes nothing."""
    rig = Rig()
    blocks = rig.pool.allocate(4, 1)
    rig.windows.claim(blocks[:2], run_of(5, 2))
    assert rig.windows.of[blocks].tolist() == [5, 2, 0, 0]
    for wrong in (run_of(2, 3), run_of(3, 7), run_of(3, 0), run_of(3, 3), run_of(3)):
        with pytest.raises(ValueError, match="window block"):
            rig.windows.claim(blocks[2:], wrong)
    with pytest.raises(ValueError, match="window block"):
        rig.windows.claim(blocks[1:3], run_of(3, 4))  # the first has one
    assert rig.windows.num_free == 4
    rig.windows.attach(rig.pool.allocate(4, 1), 1)
    assert sorted(rig.windows.of[rig.windows.of > 0].tolist()) == [1, 2, 3, 4, 5, 6]


def test_content_of_another_owner_is_to_be_zeroed_once() -> None:
    """Handing a window block to another owner, or to a credit, names it; to the same owner, or a new one, does not."""
    rig = Rig()
    rig.pool.unhold(rig.begin(1, owner=1))
    rig.pool.unhold(rig.begin(1, owner=1))
    assert not len(rig.windows.take_scrub())
    blocks = rig.begin(1, owner=2)
    assert rig.windows.take_scrub().tolist() == [1]
    assert not len(rig.windows.take_scrub())
    rig.windows.written_by(blocks, CLEAN)
    rig.pool.unhold(blocks)
    rig.begin(1, owner=NO_OWNER)
    assert not len(rig.windows.take_scrub())
    assert rig.windows.content[1] == ANYONE


def test_what_was_not_zeroed_is_tainted_after_it_is_free() -> None:
    """A decoder that died may not have zeroed what it was told to: whoever gets it next gets it zeroed."""
    rig = Rig()
    blocks = rig.begin(2, owner=1)
    rig.pool.unhold(blocks)
    rig.windows.taint(blocks)
    rig.begin(2, owner=1)
    assert sorted(rig.windows.take_scrub().tolist()) == [1, 2]


def test_an_owner_that_is_gone_and_a_pool_that_is_unknown_are_tainted() -> None:
    """Numbers are used again, and an adopted memory holds what nobody knows."""
    rig = Rig()
    rig.pool.unhold(rig.begin(2, owner=1))
    rig.windows.taint_owner(1)
    assert rig.windows.content.tolist() == [0, ANYONE, ANYONE, 0, 0, 0, 0]
    rig.windows.taint_all()
    assert rig.windows.content.tolist() == [0] + [ANYONE] * NUM_WINDOW_BLOCKS
