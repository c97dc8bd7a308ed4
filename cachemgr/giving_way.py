"""Who gives way where sequences of one owner reach its ceiling in the same report, and what that frees.

Invariants: the best ranked goes on as long as those behind it have enough to give; nobody ends whose end would not be
enough; a block that somebody else holds is not given. What an ended lease gives is charged to nobody, as credit is, and
stays held until the decoder, which may still use it, acknowledges. Called by `reports.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachemgr.ids import BlockRun
from cachemgr.leases import Lease
from cachemgr.nodes import NO_BLOCKS
from cachemgr.state import CacheState


def who_gives_way(state: CacheState, first: Lease, behind: Sequence[Lease], missing: int) -> Lease:
    """The lease that ends where `first` lacks `missing` blocks: of those `behind` it, best first, the last that has
    anything to give; itself where they all have too little."""
    gains = [sum(map(len, _givable(state, lease))) for lease in behind]
    if sum(gains) < missing:
        return first
    return next(lease for lease, gain in zip(reversed(behind), reversed(gains), strict=True) if gain)


def give(state: CacheState, lease: Lease, missing: int) -> None:
    """Charges nobody any more for what a lease that is about to end holds alone: all that is private, and of what is
    published as much as is `missing` then. That is unlisted, as the owner's idle blocks are for its new ones."""
    private, listed = _givable(state, lease)
    listed = listed[len(listed) - min(len(listed), max(0, missing - len(private))) :]
    if len(listed):
        forest = state.index.forest
        forest.ghosts.stamp = (state.now_ns, lease.owner, "quota")
        node = forest.node_at(listed.item(-1))
        if len(listed) == len(node.blocks):
            forest.remove(node)
        else:
            forest.trim(node, len(node.blocks) - len(listed))
        forest.node_of[listed] = 0
        state.forget_names(listed)
        state.note_unlisted(listed, "quota")
        state.pool.unpublish(listed)
        lease.num_published -= len(listed)
        lease.committed = 0
    state.pool.ownership.disown(np.concatenate((private, listed)))


def _givable(state: CacheState, lease: Lease) -> tuple[BlockRun, BlockRun]:
    """The blocks of an owner that one of its leases holds alone: those that the index does not list, and the end of a
    leaf that it does."""
    pool, published = state.pool, lease.num_published
    private = lease.private
    private = private[(pool.references.take(private) == 1) & (pool.owner.take(private) == lease.owner)]
    if not published or state.window_tokens:  # what stands before a block may be gone, or held by fewer
        return private, NO_BLOCKS
    last = lease.table.item(published - 1)
    node = state.index.forest.node_at(last)
    if node.tree is not lease.tree or node.children or node.anchored or node.blocks.item(-1) != last:
        return private, NO_BLOCKS
    alone = int(np.count_nonzero(pool.references.take(node.blocks) == 2))  # holders only become fewer along a run
    return private, node.blocks[len(node.blocks) - alone :]
