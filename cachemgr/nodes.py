"""Nodes and trees of the prefix index, and the comparison of token strings.

A node owns the tokens of its edge and the blocks that hold them: whole blocks, or, in a *tail* node, one block that is
partly filled. Invariant: a tail has no children. Written by `forest.py`, `radix.py` and `eviction.py` alone; the views
read it. It never touches the pool.
"""

from __future__ import annotations

import numpy as np

from cachemgr.children import Children
from cachemgr.ids import BlockRun, NodeId
from common.layout import TOKEN_BYTES

NO_CHILDREN = Children()
NO_BLOCKS: BlockRun = np.zeros(0, np.intp)
NO_BLOCKS.setflags(write=False)
_SHORT_BYTES = 512  # below this, one big-integer xor beats numpy's fixed costs


class Node:
    """One edge of a tree. `blocks` is never changed in place: views of it stay valid.

    edge:     packed little-endian int32 tokens
    start:    index of the first block in the sequence from the root
    children: by their first blocks; nodes without any share one empty map
    tails:    how many children are tails
    queued:   an entry of the eviction queue names this node
    name:     cached chained name of the last block; empty means not computed
    """

    __slots__ = (
        "blocks",
        "children",
        "edge",
        "last_use",
        "name",
        "node_id",
        "parent",
        "priority",
        "queued",
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
    ) -> None:
        self.node_id = node_id
        self.tree = tree
        self.parent = parent
        self.edge = edge
        self.blocks = blocks
        self.start = start
        self.tail = tail
        self.priority = priority
        self.last_use = last_use
        self.children = NO_CHILDREN
        self.tails = 0
        self.queued = False
        self.name = b""

    @property
    def end(self) -> int:
        """Index of the first block after this node."""
        return self.start + len(self.blocks)


class Tree:
    """The prefixes of one cache key root of one owner. `users` counts the leases that may still publish here."""

    __slots__ = ("owner", "root", "root_key", "users")

    def __init__(self, owner: int, root_key: bytes) -> None:
        self.owner = owner
        self.root_key = root_key
        self.users = 0
        self.root = Node(NodeId(0), self, None, b"", NO_BLOCKS, 0)


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


def join_runs(runs: list[BlockRun]) -> BlockRun:
    """One run of several; a single one is returned as it is."""
    if len(runs) == 1:
        return runs[0]
    return np.concatenate(runs) if runs else NO_BLOCKS
