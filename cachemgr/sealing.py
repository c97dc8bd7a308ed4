"""Publishing: how computed blocks of a lease enter the index.

Invariants: only whole blocks below the sealed mark are published, at release also the partly filled tail; a published
block is never written again; where the index has the same tokens already, the lease's table changes to the published
blocks, and its own duplicates stay held until the decoder acknowledges. Called by `reports.py`.
"""

from __future__ import annotations

from cachemgr.ids import BlockRun
from cachemgr.leases import Deferred, Lease, Session, to_wire
from cachemgr.results import Replacement
from cachemgr.state import CacheState
from common.layout import TOKEN_BYTES


def seal(state: CacheState, session: Session, lease: Lease, sealed: int) -> Replacement | None:
    """Raises the sealed mark to `sealed` tokens and publishes each block that is whole now."""
    lease.sealed = max(lease.sealed, sealed)
    first, end = lease.num_published, lease.sealed // state.block_tokens
    if not lease.store or end <= first:
        return None
    index = state.index
    size = index.block_bytes
    with memoryview(lease.tokens) as record:
        tokens = bytes(record[first * size : end * size])
    own = lease.table[first:end].copy()
    cursor = index.cursor(lease.tree, lease.table, first)
    existing, superseded = index.insert(cursor, first, tokens, own, priority=lease.priority, grow=lease.grew)
    state.discard(superseded)
    count = len(existing)
    replacement = None
    if count:
        replacement = _replace(state, session, lease, existing)
    new = own[count:]
    if len(new):
        state.publish(lease, first + count, tokens[count * size :], new)
    lease.grew = count < len(own)
    lease.num_published = end
    return replacement


def publish_tail(state: CacheState, lease: Lease) -> None:
    """Publishes the partly filled tail of a lease that is about to end, if it is sealed and new. A branch may still
    be about to copy from it: that reads, and nobody writes it any more."""
    depth, count = divmod(lease.sealed, state.block_tokens)
    if not (lease.store and count) or lease.num_published != depth:
        return
    block = lease.table[depth : depth + 1].copy()
    index = state.index
    start = depth * index.block_bytes
    tokens = bytes(lease.tokens[start : start + count * TOKEN_BYTES])
    cursor = index.cursor(lease.tree, lease.table, depth)
    node, superseded = index.insert_tail(cursor, depth, tokens, block, priority=lease.priority)
    if node is None:
        return
    state.discard(superseded)
    state.publish(lease, depth, tokens, block)
    lease.num_published = depth + 1


def _replace(state: CacheState, session: Session, lease: Lease, existing: BlockRun) -> Replacement:
    """Puts published blocks into the table, for its own, which nobody has listed; those wait."""
    first = lease.num_published
    place = slice(first, first + len(existing))
    state.pool.hold(existing)
    session.deferred.append(Deferred(state.revision, lease.lease_id, lease.table[place].copy()))
    lease.table[place] = existing
    return Replacement(lease.lease_id, first, to_wire(existing))
