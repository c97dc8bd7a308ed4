"""Blocks for sequences that stand still where floors leave no credit: out of what their own tenants may have.

Credit is nobody's until a sequence takes it, so it comes from what all floors leave. Where that is nothing, a decoder
names the leases that lack a block, and each is lent some that its own tenant could acquire: that tenant's idle blocks
go for them, also below its floor, and nobody else's floor is touched. Invariant: such a block is credit that only the
lease which it was lent to may take. Called by `reports.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachemgr import groups
from cachemgr.blocks import NO_OWNER
from cachemgr.ids import LeaseId
from cachemgr.leases import Session
from cachemgr.relief import relieve
from cachemgr.results import Growth
from cachemgr.state import CacheState
from common.errors import ResourceExhausted


def lend_own(state: CacheState, session: Session, lacking: Sequence[LeaseId]) -> list[Growth]:
    """Lends a block for each entry of `lacking`, in their order, as far as the tenants of these leases have room; the
    blocks by lease. Leases that are not the session's are passed over."""
    grown: dict[LeaseId, list[int]] = {}
    spent: set[int] = set()  # owners with no room left
    for lease_id in lacking:
        lease = session.leases.get(lease_id)
        if lease is None or lease.owner in spent:
            continue
        block = _one_block(state, lease.owner)
        if block is None:
            spent.add(lease.owner)
            continue
        session.credit.add(block)
        session.lent[block] = lease_id
        grown.setdefault(lease_id, []).append(block)
    return [Growth(lease_id, np.array(blocks, np.int32)) for lease_id, blocks in grown.items()]


def _one_block(state: CacheState, owner: int) -> int | None:
    if state.room_for(owner) < 1:
        relieve(state, 1, asking=owner)
    try:
        groups.require(state, 1, owner)
        state.require(1, state.room_for(owner))
    except ResourceExhausted:
        return None
    return state.allocate(1, NO_OWNER, asking=owner).item()
