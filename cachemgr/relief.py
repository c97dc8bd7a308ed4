"""Kept branches give way to work: where blocks lack, the holds of the oldest are dropped.

Invariant: their tokens stay, so that continuing computes again what is gone by then; a relief that would not be enough
changes nothing, and none takes another owner below its floor. A pool full of kept branches is therefore as good as one
full of cached blocks, and never a deadlock.
Called by the modules that allocate (`admission.py`, `branches.py`, `reports.py`) and by `kept.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachemgr.groups import place
from cachemgr.ids import BlockRun
from cachemgr.kept_book import KeptBranch
from cachemgr.leases import Lease
from cachemgr.nodes import NO_BLOCKS
from cachemgr.state import CacheState


def relieve(
    state: CacheState,
    missing: int,
    *,
    asking: int,
    besides: BlockRun = NO_BLOCKS,
    last: KeptBranch | None = None,
    own: bool = False,
) -> bool:
    """Drops holds of the oldest branches until owner `asking` can have `missing` blocks more, `besides` not counted:
    those of all owners that are not at their floor, or with `own` its own alone; the branch `last` after all others.
    Where all of them together would not do, it changes nothing: False.
    """
    chosen = [branch for branch in state.kept.branches.values() if _may_drop(state, branch, asking, own=own)]
    if not chosen or _gain(state, chosen, asking, besides) < missing:
        return False
    chosen.sort(key=lambda branch: branch is last)  # stable: the oldest first
    before = _room_besides(state, asking, besides)
    for branch in chosen:
        _drop_to_floor(state, branch.hold, asking)
        if _room_besides(state, asking, besides) - before >= missing:
            break
    state.revision += 1
    return True


def _may_drop(state: CacheState, branch: KeptBranch, asking: int, *, own: bool) -> bool:
    hold = branch.hold
    if not hold.num_blocks or hold.owner == asking:
        return bool(hold.num_blocks)
    return not own and state.quotas.above_floor(hold.owner) > 0


def _room_besides(state: CacheState, asking: int, besides: BlockRun) -> int:
    return state.room_for(asking) - state.pool.count_idle(besides)


def _gain(state: CacheState, chosen: Sequence[KeptBranch], asking: int, besides: BlockRun) -> int:
    """How many blocks nobody but the chosen branches holds; of another owner at most what is above its floor and is not
    to be had without it, as idle blocks are."""
    kept, pool = state.kept, state.pool
    holds = kept.holds
    if len(chosen) < len(kept):
        holds = np.zeros_like(holds)
        for branch in chosen:
            holds[branch.hold.held] += 1
    loose = (holds > 0) & (pool.references == holds + pool.published)
    loose[besides] = False
    owners, counts = np.unique(pool.ownership.owner[loose], return_counts=True)
    return sum(
        count if owner == asking else min(count, state.quotas.above_floor(owner) - state.quotas.spare(owner))
        for owner, count in zip(owners.tolist(), counts.tolist(), strict=True)
    )


def _drop_to_floor(state: CacheState, hold: Lease, asking: int) -> None:
    """Lets go of the blocks of a kept branch, from the last one on, as far as its owner stays at its floor: those that
    are published stay charged to it, the others are free when nobody else holds them."""
    if hold.owner == asking:
        drop_holds(state, hold)
        return
    spare = state.quotas.above_floor(hold.owner)
    private = hold.private
    freed = np.cumsum(state.pool.references.take(private)[::-1] == 1)
    droppable = int(np.searchsorted(freed, spare, side="right"))
    if droppable == len(private):
        drop_holds(state, hold)
    elif droppable:
        cut_holds(state, hold, hold.num_blocks - droppable)
        hold.sealed, hold.committed = min(hold.sealed, hold.num_blocks * state.block_tokens), 0


def drop_holds(state: CacheState, hold: Lease) -> None:
    """Lets go of every block of a kept branch; its tokens stay."""
    cut_holds(state, hold, 0)
    hold.sealed = hold.committed = 0


def cut_holds(state: CacheState, hold: Lease, num_blocks: int) -> None:
    """Lets go of all blocks after the first `num_blocks` of the table."""
    dropped = hold.table[max(num_blocks, hold.passed) : hold.num_blocks].copy()
    place(state, hold, min(hold.behind, num_blocks))
    hold.passed = min(hold.passed, num_blocks)
    if not len(dropped):
        return
    published = hold.num_published
    hold.num_blocks = num_blocks
    hold.num_published = min(published, num_blocks)
    state.kept.holds[dropped] -= 1
    state.pool.unhold(dropped)
    if published > num_blocks:
        state.rest(hold, published)
