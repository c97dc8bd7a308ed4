"""What was evicted lately, for explanations: a bounded ring of where it stood, when it went and for whom.

Invariant: an entry costs a fraction of a microsecond and holds one block's tokens at most. Written by `forest.py` as it
cuts nodes off, stamped by `state.py`, read by `explain.py`. Nothing is decided by it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from cachemgr.ids import NodeId
from cachemgr.nodes import Node, Tree

MAX_GHOSTS: Final = 4096

Stamp = tuple[int, int, str]  # when (ns), owner number it was evicted for (0: none), cause


@dataclass(frozen=True, slots=True)
class Ghost:
    """`count` blocks of a tree from block `start` on, of which the first held `tokens`; they hung at the end of node
    `parent` (0: at the root)."""

    tree: Tree
    start: int
    tokens: bytes
    count: int
    parent: NodeId
    stamp: Stamp


class Ghosts:
    """The newest MAX_GHOSTS evictions. `stamp` goes to each one that comes."""

    __slots__ = ("_block_bytes", "_ring", "stamp")

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._ring: deque[tuple[Tree, int, bytes, int, NodeId, Stamp]] = deque(maxlen=MAX_GHOSTS)
        self.stamp: Stamp = (0, 0, "")

    def removed(self, node: Node, parent: Node) -> None:
        """A leaf is about to go, whole."""
        tokens = node.edge[: self._block_bytes]
        self._ring.append((node.tree, node.start, tokens, len(node.blocks), parent.node_id, self.stamp))

    def trimmed(self, node: Node, count: int) -> None:
        """A leaf is about to keep its first `count` blocks alone."""
        begin = count * self._block_bytes
        tokens = node.edge[begin : begin + self._block_bytes]
        dropped = len(node.blocks) - count
        self._ring.append((node.tree, node.start + count, tokens, dropped, node.node_id, self.stamp))

    def of(self, owner: int, root_key: bytes) -> list[Ghost]:
        """Those of one tree, the newest first."""
        found = [item for item in self._ring if item[0].owner == owner and item[0].root_key == root_key]
        return [Ghost(*item) for item in reversed(found)]
