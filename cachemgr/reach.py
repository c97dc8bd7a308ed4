"""What an owner could have at most, whoever ends: a request for more than that is refused, not left to wait.

Invariant: nobody is refused who would fit once every lease ended, all credit came back and all quarantine was over,
with today's floors and pins in place. What stays then are the pins, and of each other owner with a floor what is
cached or kept of it below the floor. What the request shares itself it need not get. Pure; it changes nothing. Called
by `admission.py` where there is no room now.
"""

from __future__ import annotations

import numpy as np

from cachemgr.ids import BlockRun
from cachemgr.pins import pinned_blocks
from cachemgr.state import CacheState
from common.errors import ResourceExhausted


def refuse_beyond_reach(state: CacheState, owner: int, fresh: int, shared: BlockRun) -> None:
    """Raises ResourceExhausted where `fresh` blocks beside the `shared` ones (distinct, resident) cannot be had by
    waiting. While a new daemon is adopting, nobody knows."""
    if state.frozen:
        return
    most = _reach(state, owner, fresh, shared)
    if fresh > most:
        needed, usable = fresh + len(shared), most + len(shared)
        raise ResourceExhausted(
            f"{needed} blocks are needed; the floors and pins of this node leave {usable}",
            subject="blocks",
            needed=needed,
            usable=usable,
            reason="EXCEEDS_USABLE",
        )


def _reach(state: CacheState, owner: int, fresh: int, shared: BlockRun) -> int:
    pool, holds = state.pool, state.kept.holds
    owners = pool.ownership.owner
    fixed = np.union1d(pinned_blocks(state), shared)
    most = pool.num_blocks - len(fixed)
    floors = state.quotas.floors_besides(owner)
    if fresh <= most - sum(floors.values()):
        return most  # the floors do not matter, however full they are
    loose = (pool.references > 0) & (pool.references == holds + pool.published)
    loose[fixed] = False
    for other, floor in floors.items():
        staying = int(np.count_nonzero(owners[fixed] == other))
        idle = int(np.count_nonzero(owners[loose] == other))
        most -= max(0, min(idle, floor - staying))
    return most
