"""The trees themselves: nodes, which block hangs where, and the cuts and joints that keep a tree a radix tree.

Invariant: after each method every node is reachable from its tree's root, its keys are sorted and equal to the first
blocks of its children, a layered tree with prefixes hangs at the end of a node that is there, and `node_of` and
`position` tell for every listed block where it hangs. Called by `radix.py` and `layers.py`, which decide what to cut;
views and checks read it. It compares no prompt and knows no recency order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachemgr.children import Children
from cachemgr.eviction import EvictionQueue
from cachemgr.ghosts import Ghosts
from cachemgr.ids import BlockRun, NodeId
from cachemgr.nodes import NEVER, NO_BLOCKS, NO_CHILDREN, Node, Tree, join_runs
from cachemgr.policies import DEFAULT_POLICY, POLICIES, Policy
from common.layout import TOKEN_BYTES

# Passes over one attribute of many nodes: a third of the cost of a loop, and no tuple of all of them is made.
_NODE_ID, _KEY, _TAIL = attrgetter("node_id"), attrgetter("key"), attrgetter("tail")


class Forest:
    """All trees of a node.

    node_of:  int64 [num_blocks + 1], id of the node that lists a block, 0 none
    position: int32 [num_blocks + 1], index of the block in its sequence; stale while it is not listed
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        references: NDArray[np.int32],
        policy: Policy = POLICIES[DEFAULT_POLICY],
    ) -> None:
        self.block_bytes = block_tokens * TOKEN_BYTES
        self.trees: dict[tuple[int, bytes], Tree] = {}
        self.nodes: dict[NodeId, Node] = {}
        self.node_of: NDArray[np.int64] = np.zeros(num_blocks + 1, np.int64)
        self.position: NDArray[np.int32] = np.zeros(num_blocks + 1, np.int32)
        self.queue = EvictionQueue(self.nodes, policy)
        self.ghosts = Ghosts()
        self.uses = 0
        self._node_ids: Any = memoryview(self.node_of)  # type: ignore[arg-type]  # one entry costs a third of numpy's
        self._places = memoryview(self.position)  # type: ignore[arg-type]
        self._references = references
        self._positions = np.arange(num_blocks + 1, dtype=np.int32)
        self._last_node = 0

    def node_at(self, block: int) -> Node:
        """The node that lists a block. Raises KeyError where none does."""
        return self.nodes[self._node_ids[block]]

    def node_or_none(self, block: int) -> Node | None:
        """The node that lists a block, if one does."""
        return self.nodes.get(self._node_ids[block])

    def tree(self, owner: int, root_key: bytes) -> Tree:
        """The tree of a root, made where it is missing."""
        tree = self.trees.get((owner, root_key))
        if tree is None:
            tree = self.trees[owner, root_key] = Tree(owner, root_key)
        return tree

    def layered_tree(self, owner: int, root_key: bytes, base_key: bytes, start: int) -> Tree:
        """As `tree`, for one that begins after `start` blocks of a wider tree; `root_key` binds those."""
        tree = self.trees.get((owner, root_key))
        if tree is None:
            tree = self.trees[owner, root_key] = Tree(owner, root_key, base_key, start)
        return tree

    def anchor(self, tree: Tree, node: Node) -> None:
        """Hangs a layered tree at the end of its prefix, which lies in `node`: what goes on there is cut off."""
        count = tree.root.start - node.start
        if count < len(node.blocks):
            node = self.split(node, count)
        node.anchored += 1
        node.leaf_of = None
        tree.anchor = node

    def drop_tree(self, tree: Tree) -> None:
        """Forgets a tree whose nodes have been unlisted; harmless where it went with the last tree that hung in it."""
        self._release_anchor(tree)
        self.trees.pop((tree.owner, tree.root_key), None)

    def _release_anchor(self, tree: Tree) -> None:
        """A layered tree has no prefixes any more: its anchor may be a leaf again."""
        node, tree.anchor = tree.anchor, None
        if node is not None:
            node.anchored -= 1
            self.queue.push(node, first=True)

    def forget_if_empty(self, tree: Tree) -> None:
        """Drops a tree with neither prefixes nor users."""
        if not tree.users and not tree.root.children and self.trees.get((tree.owner, tree.root_key)) is tree:
            del self.trees[tree.owner, tree.root_key]

    def _new_id(self) -> NodeId:
        self._last_node += 1
        return NodeId(self._last_node)

    def add_child(
        self, parent: Node, edge: bytes, blocks: BlockRun, priority: int, *, tail: bool, expires_ns: int = NEVER
    ) -> Node:
        """Hangs a new node below the end of `parent`."""
        key = edge[: self.block_bytes]
        node = Node(
            self._new_id(), parent.tree, parent, edge, blocks, parent.end, tail=tail, priority=priority,
            last_use=self.uses, expires_ns=expires_ns, key=key,
        )  # fmt: skip
        if parent.children is NO_CHILDREN:
            parent.children = Children()
        parent.children.add(key, node)
        parent.leaf_of, parent.tails = None, parent.tails + tail
        self.nodes[node.node_id] = node
        self.queue.will_expire(node)
        self._list(node, blocks, node.start)
        return node

    def extend(self, node: Node, edge: bytes, blocks: BlockRun, expires_ns: int = NEVER) -> None:
        """Lengthens a leaf."""
        node.expires_ns = max(node.expires_ns, expires_ns)
        self._list(node, blocks, node.end)
        node.edge += edge
        node.blocks = np.concatenate((node.blocks, blocks))
        node.name = b""

    def extend_each(
        self,
        nodes: Iterable[Node],
        places: NDArray[np.int32],
        edges: Sequence[bytes | bytearray],
        blocks: BlockRun,
        expiries: Sequence[int],
    ) -> None:
        """As `extend` of each of these leaves, distinct ones, by one block: at these places of their sequences. Expiry
        0 is never."""
        raw, width, kind = blocks.tobytes(), blocks.itemsize, blocks.dtype
        ids, at = [], 0
        for node, edge, expires_ns in zip(nodes, edges, expiries, strict=True):
            if node.expires_ns < (expires_ns or NEVER):
                node.expires_ns = expires_ns or NEVER
            node.edge += edge
            # Two strings and a view of them cost a third of what joining two arrays does.
            node.blocks = np.frombuffer(node.blocks.tobytes() + raw[at : at + width], kind)
            node.name = b""
            ids.append(node.node_id)
            at += width
        self.node_of[blocks] = ids
        self.position[blocks] = places

    def _list(self, node: Node, blocks: BlockRun, start: int) -> None:
        if len(blocks) == 1:
            block = blocks.item(0)
            self._node_ids[block], self._places[block] = node.node_id, start
            return
        self.node_of[blocks] = node.node_id
        self.position[blocks] = self._positions[start : start + len(blocks)]

    def split(self, lower: Node, count: int) -> Node:
        """Cuts a node after its first `count` blocks; returns the new upper part. The lower part keeps its id."""
        size, parent = self.block_bytes, lower.parent
        if parent is None:
            raise ValueError("the root has no edge to split")
        upper = Node(
            self._new_id(), lower.tree, parent, lower.edge[: count * size], lower.blocks[:count], lower.start,
            priority=lower.priority, last_use=lower.last_use, expires_ns=lower.expires_ns, key=lower.key,
        )  # fmt: skip
        parent.children.replace(lower.key, upper)
        lower.edge = lower.edge[count * size :]
        lower.blocks = lower.blocks[count:]
        lower.start += count
        lower.key = lower.edge[:size]
        lower.parent, upper.leaf_of = upper, None
        lower.leaf_of = upper if lower.leaf_of else None
        upper.children = Children()
        upper.children.add(lower.key, lower)
        self.nodes[upper.node_id] = upper
        self.queue.will_expire(upper)
        self.node_of[upper.blocks] = upper.node_id
        return upper

    def trim(self, node: Node, count: int) -> None:
        """Keeps the first `count` blocks of a leaf; the caller clears `node_of` of the others."""
        ghosts, begin = self.ghosts, count * self.block_bytes
        tokens = node.edge[begin : begin + self.block_bytes]
        ghosts.note((node.tree, node.start + count, tokens, len(node.blocks) - count, node.node_id, ghosts.stamp))
        node.blocks = node.blocks[:count].copy()
        node.edge = node.edge[: count * self.block_bytes]
        node.name = b""

    def remove(self, node: Node) -> None:
        """Takes a leaf out of its tree; the caller clears `node_of`. A parent that becomes a leaf may go next."""
        parent = node.parent
        if parent is None or (node.children is not NO_CHILDREN and node.children) or node.anchored:
            raise ValueError("only a leaf can be removed")
        self.ghosts.note((node.tree, node.start, node.key, len(node.blocks), parent.node_id, self.ghosts.stamp))
        emptied = parent.children.remove(node.key)
        if node.tail:
            parent.tails -= 1
        del self.nodes[node.node_id]
        if node.order is not None:
            node.order.discard(node)
        if emptied:
            self.has_become_leaf(parent)

    def remove_leaves(self, nodes: list[Node], counts: list[int]) -> None:
        """As `remove`, for leaves of one parent that stand in no order any more and have so many blocks."""
        parent, keys = nodes[0].parent, list(map(_KEY, nodes))
        if parent is None:
            raise ValueError("the root is no leaf")
        tree, start, above, stamp = map(repeat, (parent.tree, parent.end, parent.node_id, self.ghosts.stamp))
        self.ghosts.note_all(zip(tree, start, keys, counts, above, stamp, strict=False))
        if parent.tails:
            parent.tails -= sum(map(_TAIL, nodes))
        deque(map(self.nodes.__delitem__, map(_NODE_ID, nodes)), maxlen=0)
        if parent.children.remove_all(keys):
            self.has_become_leaf(parent)

    def has_become_leaf(self, node: Node) -> None:
        """The last child of a node has gone."""
        if node.parent is None:
            self._release_anchor(node.tree)
            self.forget_if_empty(node.tree)
        else:
            self.queue.push(node, first=True)

    def forget_node(self, node: Node) -> None:
        """Strikes a node that hangs nowhere any more from the register and the queue."""
        del self.nodes[node.node_id]
        if node.order is not None:
            node.order.discard(node)

    def drop_tails(self, node: Node, key: bytes) -> BlockRun:
        """Unlists the children that are tails, a strict prefix of `key` and held by nobody."""
        if not node.tails:
            return NO_BLOCKS
        dropped = []
        for length in range(TOKEN_BYTES, len(key), TOKEN_BYTES):
            child = node.children.get(key[:length])
            if child is not None and self._references[child.blocks[0]] == 1:
                dropped.append(child.blocks)
                # Its place is taken by what supersedes it: the parent must not be queued or forgotten in between.
                node.children.remove(key[:length])
                self.forget_node(child)
                node.tails -= 1
        blocks = join_runs(dropped)
        self.node_of[blocks] = 0
        return blocks
