"""The check of the index: trees, nodes, keys, which block hangs where, and the eviction queue. It changes nothing.

Part of the full check of `integrity.py`. Messages name blocks and nodes by number, never tokens or tenants.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachemgr.eviction import count_idle_tail
from cachemgr.ids import BlockRun, NodeId
from cachemgr.nodes import NEVER, Node, Tree
from cachemgr.state import CacheState
from common.layout import TOKEN_BYTES

MAX_LISTED: Final = 8  # block numbers that one line names


def say(found: list[str], blocks: NDArray[np.bool_] | BlockRun, what: str) -> None:
    """Adds one line if the mask has a block."""
    if not (blocks.any() if blocks.dtype == np.bool_ else len(blocks)):
        return
    numbers = np.flatnonzero(blocks) if blocks.dtype == np.bool_ else blocks
    if len(numbers):
        shown = ", ".join(str(number) for number in numbers[:MAX_LISTED].tolist())
        found.append(f"{what}: block {shown}{' and more' if len(numbers) > MAX_LISTED else ''}")


def check_trees(state: CacheState, found: list[str]) -> NDArray[np.int64]:
    """Walks every tree. Returns how often each block is listed."""
    forest, pool = state.index.forest, state.pool
    listed = np.zeros(pool.num_blocks + 1, np.int64)
    node_of = np.zeros_like(forest.node_of)
    reached: set[NodeId] = set()
    for (owner, root_key), tree in forest.trees.items():
        if (tree.owner, tree.root_key) != (owner, root_key):
            found.append("a tree stands under another owner or root than its own")
        if not tree.root.children and not tree.users:
            found.append("a tree with neither prefixes nor users is kept")
        stack = [tree.root]
        while stack:
            node = stack.pop()
            stack += node.children
            _check_children(state, node, found)
            if node.parent is None:
                continue
            if node.node_id in reached:
                found.append(f"node {node.node_id} is reached twice")
                continue
            reached.add(node.node_id)
            if forest.nodes.get(node.node_id) is not node:
                found.append(f"node {node.node_id} is in a tree and not in the register")
            if _check_blocks(state, tree, node, found):
                np.add.at(listed, node.blocks, 1)
                node_of[node.blocks] = node.node_id
    listed[0] = node_of[0] = 0  # of gaps
    _check_anchors(state, found)
    orphans = [number for number in forest.nodes if number not in reached]
    if orphans:
        found.append(f"nodes {orphans[:MAX_LISTED]} are in the register and in no tree")
    say(found, listed > 1, "listed twice in the index")
    say(found, node_of != forest.node_of, "the block's node is not the node that lists it")
    if int(listed.sum()) != pool.num_published:
        found.append(f"{int(listed.sum())} blocks are listed, {pool.num_published} are counted as published")
    return listed


def _check_anchors(state: CacheState, found: list[str]) -> None:
    """A layered tree with prefixes hangs at the end of a node that is there; nothing else hangs anywhere."""
    forest = state.index.forest
    counts: dict[NodeId, int] = {}
    for tree in forest.trees.values():
        anchor = tree.anchor
        if (anchor is not None) != (tree.root.start > 0 and bool(tree.root.children)):
            found.append("a layered tree hangs nowhere, or one without prefixes hangs somewhere")
        if anchor is None:
            continue
        counts[anchor.node_id] = counts.get(anchor.node_id, 0) + 1
        if forest.nodes.get(anchor.node_id) is not anchor:
            found.append(f"node {anchor.node_id}: a layered tree hangs below it and it is not in the register")
        if anchor.tail or anchor.end != tree.root.start or anchor.tree.root.start or anchor.tree.owner == tree.owner:
            found.append(f"node {anchor.node_id}: a layered tree hangs below it that does not begin where it ends")
    for node in forest.nodes.values():
        if node.anchored != counts.get(node.node_id, 0):
            found.append(f"node {node.node_id}: the number of trees that hang below it is wrong")


def check_queue(state: CacheState, found: list[str]) -> None:
    """Every leaf that could be evicted stands in the order of its owner and priority, what stands anywhere stands where
    it belongs, and every node that expires is watched."""
    forest = state.index.forest
    standing: set[NodeId] = set()
    for owner, queue in forest.queue.owners.items():
        for level, order in queue.orders.items():
            for node in order.nodes():
                if node.node_id in standing:
                    found.append(f"node {node.node_id}: it stands in the eviction queue twice")
                standing.add(node.node_id)
                if forest.nodes.get(node.node_id) is not node:
                    found.append(f"node {node.node_id}: it stands in the eviction queue and in no tree")
                elif node.order is not order or node.tree.owner != owner or queue.level_of(node) != level:
                    found.append(f"node {node.node_id}: it stands at a wrong place of the eviction queue")
    watched = {number for _, number in forest.queue.expiries}
    for node in forest.nodes.values():
        if (node.order is not None) != (node.node_id in standing):
            found.append(f"node {node.node_id}: its order is not where it stands")
        if node.order is None and _is_evictable(state, node):
            found.append(f"node {node.node_id}: it could be evicted and is not queued")
        if node.expires_ns != NEVER and node.node_id not in watched:
            found.append(f"node {node.node_id}: it expires and nobody watches it")


def _is_evictable(state: CacheState, node: Node) -> bool:
    if state.window_tokens:
        return bool((state.pool.references[node.blocks] == 1).any())
    return not node.children and not node.anchored and count_idle_tail(node.blocks, state.pool.references) > 0


def _check_children(state: CacheState, node: Node, found: list[str]) -> None:
    size = state.index.block_bytes
    name = f"node {node.node_id}"
    keys, children = node.children.keys(), list(node.children)
    if len(keys) != len(node.children) or keys != [child.edge[:size] for child in children]:
        found.append(f"{name}: the keys are not the first blocks of its children")
    if any(left >= right for left, right in pairwise(keys)):
        found.append(f"{name}: the keys are not sorted")
    if node.tails != sum(child.tail for child in children):
        found.append(f"{name}: the number of tails is wrong")
    if node.tail and children:
        found.append(f"{name}: a partly filled tail has children")
    for child in children:
        if child.parent is not node or child.tree is not node.tree:
            found.append(f"node {child.node_id}: its parent is not the node that has it as a child")
        if child.key != child.edge[:size]:
            found.append(f"node {child.node_id}: its key is not its first block")
        if child.leaf_of is not None and (child.leaf_of is not node or child.children or child.anchored):
            found.append(f"node {child.node_id}: it passes for a leaf of its parent and is none")
        if child.start != node.end:
            found.append(f"node {child.node_id}: it does not start where its parent ends")


def _check_blocks(state: CacheState, tree: Tree, node: Node, found: list[str]) -> bool:
    """Checks the blocks of one node. False where they cannot even be looked up."""
    pool, size = state.pool, state.index.block_bytes
    name, blocks, count = f"node {node.node_id}", node.blocks, len(node.edge)
    if node.tail:
        fits = len(blocks) == 1 and 0 < count < size and count % TOKEN_BYTES == 0
    else:
        fits = len(blocks) > 0 and count == len(blocks) * size
    if not fits:
        found.append(f"{name}: the tokens do not fill its blocks")
    if len(blocks) and (int(blocks.min()) < (not state.window_tokens) or int(blocks.max()) > pool.num_blocks):
        found.append(f"{name}: a block number is outside the pool")
        return False
    say(found, blocks[(pool.owner[blocks] != tree.owner) & (blocks > 0)], f"{name}: of another owner")
    if not (node.children or node.anchored or blocks[-1:].all()):
        found.append(f"{name}: it ends in a gap, and nothing hangs below it")
    above = node.parent.blocks[-1:] if node.parent is not None else blocks[:0]
    if node.parent is tree.root and tree.anchor is not None:
        above = tree.anchor.blocks[-1:]
    if not state.window_tokens and (np.diff(pool.references[np.concatenate((above, blocks))]) > 0).any():
        found.append(f"{name}: a block has more holders than one before it")
    places = np.arange(node.start, node.end)
    wrong = (state.index.forest.position[blocks] != places) & (blocks > 0)
    say(found, blocks[wrong], f"{name}: not at the place it was published at")
    return True
