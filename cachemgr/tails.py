"""The last resort for room: private tails that hang below prefixes of a wider scope which nobody uses.

Such prefixes count as room, for they are nobody's floor; a tail at whose end nothing is held stands before them. Where
everything else is gone, tails go, the least recently used first, also those of a tenant at its floor. Invariant: of a
tenant at its floor nothing goes but such tails, and no more of them than it takes. Called by `state.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cachemgr.ids import BlockRun
from cachemgr.nodes import Node, Tree, join_runs

if TYPE_CHECKING:
    from cachemgr.state import CacheState


def clear_tails(state: CacheState, count: int, owner: int) -> None:
    """Drops tails, and what that frees of the prefixes above them, until `count` blocks are free or none is left."""
    forest, references = state.index.forest, state.pool.references
    hanging = [tree for tree in forest.trees.values() if tree.anchor and references[tree.anchor.blocks[-1]] == 1]
    for tree in sorted(hanging, key=_rank):
        anchor = tree.anchor
        if anchor is None or count <= state.pool.num_free:
            return
        forest.ghosts.stamp = (state.now_ns, owner, "room")
        state.drop_idle(_remove(state, tree), "room")
        missing = count - state.pool.num_free
        if missing > 0:
            state.evict(missing, {anchor.tree.owner: missing}, owner=owner)


def _rank(tree: Tree) -> tuple[int, int]:
    """(priority, last use) of the newest of a tree: a use of a path is one of all of it from the root on."""
    return max((node.priority, node.last_use) for node in tree.root.children)


def _remove(state: CacheState, tree: Tree) -> BlockRun:
    """Unlists every node of a tree, the last ones first; the blocks."""
    forest = state.index.forest
    nodes: list[Node] = list(tree.root.children)
    for node in nodes:
        nodes.extend(node.children)
    for node in reversed(nodes):
        forest.remove(node)
    blocks = join_runs([node.blocks for node in nodes])
    forest.node_of[blocks] = 0
    return blocks
