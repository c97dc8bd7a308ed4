"""The check of kept branches: their register, tables, and the path of the index that each holds. It changes nothing.

Part of the full check of `integrity.py`, which counts their holds. Messages name branches and blocks by number, never
tokens, tenants or handles.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from cachemgr.ids import NodeId
from cachemgr.integrity_index import say
from cachemgr.kept_book import NO_SESSION, KeptBranch
from cachemgr.layers import owner_at
from cachemgr.state import CacheState


def check_kept(state: CacheState, found: list[str]) -> None:
    """Every invariant of `kept_book.py`, recounted."""
    book, total = state.kept, state.pool.num_blocks
    holds = np.zeros(total + 1, np.int64)
    for name, branch in book.branches.items():
        if branch.name != name:
            found.append(f"branch {branch.branch_id}: it stands under another name than its own")
        blocks = branch.hold.held
        np.add.at(holds, blocks[(blocks >= 1) & (blocks <= total)], 1)
        _check_branch(state, branch, found)
    say(found, book.holds != holds, "the count of kept holds is not that of the branches")
    if book.counts != dict(Counter(branch.hold.owner for branch in book.branches.values())):
        found.append("the number of branches of a tenant is wrong")


def _check_branch(state: CacheState, branch: KeptBranch, found: list[str]) -> None:
    hold, name, size = branch.hold, f"branch {branch.branch_id}", state.block_tokens
    if hold.session_id != NO_SESSION or hold.copy is not None:
        found.append(f"{name}: it belongs to a session, or waits for a copy")
    if len(np.unique(hold.held)) != len(hold.held) or hold.table[: hold.passed].any():
        found.append(f"{name}: a block is twice in its table")
    if hold.sealed > hold.num_tokens or hold.num_blocks != -(-hold.sealed // size):
        found.append(f"{name}: its table does not cover its sealed tokens")
        return
    if hold.prefix_blocks * size > hold.num_tokens:
        found.append(f"{name}: its prefix in a wider scope is longer than it is")
    trees, lies_in = state.index.forest.trees, [hold.tree, *([] if hold.prefix_tree is None else [hold.prefix_tree])]
    if any(trees.get((tree.owner, tree.root_key)) is not tree for tree in lies_in):
        found.append(f"{name}: the tree that it lies in has ended")
    if hold.num_published > hold.num_blocks:
        found.append(f"{name}: more is published than it holds")
        return
    wrong = [
        block
        for place, block in enumerate(hold.held.tolist(), hold.passed)
        if state.pool.owner[block] != owner_at(hold, place)
    ]
    say(found, np.array(wrong, np.intp), f"{name}: of another owner")
    _check_path(state, branch, found)


def _check_path(state: CacheState, branch: KeptBranch, found: list[str]) -> None:
    """The published part of a table is a path of the index; where both know the tokens, they are the same."""
    forest, size, hold = state.index.forest, state.index.block_bytes, branch.hold
    depth, table = hold.num_published, hold.table
    while depth > hold.passed:
        wider = hold.prefix_tree is not None and depth <= hold.prefix_blocks
        node = forest.nodes.get(NodeId(int(forest.node_of[table[depth - 1]])))
        if (
            node is None
            or not node.start < depth <= node.end
            or node.tree is not (hold.prefix_tree if wider else hold.tree)
        ):
            found.append(f"branch {branch.branch_id}: its published blocks are no path of the index")
            return
        count = depth - node.start
        own = bytes(hold.tokens[node.start * size : depth * size])
        listed = node.edge[: count * size]
        shared = min(len(own), len(listed))
        place = max(node.start, hold.passed)
        same_blocks = np.array_equal(node.blocks[place - node.start : count], table[place:depth])
        if not same_blocks or own[:shared] != listed[:shared]:
            found.append(f"branch {branch.branch_id}: its tokens or blocks are not those of node {node.node_id}")
            return
        depth = node.start
