"""Layered scopes: a prefix in the tree of a wider scope, and the private tail of a tenant that hangs below it.

Invariants: the prefix is whole blocks; they belong to the scope and are published into its tree, everything after them
belongs to the tenant and lies in a tree whose key binds the tenant's root, the scope's root and the prefix's tokens, so
that nobody reaches it who has not all three. Called by the manager's modules. It knows no membership and no approval:
who names a span has been allowed it.
"""

from __future__ import annotations

import hashlib
from typing import Final

from cachemgr.ids import TenantId
from cachemgr.leases import Lease
from cachemgr.nodes import NO_BLOCKS, Tree, join_runs
from cachemgr.radix import Match
from cachemgr.results import ScopeSpan
from cachemgr.state import CacheState
from common.layout import TOKEN_BYTES

NO_MATCH: Final = Match(NO_BLOCKS, 0, 0, None)


def layered_root(base_key: bytes, wider_key: bytes, tokens: bytes) -> bytes:
    """The key (32 bytes) of the tree below a prefix of packed `tokens`: BLAKE2b, keyed by both roots (32 each)."""
    return hashlib.blake2b(tokens, key=base_key + wider_key, digest_size=32, person=b"tessera-layer").digest()


def whole_blocks(state: CacheState, span: ScopeSpan | None) -> int:
    """How many blocks of a request lie in a wider scope."""
    return 0 if span is None else span.num_tokens // state.block_tokens


def tail_key(state: CacheState, root: bytes, span: ScopeSpan, prefix_blocks: int, tokens: bytes) -> bytes:
    """The key of the tree that holds what comes after a prefix of at least one block."""
    return layered_root(root, span.root, tokens[: prefix_blocks * state.index.block_bytes])


def match(
    state: CacheState, tenant: TenantId, key: bytes, span: ScopeSpan, prefix_blocks: int, tokens: bytes, limit: int
) -> Match:
    """The longest cached prefix of the first `limit` tokens: in the wider tree, from its end in the tree of `key`."""
    return state.index.usable(whole_path(state, tenant, key, span, prefix_blocks, tokens, limit))


def whole_path(
    state: CacheState, tenant: TenantId, key: bytes, span: ScopeSpan, prefix_blocks: int, tokens: bytes, limit: int
) -> Match:
    """As `match`, whether or not a sequence could begin with all of it."""
    forest, index = state.index.forest, state.index
    wider = forest.trees.get((state.known_owner(span.owner), span.root))
    if wider is None:
        return NO_MATCH
    above = index.path(wider, tokens, min(limit, prefix_blocks * state.block_tokens))
    if len(above.blocks) < prefix_blocks:
        return above
    tree = forest.trees.get((state.known_owner(tenant), key))
    if tree is None or tree.anchor is None:
        return above
    below = index.path(tree, tokens, limit)
    if below.node is tree.root:
        return above
    both = join_runs([above.blocks, below.blocks])
    return Match(both, below.source, below.num_tail_tokens, below.node)


def trees_of(
    state: CacheState, owner: int, root: bytes, key: bytes, span: ScopeSpan | None, prefix_blocks: int
) -> tuple[Tree, Tree | None]:
    """(tree of the tail, tree of the prefix) for a new lease; one without a prefix has `key` equal to `root`."""
    forest = state.index.forest
    if span is None or not prefix_blocks:
        return forest.tree(owner, root), None
    return forest.layered_tree(owner, key, root, prefix_blocks), forest.tree(state.owner_of(span.owner), span.root)


def owner_at(lease: Lease, place: int) -> int:
    """Whose the block at a place of a lease's table is."""
    return lease.prefix_tree.owner if lease.prefix_tree is not None and place < lease.prefix_blocks else lease.owner


def cut(state: CacheState, lease: Lease, num_tokens: int) -> tuple[Tree, Tree | None, int]:
    """(tree, prefix tree, prefix blocks) of a sequence that keeps the first `num_tokens` tokens of a lease: what it
    goes on with is its own, also where the lease's prefix was longer."""
    whole = num_tokens // state.block_tokens
    if lease.prefix_tree is None or whole >= lease.prefix_blocks:
        return lease.tree, lease.prefix_tree, lease.prefix_blocks
    forest, base = state.index.forest, lease.tree.base_key
    if not whole:
        return forest.tree(lease.owner, base), None, 0
    tokens = bytes(lease.tokens[: whole * state.block_tokens * TOKEN_BYTES])
    key = layered_root(base, lease.prefix_tree.root_key, tokens)
    return forest.layered_tree(lease.owner, key, base, whole), lease.prefix_tree, whole


def shorten(state: CacheState, lease: Lease, num_tokens: int) -> None:
    """Cuts the prefix of a lease that was rolled back to `num_tokens`; `own_tail` follows."""
    tree, prefix_tree, prefix_blocks = cut(state, lease, num_tokens)
    if prefix_blocks == lease.prefix_blocks:
        return
    old = (lease.tree, lease.prefix_tree)
    tree.users += 1
    lease.tree.users -= 1
    if lease.prefix_tree is not None and prefix_tree is None:
        lease.prefix_tree.users -= 1
    lease.tree, lease.prefix_tree, lease.prefix_blocks = tree, prefix_tree, prefix_blocks
    for left in old:
        if left is not None:
            state.index.forest.forget_if_empty(left)


def own_tail(state: CacheState, lease: Lease) -> None:
    """What a lease goes on to write behind its prefix is its own: the block in which its prefix was cut, if that is not
    a copy already."""
    blocks = lease.table[max(lease.prefix_blocks, lease.passed) : lease.num_blocks]
    state.pool.ownership.give(blocks[state.pool.owner.take(blocks) != lease.owner], lease.owner)
