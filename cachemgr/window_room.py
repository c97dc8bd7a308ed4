"""Which window blocks may be taken where room is needed: those that nobody needs, but for what floors keep.

Invariants: none that a holder of its block has not passed is among them, none of a block in quarantine, whose writer
may live, and none that keeps an owner at its floor's part of the pool. What a running sequence has passed is never kept
by a floor, or that sequence might wait for itself. Pure; it changes nothing. Called by `window_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from cachemgr.blocks import BlockPool, BlockState
from cachemgr.ids import BlockRun

if TYPE_CHECKING:
    from cachemgr.window_blocks import WindowBlocks

_QUARANTINED: Final = np.uint8(BlockState.QUARANTINED)
_NO_BLOCKS: Final[BlockRun] = np.zeros(0, np.intp)


def count_loose(
    windows: WindowBlocks, pool: BlockPool, kept: NDArray[np.int32], floors: Mapping[int, int], besides: BlockRun
) -> int:
    """How many window blocks may be taken by one whose `floors` of others these are, those of the blocks `besides` not
    counted. kept: int32 [num_blocks + 1], holds of kept branches."""
    loose = _unneeded(windows, pool, besides)
    shielded = _shielded(windows, pool, kept, floors, loose)
    return len(loose) - sum(count for _, count in shielded)


def loose_of(windows: WindowBlocks, pool: BlockPool, kept: NDArray[np.int32], floors: Mapping[int, int]) -> BlockRun:
    """The blocks, ascending, whose window blocks are those of `count_loose`. Of what floors keep, the newest stay."""
    loose = _unneeded(windows, pool, _NO_BLOCKS)
    shielded = _shielded(windows, pool, kept, floors, loose)
    if not shielded:
        return loose
    resting = loose[_rests(pool, kept, loose)]
    owners = pool.owner.take(resting)
    order = np.lexsort((windows.stamps.take(resting), owners))
    ends = np.searchsorted(owners[order], [owner for owner, _ in shielded], side="right").tolist()
    newest = [resting[order[end - count : end]] for end, (_, count) in zip(ends, shielded, strict=True)]
    return loose[~np.isin(loose, np.concatenate(newest))]


def _unneeded(windows: WindowBlocks, pool: BlockPool, besides: BlockRun) -> BlockRun:
    attached = np.flatnonzero(windows.of)
    holds = pool.references.take(attached) - pool.published.take(attached)
    idle = (holds == windows.passed_by.take(attached)) & (pool.state.take(attached) != _QUARANTINED)
    loose: BlockRun = attached[idle]
    return loose[~np.isin(loose, besides)] if len(besides) else loose


def _rests(pool: BlockPool, kept: NDArray[np.int32], loose: BlockRun) -> NDArray[np.bool_]:
    """Which of these blocks are cached, or kept and nothing else."""
    rests: NDArray[np.bool_] = pool.references.take(loose) == kept.take(loose) + pool.published.take(loose)
    return rests


def _shielded(
    windows: WindowBlocks, pool: BlockPool, kept: NDArray[np.int32], floors: Mapping[int, int], loose: BlockRun
) -> list[tuple[int, int]]:
    """(owner, how many of its resting blocks) that keep owners at their parts of the pool; only of those it binds."""
    if not floors:
        return []
    most = max(floors) + 1
    attached = np.bincount(pool.owner[windows.of > 0], minlength=most)
    resting = np.bincount(pool.owner.take(loose[_rests(pool, kept, loose)]), minlength=most)
    found = []
    for owner, floor in floors.items():
        spare = max(0, attached.item(owner) - floor * windows.lasting // pool.num_blocks)
        if resting.item(owner) > spare:
            found.append((owner, resting.item(owner) - spare))
    return found
