"""What is told of blocks that the index lists since this step: to the pool, the event log, the journal and the names.

Invariant: all four hear of a block in the step that lists it. Called by `sealing.py`, which has listed them. It decides
nothing and lists nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cachemgr.ids import BlockRun
from cachemgr.leases import Lease
from cachemgr.state import CacheState


def publish(state: CacheState, lease: Lease, first_index: int, tokens: bytes, blocks: BlockRun) -> None:
    """Blocks [n] that hold `tokens` (packed int32) stand at places `first_index`.. of a lease."""
    pool = state.pool
    pool.publish(blocks)
    last = blocks.item(-1)
    owner, generation = pool.owner.item(last), pool.generation.item(last)
    state.events.add("blocks_published", state.now_ns, owner, lease.session_id, lease.lease_id, blocks, generation)
    wider = lease.prefix_tree if first_index < lease.prefix_blocks else None
    tree = lease.tree if wider is None else wider
    if state.journal is not None:
        state.journal.publish(
            state.tenant_names[tree.owner],
            tree,
            first_index,
            tokens,
            blocks,
            int(lease.table[first_index - 1]) if first_index else 0,
            priority=lease.priority,
            expires_ns=state.expiry(lease.ttl_ns) if lease.ttl_ns else 0,
        )
    if state.weak_names is not None:
        previous = int(lease.table[first_index - 1]) if first_index > tree.root.start else 0
        state.weak_names.add(tree.root_key, previous, tokens, blocks)


def publish_each(
    state: CacheState,
    leases: Sequence[Lease],
    places: NDArray[np.int32],
    texts: Sequence[bytes | bytearray],
    blocks: BlockRun,
    before: Sequence[int],
    expiries: Sequence[int],
) -> None:
    """As `publish` of one whole block of each of these leases of one session, each in its own tree behind the block
    `before` it; expiry 0 is never. Not in the weak-hash test mode."""
    pool = state.pool
    pool.publish(blocks)
    owners, generations = pool.owner.take(blocks).tolist(), pool.generation.take(blocks).tolist()
    ids, numbers = [lease.lease_id for lease in leases], blocks.tolist()
    state.events.add_each("blocks_published", state.now_ns, leases[0].session_id, owners, ids, numbers, generations)
    if state.journal is not None:
        state.journal.publish_each(
            state.tenant_names,
            [lease.tree for lease in leases],
            places,
            texts,
            blocks,
            before,
            priorities=[lease.priority for lease in leases],
            expiries=expiries,
        )
