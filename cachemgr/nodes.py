"""Nodes and trees of the prefix index, and the comparison of token strings.

A node owns the tokens of its edge and the blocks that hold them: whole blocks, or, in a *tail* node, one block that is
partly filled. Invariant: a tail has neither children nor anchored trees. Written by `forest.py`, `radix.py` and
`eviction.py` alone; the views read it. It never touches the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cachemgr.children import Children
from cachemgr.ids import BlockRun, NodeId
from common.layout import TOKEN_BYTES

if TYPE_CHECKING:
    from cachemgr.policies import Order

NO_CHILDREN = Children()
NO_BLOCKS: BlockRun = np.zeros(0, np.intp)
NO_BLOCKS.setflags(write=False)
NEVER: Final = 1 << 62  # of times: later than any
_SHORT_BYTES = 512  # below this, one big-integer xor beats numpy's fixed costs


class Node:
    """One edge of a tree. `blocks` is never changed in place: views of it stay valid.

    edge:     packed little-endian int32 tokens
    blocks:   that hold them; 0 is a gap (`gaps.py`)
    start:    index of the first block in the sequence from the root
    children: by their first blocks; nodes without any share one empty map
    key:      the first block of its edge, the very object that its parent's children have: its hash is known
    leaf_of:  its parent, as long as nothing has hung below it; None once something did, or if it is a root
    tails:    how many children are tails
    anchored: how many trees with prefixes hang at its end: it is no leaf while there is one
    order:    the order of eviction that it stands in, at `place` (the order's own number)
    expires_ns: time after which it goes first; it never lies before that of a child, unless that is held
    name:     cached chained name of the last block; empty means not computed
    """

    __slots__ = (
        "anchored",
        "blocks",
        "children",
        "edge",
        "expires_ns",
        "key",
        "last_use",
        "leaf_of",
        "name",
        "node_id",
        "order",
        "parent",
        "place",
        "priority",
        "start",
        "tail",
        "tails",
        "tree",
    )

    def __init__(
        self,
        node_id: NodeId,
        tree: Tree,
        parent: Node | None,
        edge: bytes,
        blocks: BlockRun,
        start: int,
        *,
        tail: bool = False,
        priority: int = 0,
        last_use: int = 0,
        expires_ns: int = NEVER,
        key: bytes = b"",
    ) -> None:
        self.node_id = node_id
        self.tree = tree
        self.parent = self.leaf_of = parent
        self.edge = edge
        self.key = key
        self.blocks = blocks
        self.start = start
        self.tail = tail
        self.priority = priority
        self.last_use = last_use
        self.children = NO_CHILDREN
        self.tails = 0
        self.anchored = 0
        self.order: Order | None = None
        self.place = 0
        self.expires_ns = expires_ns
        self.name = b""

    @property
    def end(self) -> int:
        """Index of the first block after this node."""
        return self.start + len(self.blocks)


class Tree:
    """The prefixes of one cache key root of one owner. `users` counts the leases that may still publish here.

    A *layered* tree holds what comes after a prefix in the tree of a wider scope. Its root starts where that prefix
    ends (`root.start` > 0), its key binds the wider tree and the tokens before it; `base_key` is the root without them.
    anchor: the node of the wider tree that ends there; set exactly while a layered tree has prefixes
    """

    __slots__ = ("anchor", "base_key", "owner", "root", "root_key", "users")

    def __init__(self, owner: int, root_key: bytes, base_key: bytes = b"", start: int = 0) -> None:
        self.owner = owner
        self.root_key = root_key
        self.base_key = base_key or root_key
        self.users = 0
        self.anchor: Node | None = None
        self.root = Node(NodeId(0), self, None, b"", NO_BLOCKS, start)


def common_tokens(left: bytes, right: bytes) -> int:
    """How many leading tokens two packed token strings share."""
    size = min(len(left), len(right))
    if size <= _SHORT_BYTES:
        differ = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
        if not differ:
            return size // TOKEN_BYTES
        return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)
    count = size // TOKEN_BYTES
    unequal = np.frombuffer(left, "<i4", count) != np.frombuffer(right, "<i4", count)
    first = int(unequal.argmax())
    return first if unequal[first] else count


def node_before(node: Node | None, count: int) -> Node | None:
    """The deepest node that begins before block `count` of a path, from `node` up, also through the wider tree that it
    hangs below; the root where none does."""
    while node is not None and node.start >= count:
        above = node.tree.anchor if node.parent is None else node.parent
        if above is None:
            break
        node = above
    return node


def join_runs(runs: list[BlockRun]) -> BlockRun:
    """One run of several; a single one is returned as it is."""
    if len(runs) == 1:
        return runs[0]
    return np.concatenate(runs) if runs else NO_BLOCKS
