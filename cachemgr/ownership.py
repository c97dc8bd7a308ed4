"""Whose blocks they are: who is charged for each, and whose keys and values may still be in it.

Invariants: `charged` counts the active and cached blocks of each owner, `idle` its cached ones; a block that is handed
to one owner with what another left in it is named in `take_scrub` once. Part of `blocks.py`, which moves the blocks;
the manager's modules read the counts and tell it what they know of a content. It decides no quota.

A run passed in holds each block at most once.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachemgr.ids import BlockRun

NO_OWNER: Final = 0
CLEAN: Final = 0  # of `dirty_owner`: never written, or zeroed
ANYONE: Final = -1  # of `dirty_owner`: written by nobody knows whom

FEW: Final = 8  # up to so many, Python's own loop is cheaper than numpy's fixed costs
_NO_BLOCKS: Final[BlockRun] = np.zeros(0, np.intp)


class Ownership:
    """Columns, one entry a block, and counts by owner number.

    owner:       int32 owner number, NO_OWNER for a session's credit; stale while free or quarantined
    dirty_owner: int32 whose content it may hold: an owner number, CLEAN or ANYONE
    charged:     active and cached blocks by owner
    idle:        cached blocks by owner
    """

    def __init__(self, num_blocks: int) -> None:
        self.owner: NDArray[np.int32] = np.zeros(num_blocks + 1, np.int32)
        self.dirty_owner: NDArray[np.int32] = np.zeros(num_blocks + 1, np.int32)
        self.charged: defaultdict[int, int] = defaultdict(int)
        self.idle: defaultdict[int, int] = defaultdict(int)
        self._scrub: list[BlockRun] = []
        self._owners = memoryview(self.owner)  # type: ignore[arg-type]  # one entry costs a third of numpy's
        self._dirty = memoryview(self.dirty_owner)  # type: ignore[arg-type]

    def begin(self, blocks: BlockRun, owner: int) -> None:
        """Free blocks are active now, for `owner`."""
        self.charged[owner] += len(blocks)
        if len(blocks) <= FEW and owner != NO_OWNER:
            for block in blocks.tolist():
                self._owners[block] = owner
                if self._dirty[block] not in (CLEAN, owner):
                    self._scrub.append(np.array((block,), np.intp))
                self._dirty[block] = owner
            return
        dirty = self.dirty_owner.take(blocks)
        other = dirty != owner
        if owner != NO_OWNER and not np.count_nonzero(other):
            return  # whoever wrote last was the owner, and still is in the column
        self.owner[blocks] = owner
        if np.count_nonzero(dirty):
            crossing = blocks[other & (dirty != CLEAN)]
            if len(crossing):
                self._scrub.append(crossing)
        self.dirty_owner[blocks] = owner if owner != NO_OWNER else ANYONE

    def take_scrub(self) -> BlockRun:
        """The blocks begun since the last call that must be zeroed before anything else touches them."""
        if not self._scrub:
            return _NO_BLOCKS
        runs, self._scrub = self._scrub, []
        return np.concatenate(runs)

    def give(self, blocks: BlockRun | list[int], owner: int) -> None:
        """Active blocks belong to `owner` from now on, which is charged for them and has written them."""
        if len(blocks) <= FEW:
            for block in blocks if isinstance(blocks, list) else blocks.tolist():
                self.charged[self._owners[block]] -= 1
                self.charged[owner] += 1
                self._owners[block] = self._dirty[block] = owner
        else:
            blocks = np.asarray(blocks, np.intp)
            self.uncharge(blocks)
            self.charged[owner] += len(blocks)
            self.owner[blocks] = owner
            self.dirty_owner[blocks] = owner

    def claim(self, blocks: BlockRun, owner: int) -> None:
        """Quarantined blocks are active again, with what their writer left in them."""
        self.owner[blocks] = owner
        self.charged[owner] += len(blocks)
        self.dirty_owner[blocks] = owner if owner != NO_OWNER else ANYONE

    def untouched(self, blocks: BlockRun) -> None:
        """Nobody has written these since they were begun, and they were zeroed where that was asked for."""
        self.dirty_owner[blocks] = CLEAN

    def taint(self, blocks: BlockRun) -> None:
        """What these hold is not known: whoever gets them next gets them zeroed."""
        self.dirty_owner[blocks] = ANYONE

    def taint_owner(self, owner: int) -> None:
        """As `taint`, for all that this owner may have written: its number may stand for somebody else from now on."""
        self.dirty_owner[self.dirty_owner == owner] = ANYONE

    def disown(self, blocks: BlockRun) -> None:
        """Active blocks are nobody's from now on, and what they hold is not known."""
        self.uncharge(blocks)
        self.charged[NO_OWNER] += len(blocks)
        self.owner[blocks] = NO_OWNER
        self.dirty_owner[blocks] = ANYONE

    def uncharge(self, blocks: BlockRun) -> None:
        """Active or cached blocks are free or quarantined now."""
        if len(blocks) <= FEW:
            for block in blocks.tolist():
                self.charged[self._owners[block]] -= 1
        else:
            _count(self.charged, self.owner.take(blocks), -1)

    def rest(self, blocks: BlockRun) -> None:
        """Active blocks are cached now."""
        _count(self.idle, self.owner.take(blocks), 1)

    def wake(self, blocks: BlockRun) -> None:
        """Cached blocks are active now."""
        _count(self.idle, self.owner.take(blocks), -1)

    def shift_path(self, blocks: BlockRun, step: int) -> None:
        """As `rest` (1) or `wake` (-1), for blocks in the order of a table: those of a wider scope come first, so that
        two that are alike at its ends are alike in between."""
        owner = self._owners[blocks.item(0)]
        if owner == self._owners[blocks.item(-1)]:
            self.idle[owner] += step * len(blocks)
        else:
            _count(self.idle, self.owner.take(blocks), step)

    def runs_of(self, blocks: BlockRun) -> list[tuple[int, BlockRun]]:
        """The blocks by their owners, at least one; mostly all are of one."""
        owners = self.owner.take(blocks)
        raw = owners.tobytes()
        if raw == raw[: owners.itemsize] * len(owners):  # a fifth of what comparing the array costs
            return [(owners.item(0), blocks)]
        return [(owner, blocks[owners == owner]) for owner in np.unique(owners).tolist()]

    def drop(self, blocks: BlockRun, runs: list[tuple[int, BlockRun]] | None = None) -> None:
        """Cached blocks are free now; `runs` are they by owner, if known."""
        for owner, run in self.runs_of(blocks) if runs is None else runs:
            self.charged[owner] -= len(run)
            self.idle[owner] -= len(run)


def _count(counts: defaultdict[int, int], owners: NDArray[np.int32], step: int) -> None:
    """Adds `step` to the count of the owner of each block of a run."""
    if not len(owners):
        return
    first = owners.item(0)
    if np.count_nonzero(owners == first) == len(owners):
        counts[first] += step * len(owners)
        return
    for owner, number in enumerate(np.bincount(owners).tolist()):
        if number:
            counts[owner] += step * number
