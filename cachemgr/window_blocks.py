"""Window blocks: memory for the layers with a window, where others read all keys. Which block has which.

Where there are layer groups (`common/layout.py`), a block holds the layers that read all keys, and has a window block
for the others as long as somebody may read it. Invariants: a window block is free or attached to one block; a free
block has none; none that is needed is taken. It is needed by whoever holds the block at a place that its window has not
passed; `passed_by` counts the holds of all others, so that nobody needs it where they are all holds. What nobody needs
stays attached, since it may be read again, until room is needed: then the oldest go. Pure. Part of `state.py`; the
manager's modules (`groups.py`) move `passed_by` along with their holds.

A run passed in names each block at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachemgr.blocks import BlockPool
from cachemgr.ids import BlockRun
from cachemgr.ownership import ANYONE, CLEAN, NO_OWNER
from cachemgr.window_room import count_loose, loose_of

_NO_BLOCKS: Final[BlockRun] = np.zeros(0, np.intp)
ASKED: Final = 1 << 39  # added to the stamp of what the end of a prompt needs: it goes after all that was merely passed
USED: Final = 1 << 40  # of what the end of a sequence needs, or a hit: that goes last
BATCH_SHARE: Final = 32  # a look for what nobody needs takes one in so many, for it costs the same however few it takes


class WindowBlocks:
    """Window blocks 1..num_window_blocks; 0 is none. Columns with one entry a block, [num_blocks + 1]:

    of:        int32 its window block, 0 for none
    passed_by: int32 how many of its holds are at places that a window has passed
    stamps:    int64 when it was used or passed last, in the order in which window blocks go
    taken_ns, taken_for: int64 and int32, when its window block was taken last because room was needed, for which owner

    content:   int32 [num_window_blocks + 1], whose keys and values a window block may hold: as `dirty_owner` of a block
    reach:     the most that one running sequence needs
    note:      where given, is told of blocks and what they have from now on (0: none), before that is given on
    lasting:   so many at most are shielded by floors, and as many pinned, so that one sequence can always run
    """

    def __init__(
        self,
        num_window_blocks: int,
        num_blocks: int,
        on_free: Callable[[BlockRun], None] | None = None,
        *,
        reach: int = 0,
    ) -> None:
        if not 1 <= num_window_blocks <= num_blocks:
            raise ValueError(f"num_window_blocks is {num_window_blocks}; allowed is 1..{num_blocks}")
        self.num_window_blocks = num_window_blocks
        self.reach = reach
        self.lasting = num_blocks if num_window_blocks == num_blocks else max(0, num_window_blocks - reach - 1) // 2
        self.of: NDArray[np.int32] = np.zeros(num_blocks + 1, np.int32)
        self.passed_by: NDArray[np.int32] = np.zeros(num_blocks + 1, np.int32)
        self.stamps: NDArray[np.int64] = np.zeros(num_blocks + 1, np.int64)
        self.content: NDArray[np.int32] = np.zeros(num_window_blocks + 1, np.int32)
        self.taken_ns: NDArray[np.int64] = np.zeros(num_blocks + 1, np.int64)
        self.taken_for: NDArray[np.int32] = np.zeros(num_blocks + 1, np.int32)
        self.num_reclaimed = 0
        self._last: NDArray[np.int32] = np.zeros(num_blocks + 1, np.int32)  # as `of`, also after it went
        self._stack: NDArray[np.int32] = np.arange(num_window_blocks, 0, -1, dtype=np.int32)
        self._top = num_window_blocks
        self._tick = 0
        self._scrub: list[BlockRun] = []
        self._on_free = on_free
        self.note: Callable[[BlockRun, NDArray[np.int32]], None] | None = None

    # ---- attaching

    @property
    def num_free(self) -> int:
        """Window blocks that are attached to none."""
        return self._top

    @property
    def free_stack(self) -> NDArray[np.int32]:
        """The free window blocks, the next one to be attached last. A view, for checks."""
        return self._stack[: self._top]

    def attach(self, blocks: BlockRun, owner: int) -> None:
        """Gives each of these blocks, which have none, a free window block, for `owner` to write. Raises ValueError
        where fewer are free."""
        count = len(blocks)
        if count > self._top:
            raise ValueError(f"{count} window blocks asked, {self._top} free")
        if not count:
            return
        self._top -= count
        given = self._stack[self._top : self._top + count][::-1].copy()
        self._set(blocks, given)
        self.stamps[blocks] = 0
        held = self.content.take(given)
        crossing = given[(held != CLEAN) & ((held != owner) | (owner == NO_OWNER))]
        if len(crossing):
            self._scrub.append(crossing.astype(np.intp))
        self.content[given] = owner if owner != NO_OWNER else ANYONE

    def detach(self, blocks: BlockRun) -> None:
        """Frees the window blocks of these blocks, as far as they have any."""
        found = self.of.take(blocks)
        had = blocks[found > 0]
        if not len(had):
            return
        self._set(had, np.zeros(len(had), np.int32))
        self._free(found[found > 0])

    def move(self, source: int, target: int) -> None:
        """What `source` has is `target`'s, which has none: the same tokens, in a block that is listed."""
        found = self.of.item(source)
        self._set(np.array((source,), np.intp), np.zeros(1, np.int32))
        self._set(np.array((target,), np.intp), np.array((found,), np.int32))
        self.stamps[target] = max(self.stamps.item(source), self.stamps.item(target))

    def claim(self, blocks: BlockRun, window_blocks: BlockRun) -> None:
        """Attaches these very window blocks (distinct) to these blocks, in this order. Raises ValueError, and nothing
        has changed, where one is out of range or not free, or a block has one already."""
        wanted = np.asarray(window_blocks, np.int32)
        if (
            len(wanted) != len(blocks)
            or len(np.unique(wanted)) != len(wanted)
            or np.count_nonzero(self.of.take(blocks))
        ):
            raise ValueError("the window blocks are not one for each block")
        free = np.isin(self.free_stack, wanted)
        if int(np.count_nonzero(free)) != len(wanted):
            raise ValueError("a window block is taken, or out of range")
        if not len(wanted):
            return
        left = self.free_stack[~free]
        self._top = len(left)
        self._stack[: self._top] = left
        self._set(blocks, wanted)

    def pairs_of(self, blocks: BlockRun) -> NDArray[np.int32]:
        """int32 [n, 2]: (block, its window block) of those of `blocks` that have one."""
        numbers = np.asarray(blocks, np.int32)
        found = self.of.take(numbers)
        present = found > 0
        return np.stack((numbers[present], found[present]), axis=1)

    def _set(self, blocks: BlockRun, window_blocks: NDArray[np.int32]) -> None:
        self.of[blocks] = window_blocks
        if window_blocks.item(0):
            self._last[blocks] = window_blocks
        if self.note is not None:
            self.note(blocks, window_blocks)

    def _free(self, window_blocks: NDArray[np.int32]) -> None:
        count = len(window_blocks)
        if not count:
            return
        self._stack[self._top : self._top + count] = window_blocks
        self._top += count
        if self._on_free is not None:
            self._on_free(window_blocks.astype(np.intp))

    def detach_before(self, on_free: Callable[[BlockRun], None] | None) -> Callable[[BlockRun], None]:
        """What a pool calls as it frees blocks: theirs go with them; then `on_free`."""
        if on_free is None:
            return self.detach

        def free(blocks: BlockRun) -> None:
            self.detach(blocks)
            on_free(blocks)

        return free

    # ---- who needs them

    def use(self, blocks: BlockRun, rank: int = USED) -> None:
        """A path was used whose end needs the window blocks of these blocks, if they have any or get any again. `rank`:
        what that is worth, USED or ASKED."""
        self._tick += 1
        self.stamps[blocks] = np.maximum(self.stamps.take(blocks), self._tick + rank)

    def leave_end(self, blocks: BlockRun) -> None:
        """A sequence goes on from the end of a path, for which alone these were kept: they are as good as passed."""
        self._tick += 1
        self.stamps[blocks] = self._tick

    def age(self, blocks: BlockRun, ages: NDArray[np.int64], ends: BlockRun) -> None:
        """Adopted blocks were used in the order of `ages` [n], the lowest first; `ends` are those that the ends of
        their paths need, which go after all others."""
        self._tick = max(self._tick, int(ages.max(initial=0)))
        self.stamps[blocks] = ages
        self.stamps[ends] += USED

    def passed(self, blocks: BlockRun) -> None:
        """One more of the holders of each of these blocks has passed it."""
        self._tick += 1
        self.passed_by[blocks] += 1
        self.stamps[blocks] = np.maximum(self.stamps.take(blocks), self._tick)

    def needed_again(self, blocks: BlockRun) -> None:
        """One holder less has passed each of these: it holds them no longer, or is behind them again."""
        self.passed_by[blocks] -= 1

    def room(
        self, pool: BlockPool, kept: NDArray[np.int32], floors: Mapping[int, int], besides: BlockRun = _NO_BLOCKS
    ) -> int:
        """Window blocks that could be had now by one whose `floors` of others these are: free ones, and those that
        nobody needs beside the blocks `besides`. kept: holds of kept branches, by block."""
        return self._top + count_loose(self, pool, kept, floors, besides)

    def reclaim(
        self,
        pool: BlockPool,
        kept: NDArray[np.int32],
        floors: Mapping[int, int],
        count: int,
        stamp: tuple[int, int] = (0, NO_OWNER),
    ) -> int:
        """Takes window blocks that nobody needs until `count` are free, and more at a time, the oldest first; returns
        how many. `stamp` says when it is, and for which owner. See `room`."""
        missing = count - self._top
        if missing <= 0:
            return 0
        loose = loose_of(self, pool, kept, floors)
        most = max(missing, self.num_window_blocks // BATCH_SHARE)
        oldest = loose[np.argsort(self.stamps.take(loose), kind="stable")][:most]
        self.num_reclaimed += len(oldest)
        self.taken_ns[oldest], self.taken_for[oldest] = stamp
        self.detach(oldest)
        return len(oldest)

    # ---- whose content they hold

    def take_scrub(self) -> BlockRun:
        """The window blocks attached since the last call that must be zeroed before anything else touches them."""
        if not self._scrub:
            return _NO_BLOCKS
        runs, self._scrub = self._scrub, []
        return np.concatenate(runs)

    def written_by(self, blocks: BlockRun | list[int], owner: int) -> None:
        """What these blocks have holds keys and values of `owner`, or of nobody (CLEAN)."""
        self.content[self.of.take(blocks)] = owner
        self.content[0] = CLEAN

    def taint(self, blocks: BlockRun) -> None:
        """What these blocks have, or had until just now, is not known."""
        self.content[self._last.take(blocks)] = ANYONE
        self.content[0] = CLEAN

    def taint_owner(self, owner: int) -> None:
        """As `Ownership.taint_owner`."""
        self.content[self.content == owner] = ANYONE

    def taint_all(self) -> None:
        """What any of them holds is not known."""
        self.content[1:] = ANYONE


def reach_of(window_tokens: int, block_tokens: int) -> int:
    """The most blocks that the window of a token touches, and one more to write: `KvLayout.window_reach`."""
    return (window_tokens + block_tokens - 2) // block_tokens + 2
