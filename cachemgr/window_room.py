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


def loose_of(
    windows: WindowBlocks, pool: BlockPool, kept: NDArray[np.int32], floors: Mapping[int, int], besides: BlockRun
) -> BlockRun:
    """The blocks, ascending, whose window blocks may be taken by one whose `floors` of others these are, but for those
    of `besides`. kept: int32 [num_blocks + 1], holds of kept branches."""
    attached = np.flatnonzero(windows.of)
    holds = pool.references.take(attached) - pool.published.take(attached)
    idle = (holds == windows.passed_by.take(attached)) & (pool.state.take(attached) != _QUARANTINED)
    loose: BlockRun = attached[idle]
    if len(besides):
        loose = loose[~np.isin(loose, besides)]
    for owner, floor in floors.items():
        loose = _shield(windows, pool, kept, attached, loose, owner, floor * windows.lasting // pool.num_blocks)
    return loose


def _shield(
    windows: WindowBlocks,
    pool: BlockPool,
    kept: NDArray[np.int32],
    attached: BlockRun,
    loose: BlockRun,
    owner: int,
    share: int,
) -> BlockRun:
    """`loose` without what keeps an owner at its share: of what is cached or kept of it, the newest."""
    resting = pool.references.take(loose) == kept.take(loose) + pool.published.take(loose)
    own = loose[resting & (pool.owner.take(loose) == owner)]
    spare = int(np.count_nonzero(pool.owner.take(attached) == owner)) - share
    if spare >= len(own):
        return loose
    newest = own[np.argsort(windows.stamps.take(own), kind="stable")][max(0, spare) :]
    return loose[~np.isin(loose, newest)]
