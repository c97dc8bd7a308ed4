"""Publishing: how computed blocks of a lease enter the index.

Invariants: only whole blocks below the sealed mark are published, at release also the partly filled tail; a published
block is never written again; where the index has the same tokens already, the lease's table changes to the published
blocks, and its own duplicates stay held until the decoder acknowledges. Called by `reports.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from cachemgr import groups
from cachemgr.ids import BlockRun
from cachemgr.leases import Deferred, Lease, Session, to_wire
from cachemgr.nodes import NEVER, NO_CHILDREN, Node, Tree
from cachemgr.publishing import publish, publish_each
from cachemgr.radix import MAX_GROWN_BLOCKS
from cachemgr.results import Replacement
from cachemgr.state import CacheState
from common.layout import TOKEN_BYTES

FEW: Final = 6  # up to so many leaves, one by one is cheaper than numpy's fixed costs


def seal(state: CacheState, session: Session, lease: Lease, sealed: int) -> Replacement | None:
    """Raises the sealed mark to `sealed` tokens and publishes each block that is whole now, those of a prefix in a
    wider scope into its tree."""
    lease.sealed = max(lease.sealed, sealed)
    first, end = lease.num_published, lease.sealed // state.block_tokens
    if not lease.store or end <= first:
        return None
    if state.window_blocks is not None:
        end = groups.alone(state, lease, first, end)
        if end <= first:
            return None
    border = lease.prefix_blocks
    if lease.prefix_tree is None or first >= border:
        return _publish(state, session, lease, lease.tree, end)
    above = _publish(state, session, lease, lease.prefix_tree, min(end, border))
    if end <= border:
        return above
    below = _publish(state, session, lease, lease.tree, end)
    if above is None or below is None:
        return above or below
    # What is listed below a prefix is listed only while all of the prefix is: the two runs are neighbours.
    return Replacement(lease.lease_id, above.first_index, np.concatenate((above.blocks, below.blocks)))


def _publish(state: CacheState, session: Session, lease: Lease, tree: Tree, end: int) -> Replacement | None:
    """Lists the blocks from the first that is not published to `end` in one tree."""
    first, index = lease.num_published, state.index
    size = index.block_bytes
    if end - first == 1:
        tokens = bytes(lease.tokens[first * size : end * size])  # for so few, a copy more is the cheaper one
    else:
        with memoryview(lease.tokens) as record:
            tokens = bytes(record[first * size : end * size])
    own = lease.table[first:end].copy()
    index.hang(tree, lease.table)
    cursor = index.cursor(tree, lease.table, first)
    existing, superseded = index.insert(
        cursor, first, tokens, own, priority=lease.priority, grow=lease.grew, expires_ns=state.expiry(lease.ttl_ns)
    )
    state.discard(superseded)
    count = len(existing)
    replacement = None
    if count:
        existing, filled = index.fill(cursor, first, tokens, own, existing)
        if state.window_blocks is not None:
            groups.lend(state, own[:count], existing)
        replacement = _replace(state, session, lease, existing)
        for place in filled:
            publish(state, lease, first + place, tokens[place * size : (place + 1) * size], own[place : place + 1])
    new = own[count:] if count else own
    if len(new):
        publish(state, lease, first + count, tokens[count * size :], new)
    lease.grew = count < len(own)
    lease.num_published = end
    state.waits.progressed(lease)
    return replacement


def leaf_to_grow(state: CacheState, lease: Lease) -> Node | None:
    """The leaf that the next block of a lease lengthens; None where sealing it is more than that, or may be."""
    first = lease.num_published
    if not lease.grew or first <= lease.prefix_blocks or state.weak_names is not None:
        return None
    node = state.index.forest.node_or_none(lease.table.item(first - 1))
    if node is None or node.tree is not lease.tree or node.tail or node.anchored:
        return None
    if node.children is not NO_CHILDREN and node.children:
        return None
    num_blocks = len(node.blocks)
    return node if num_blocks < MAX_GROWN_BLOCKS and node.start + num_blocks == first else None


def grow(state: CacheState, lease: Lease, leaf: Node) -> None:
    """As `seal` of one more block, sealed already, that lengthens the leaf which `leaf_to_grow` found."""
    first, size = lease.num_published, state.index.block_bytes
    tokens = bytes(lease.tokens[first * size : (first + 1) * size])
    block = lease.table[first : first + 1].copy()
    state.index.forest.extend(leaf, tokens, block, state.now_ns + lease.ttl_ns if lease.ttl_ns else NEVER)
    publish(state, lease, first, tokens, block)
    lease.num_published = first + 1
    state.waits.progressed(lease)


def grow_each(state: CacheState, leaves: Mapping[Node, Lease]) -> None:
    """As `grow` of each of these leases, in their order, which lengthens that leaf: one pass for all over each table
    and column, so that many cost a fourth."""
    if len(leaves) <= FEW:
        for leaf, lease in leaves.items():
            grow(state, lease, leaf)
        return
    size, now_ns, leases = state.index.block_bytes, state.now_ns, list(leaves.values())
    places, texts, before, blocks = [], [], [], []
    for lease in leases:
        place = lease.num_published
        lease.num_published = place + 1
        places.append(place)
        texts.append(lease.tokens[place * size : (place + 1) * size])
        before.append(lease.table.item(place - 1))
        blocks.append(lease.table.item(place))
    expiries = [now_ns + lease.ttl_ns if lease.ttl_ns else 0 for lease in leases]
    run, at = np.array(blocks, np.intp), np.array(places, np.int32)
    state.index.forest.extend_each(leaves, at, texts, run, expiries)
    publish_each(state, leases, at, texts, run, before, expiries)
    if state.waits.producers:
        for lease in leases:
            state.waits.progressed(lease)


def publish_tail(state: CacheState, lease: Lease, num_tokens: int | None = None) -> None:
    """Publishes the partly filled tail of a lease, or its first `num_tokens` of all, if it is sealed, new and in no
    wider scope. Nobody writes it any more: the lease ends, or makes it writable first. A branch may copy from it."""
    depth, count = divmod(lease.sealed, state.block_tokens)
    if num_tokens is not None:
        count = min(count, num_tokens - depth * state.block_tokens)
    if not (lease.store and count) or lease.num_published != depth or depth < lease.prefix_blocks:
        return
    block = lease.table[depth : depth + 1].copy()
    index = state.index
    start = depth * index.block_bytes
    tokens = bytes(lease.tokens[start : start + count * TOKEN_BYTES])
    index.hang(lease.tree, lease.table)
    cursor = index.cursor(lease.tree, lease.table, depth)
    expires_ns = state.expiry(lease.ttl_ns)
    node, superseded = index.insert_tail(cursor, depth, tokens, block, priority=lease.priority, expires_ns=expires_ns)
    if node is None:
        return
    state.discard(superseded)
    publish(state, lease, depth, tokens, block)
    lease.num_published = depth + 1


def _replace(state: CacheState, session: Session, lease: Lease, existing: BlockRun) -> Replacement | None:
    """Puts published blocks into the table, for its own, which nobody has listed; those wait. A block that is listed
    itself, since a sequence that shares it was first, stays and is held no second time."""
    first = lease.num_published
    own = lease.table[first : first + len(existing)]
    if len(own) == 1:
        if own.item() == existing.item():
            return None
        state.pool.hold_one(existing.item())
        duplicates = own.copy()
    else:
        differs = own != existing
        if not np.count_nonzero(differs):
            return None
        state.pool.hold(existing[differs])
        duplicates = own[differs]
    session.deferred.append(Deferred(state.revision, lease.lease_id, duplicates))
    behind = lease.behind
    if behind > first:
        groups.place(state, lease, first)
    lease.table[first : first + len(existing)] = existing
    groups.place(state, lease, behind)
    return Replacement(lease.lease_id, first, to_wire(existing))
