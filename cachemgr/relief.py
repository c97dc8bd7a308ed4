"""Kept branches give way to work: where blocks lack, the holds of the oldest are dropped.

Invariant: their tokens stay, so that continuing computes again what is gone by then; a relief that would not be enough
changes nothing. A pool full of kept branches is therefore as good as one full of cached blocks, and never a deadlock.
Called by the modules that allocate (`admission.py`, `branches.py`, `reports.py`) and by `kept.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachemgr.ids import BlockRun
from cachemgr.kept_book import KeptBranch
from cachemgr.leases import Lease
from cachemgr.nodes import NO_BLOCKS
from cachemgr.state import CacheState


def relieve(
    state: CacheState, missing: int, *, besides: BlockRun = NO_BLOCKS, last: KeptBranch | None = None, owner: int = 0
) -> bool:
    """Drops holds of the oldest branches (of one owner, or of all) until `missing` blocks more can be had, `besides`
    not counted, the branch `last` after all others. Where all holds together would not do, it changes nothing: False.
    """
    chosen = [item for item in state.kept.branches.values() if item.hold.num_blocks and owner in (0, item.hold.owner)]
    if not chosen or _count_loose(state, chosen, besides) < missing:
        return False
    chosen.sort(key=lambda branch: branch is last)  # stable: the oldest first
    before = _room_besides(state, besides)
    for branch in chosen:
        drop_holds(state, branch.hold)
        if _room_besides(state, besides) - before >= missing:
            break
    state.revision += 1
    return True


def _room_besides(state: CacheState, besides: BlockRun) -> int:
    return state.room - state.pool.count_idle(besides)


def _count_loose(state: CacheState, chosen: Sequence[KeptBranch], besides: BlockRun) -> int:
    """Blocks that nobody but the chosen branches holds."""
    kept, pool = state.kept, state.pool
    holds = kept.holds
    if len(chosen) < len(kept):
        holds = np.zeros_like(holds)
        for branch in chosen:
            holds[branch.hold.blocks] += 1
    loose = (holds > 0) & (pool.references == holds + pool.published)
    loose[besides] = False
    return int(np.count_nonzero(loose))


def drop_holds(state: CacheState, hold: Lease) -> None:
    """Lets go of every block of a kept branch; its tokens stay."""
    cut_holds(state, hold, 0)
    hold.sealed = hold.committed = 0


def cut_holds(state: CacheState, hold: Lease, num_blocks: int) -> None:
    """Lets go of all blocks after the first `num_blocks` of the table."""
    dropped = hold.table[num_blocks : hold.num_blocks].copy()
    if not len(dropped):
        return
    published = hold.num_published
    hold.num_blocks = num_blocks
    hold.num_published = min(published, num_blocks)
    state.kept.holds[dropped] -= 1
    state.pool.unhold(dropped)
    if published > num_blocks:
        state.rest(hold, published)
