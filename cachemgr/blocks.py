"""The block pool: which block is free, held, cached or quarantined.

Invariants: free + cached + active + quarantined = total, every block in exactly one of them; references = holds + 1 if
published. Columns, one entry a block, so that every operation works on a run of blocks and makes no object per block.
Called by the manager's modules only. It knows no tokens, no lease and no session, and never decides what to evict.

A run passed in holds each block at most once: numpy's indexed arithmetic would count a repeated one once.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachemgr.ids import BlockRun
from cachemgr.ownership import FEW, NO_OWNER, Ownership

__all__ = ["NO_OWNER", "BlockPool", "BlockState"]


class BlockState(IntEnum):
    """State of a block; the numbers are those of tessera.admin.v1.BlockState."""

    FREE = 1
    ACTIVE = 2
    CACHED = 3
    QUARANTINED = 4


_FREE, _ACTIVE, _CACHED, _QUARANTINED = (int(state) for state in BlockState)
_ONE: Final = np.array(1, np.int32)  # comparing with an array costs half of what comparing with a number does


class BlockPool:
    """Blocks 1..num_blocks; column entry 0 belongs to the null block and stays zero.

    references: int32 holds, plus one if published    generation: int64, grows at each free
    ownership:  whose they are (`owner`), whose content is in them    published: bool, in the index    state: uint8
    """

    def __init__(
        self,
        num_blocks: int,
        on_free: Callable[[BlockRun], None] | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; allowed is 1 and more")
        self.num_blocks = num_blocks
        self.references: NDArray[np.int32] = np.zeros(num_blocks + 1, np.int32)
        self.generation: NDArray[np.int64] = np.zeros(num_blocks + 1, np.int64)
        self.ownership = Ownership(num_blocks) if ownership is None else ownership
        self.owner = self.ownership.owner
        self.published: NDArray[np.bool_] = np.zeros(num_blocks + 1, np.bool_)
        self.state: NDArray[np.uint8] = np.full(num_blocks + 1, _FREE, np.uint8)
        self.state[0] = 0
        self.num_cached = 0
        self.num_quarantined = 0
        self.num_published = 0
        self._stack: BlockRun = np.arange(num_blocks, 0, -1, dtype=np.intp)
        self._top = num_blocks
        self._on_free = on_free
        # One entry of a memory view costs a third of one of a column.
        self._references = memoryview(self.references)  # type: ignore[arg-type]
        self._states = memoryview(self.state)  # type: ignore[arg-type]
        self._owners = memoryview(self.owner)  # type: ignore[arg-type]
        self._listed = memoryview(self.published)  # type: ignore[arg-type]
        self._generations = memoryview(self.generation)  # type: ignore[arg-type]
        self._places = memoryview(self._stack)  # type: ignore[arg-type]

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return self._top

    @property
    def num_active(self) -> int:
        """Blocks that a lease or a session's credit holds."""
        return self.num_blocks - self._top - self.num_cached - self.num_quarantined

    @property
    def free_stack(self) -> BlockRun:
        """The free blocks, the next one to be allocated last. A view, for checks."""
        return self._stack[: self._top]

    def allocate(self, count: int, owner: int) -> BlockRun:
        """Pops `count` free blocks, each held once. Raises ValueError where fewer are free."""
        if not 0 <= count <= self._top:
            raise ValueError(f"{count} blocks asked, {self._top} free")
        if not count:
            return self._stack[:0].copy()
        low = self._top - count
        if count == 1:
            blocks: BlockRun = np.array((self._places[low],), np.intp)
        else:
            blocks = self._stack[low : self._top][::-1].copy()
        self._top = low
        if count <= FEW:
            for block in blocks.tolist():
                self._references[block] = 1
                self._states[block] = _ACTIVE
        else:
            self.references[blocks] = 1
            self.state[blocks] = _ACTIVE
        self.ownership.begin(blocks, owner)
        return blocks

    def count_idle(self, blocks: BlockRun, counts: NDArray[np.int32] | None = None, *, from_first: bool = False) -> int:
        """How many of these published blocks are held by nobody; `counts` are their references, if known. `from_first`
        says that whoever holds one of them holds all before it (no window): then a look at the ends mostly tells."""
        found = self.references.take(blocks) if counts is None else counts
        if from_first and len(found):
            if found.item(0) == 1:
                return len(found)
            if found.item(-1) > 1:
                return 0
        return int(np.count_nonzero(found == _ONE))

    def hold(self, blocks: BlockRun) -> None:
        """One more holder for each; cached ones become active."""
        if len(blocks) <= 1:
            for block in blocks.tolist():
                self.hold_one(block)
            return
        counts = self.references.take(blocks)
        counts += 1
        self.references[blocks] = counts
        woken = blocks[self.state.take(blocks) == _CACHED] if self.num_cached else blocks[:0]
        if len(woken):
            self.num_cached -= len(woken)
            self.ownership.wake(woken)
            self.state[woken] = _ACTIVE

    def hold_published(self, blocks: BlockRun, num_idle: int, counts: NDArray[np.int32] | None = None) -> None:
        """As `hold`, for published blocks in a table's order, `num_idle` of them held by nobody (`count_idle`);
        `counts` are their references, if known."""
        counts = (self.references.take(blocks) if counts is None else counts) + _ONE
        self.references[blocks] = counts
        if num_idle:
            self.ownership.shift_path(blocks if num_idle == len(blocks) else blocks[counts == 2], -1)
            self.state[blocks] = _ACTIVE
            self.num_cached -= num_idle

    def hold_one(self, block: int) -> None:
        """As `hold`, for one block: many times cheaper than a run of one."""
        self._references[block] += 1
        if self._states[block] == _CACHED:
            self._states[block] = _ACTIVE
            self.num_cached -= 1
            self.ownership.idle[self._owners[block]] -= 1

    def unhold(self, blocks: BlockRun, *, quarantine: bool = False) -> BlockRun:
        """One holder less for each. Published ones that nobody holds become cached; others are freed, or quarantined.

        Returns the blocks that nobody holds and the index does not list: freed now, or quarantined.
        """
        if len(blocks) <= 1:
            if not len(blocks) or self.unhold_one(blocks.item(0), quarantine=quarantine):
                return blocks
            return blocks[:0]
        counts = self.references.take(blocks)
        counts -= _ONE
        self.references[blocks] = counts
        published = self.published.take(blocks)
        idle = counts == published
        resting = blocks[idle & published]
        if len(resting):
            self.state[resting] = _CACHED
            self.num_cached += len(resting)
            self.ownership.rest(resting)
        loose: BlockRun = blocks[idle > published]
        if not len(loose):
            return loose
        self.ownership.uncharge(loose)
        if quarantine:
            self.state[loose] = _QUARANTINED
            self.num_quarantined += len(loose)
        else:
            self._free(loose)
        return loose

    def unhold_published(self, blocks: BlockRun, *, from_first: bool = False) -> None:
        """As `unhold`, for blocks in a table's order that are all published: none is freed. `from_first`: see
        `count_idle`."""
        counts = self.references.take(blocks)
        counts -= _ONE
        self.references[blocks] = counts
        num_idle = self.count_idle(blocks, counts, from_first=from_first)
        if num_idle:
            resting = blocks if num_idle == len(blocks) else blocks[counts == _ONE]
            self.state[resting] = _CACHED
            self.num_cached += num_idle
            self.ownership.shift_path(resting, 1)

    def unhold_one(self, block: int, *, quarantine: bool = False) -> bool:
        """As `unhold`, for one block; whether it is freed now, or quarantined."""
        count = self._references[block] - 1
        self._references[block] = count
        published = self._listed[block]
        if count > published:
            return False
        if published:
            self._states[block] = _CACHED
            self.num_cached += 1
            self.ownership.idle[self._owners[block]] += 1
            return False
        self.ownership.charged[self._owners[block]] -= 1
        if quarantine:
            self._states[block] = _QUARANTINED
            self.num_quarantined += 1
        else:
            self._free_one(block)
        return True

    def publish(self, blocks: BlockRun) -> None:
        """The index lists these held blocks from now on."""
        if len(blocks) == 1:
            block = blocks.item(0)
            self._references[block] += 1
            self._listed[block] = True
            self.num_published += 1
            return
        counts = self.references.take(blocks)
        counts += 1
        self.references[blocks] = counts
        self.published[blocks] = True
        self.num_published += len(blocks)

    def unpublish(self, blocks: BlockRun) -> BlockRun:
        """The index lists these no more; the ones nobody holds are freed, and returned."""
        counts = self.references.take(blocks)
        counts -= 1
        self.references[blocks] = counts
        self.published[blocks] = False
        self.num_published -= len(blocks)
        loose: BlockRun = blocks[counts == 0]
        if len(loose):
            self.num_cached -= len(loose)
            self.ownership.drop(loose)
            self._free(loose)
        return loose

    def unpublish_idle(self, blocks: BlockRun, runs: list[tuple[int, BlockRun]] | None = None) -> None:
        """As `unpublish`, for blocks that are known to be cached: evicted ones; `runs` are they by owner, if known."""
        if not len(blocks):
            return
        self.references[blocks] = 0
        self.published[blocks] = False
        self.num_published -= len(blocks)
        self.num_cached -= len(blocks)
        self.ownership.drop(blocks, runs)
        self._free(blocks)

    def end_quarantine(self, blocks: BlockRun) -> None:
        """Frees quarantined blocks: their last writer is gone."""
        self.num_quarantined -= len(blocks)
        self._free(blocks)

    def claim(self, blocks: BlockRun, owner: int) -> None:
        """Quarantined blocks are active again, each with one holder: who wrote them last says that he goes on."""
        self.num_quarantined -= len(blocks)
        self.state[blocks] = _ACTIVE
        self.references[blocks] = 1
        self.ownership.claim(blocks, owner)

    def _free(self, blocks: BlockRun) -> None:
        count = len(blocks)
        if count <= 1:
            if count:
                self._free_one(blocks.item(0))
            return
        self.state[blocks] = _FREE
        generations = self.generation.take(blocks)
        generations += 1
        self.generation[blocks] = generations
        self._stack[self._top : self._top + count] = blocks
        self._top += count
        if self._on_free is not None:
            self._on_free(blocks)

    def _free_one(self, block: int) -> None:
        self._states[block] = _FREE
        self._generations[block] += 1
        self._places[self._top] = block
        self._top += 1
        if self._on_free is not None:
            self._on_free(np.array((block,), np.intp))
