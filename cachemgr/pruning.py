"""Pruning: of a wider scope's trees only that stays which somebody may still name, and what hangs below it.

Invariants: what stays is whole paths from the root; a layered tree goes with the prefix that it hangs at, or where
nobody may name a prefix of that very length any more; as after a purge, a lease keeps the blocks that it holds and
publishes nothing more below what is gone, and is not kept at its end. Called by `manager.py`. What may be named, it
is told.
"""

from __future__ import annotations

from typing import Protocol

from cachemgr.blocks import NO_OWNER
from cachemgr.ids import BlockRun, TenantId
from cachemgr.kept import end_branches
from cachemgr.nodes import Node, Tree, join_runs
from cachemgr.pins import end_unlisted_pins
from cachemgr.state import CacheState
from cachemgr.windows import unlist_passed


class Reachable(Protocol):
    """What of a scope may still be named. Tokens are packed int32, whole blocks, at least one."""

    def covers(self, tokens: bytes) -> bool:
        """Whether a prefix that may be named begins with these; false for more where it is false for fewer."""

    def ends(self, tokens: bytes) -> bool:
        """Whether tails may hang below exactly these; only where `covers` is true."""


def prune(state: CacheState, scope: TenantId, reachable: Reachable) -> int:
    """See `CacheManager.prune`."""
    state.refuse_while_frozen()
    owner = state.known_owner(scope)
    if owner == NO_OWNER:
        return 0
    state.revision += 1
    wider = [tree for tree in state.index.forest.trees.values() if tree.owner == owner]
    below = [tree for tree in state.index.forest.trees.values() if tree.anchor and tree.anchor.tree.owner == owner]
    gone = [tree for tree in below if not reachable.ends(_path_to(tree))]
    runs = [run for tree in gone for run in _drop(state, tree)]
    for tree in wider:
        for child in list(tree.root.children):
            runs += _prune_below(state, child, reachable)
        state.index.forest.forget_if_empty(tree)
    blocks = join_runs(runs)
    state.index.forest.node_of[blocks] = 0
    blocks = blocks[blocks > 0]
    state.forget_names(blocks)
    if state.journal is not None:
        state.journal.erase(blocks)
    state.note_unlisted(blocks, "purged")
    state.pool.ownership.taint(blocks)
    state.pool.unpublish(blocks)
    end_unlisted_pins(state, owner)
    _end_users(state, owner, reachable)
    state.index.forest.ghosts.forget(owner)
    return len(blocks)


def _prune_below(state: CacheState, top: Node, reachable: Reachable) -> list[BlockRun]:
    """Cuts off what may not be named of a node below a root, and of all below it. One after the other: a path may have
    more nodes than Python's stack has room for."""
    size, runs = state.index.block_bytes, []
    stack = [(top, b"")]
    while stack:
        node, above = stack.pop()
        low, high = 0, len(node.blocks)
        while low < high:  # how many of its blocks stay
            middle = (low + high + 1) // 2
            if reachable.covers(above + node.edge[: middle * size]):
                low = middle
            else:
                high = middle - 1
        if low == len(node.blocks):
            path = above + node.edge
            stack += [(child, path) for child in node.children]
        else:
            runs += _cut_off(state, node, low)
    return runs


def _cut_off(state: CacheState, node: Node, num_blocks: int) -> list[BlockRun]:
    """Removes what comes after the first `num_blocks` of a node, and all below."""
    if num_blocks:
        state.index.forest.split(node, num_blocks)  # the lower part keeps its id
    parent = node.parent
    if parent is None:
        raise ValueError("the root is never pruned")
    emptied = parent.children.remove(node.key)
    parent.tails -= node.tail
    runs = _forget(state, [node])
    if emptied:
        state.index.forest.has_become_leaf(parent)
    return runs


def _drop(state: CacheState, tree: Tree) -> list[BlockRun]:
    runs = _forget(state, list(tree.root.children))
    state.index.forest.drop_tree(tree)
    return runs


def _forget(state: CacheState, nodes: list[Node]) -> list[BlockRun]:
    runs, stack = [], nodes
    while stack:
        node = stack.pop()
        stack += node.children
        runs.append(node.blocks)
        state.index.forest.forget_node(node)
    return runs


def _path_to(tree: Tree) -> bytes:
    """The tokens before a layered tree that hangs somewhere."""
    edges, step = [], tree.anchor
    while step is not None:
        edges.append(step.edge)
        step = step.parent
    return b"".join(reversed(edges))


def _end_users(state: CacheState, owner: int, reachable: Reachable) -> None:
    """Kept branches and leases that lie in the scope as nobody may any more."""
    size = state.index.block_bytes

    def covered(tokens: bytearray | bytes, num_blocks: int) -> int:
        low, high = 0, num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if reachable.covers(bytes(tokens[: middle * size])) else (low, middle - 1)
        return low

    def is_over(tree: Tree | None, tokens: bytearray | bytes, num_blocks: int) -> bool:
        return tree is not None and tree.owner == owner and not reachable.ends(bytes(tokens[: num_blocks * size]))

    end_branches(state, lambda hold: is_over(hold.prefix_tree, hold.tokens, hold.prefix_blocks))
    for lease in state.book.leases.values():
        if is_over(lease.prefix_tree, lease.tokens, lease.prefix_blocks):
            lease.num_published = min(lease.num_published, covered(lease.tokens, lease.prefix_blocks))
            unlist_passed(lease)
            lease.cut_from_index()
            state.waits.leave(lease)
