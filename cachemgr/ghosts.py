"""What was evicted lately, for explanations: a bounded ring of where it stood, when it went and for whom.

Invariant: an entry costs a fraction of a microsecond and holds one block's tokens at most. Written by `forest.py` as it
cuts nodes off, stamped by `state.py`, read by `explain.py`. Nothing is decided by it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from cachemgr.ids import NodeId
from cachemgr.nodes import Tree

MAX_GHOSTS: Final = 4096

Stamp = tuple[int, int, str]  # when (ns), owner number it was evicted for (0: none), cause
_Entry = tuple[Tree, int, bytes, int, NodeId, Stamp]


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
    """The newest MAX_GHOSTS evictions. `stamp` is of those that come next; `note` takes the fields of a Ghost as one
    tuple, `note_all` an iterable of such: they are called for each node that goes, so they are the ring's own."""

    __slots__ = ("_ring", "note", "note_all", "stamp")

    def __init__(self) -> None:
        self._ring: deque[_Entry] = deque(maxlen=MAX_GHOSTS)
        self.note = self._ring.append
        self.note_all = self._ring.extend
        self.stamp: Stamp = (0, 0, "")

    def forget(self, owner: int) -> None:
        """Drops those of one owner, whose prefixes are purged."""
        kept = [item for item in self._ring if item[0].owner != owner]
        self._ring.clear()
        self._ring.extend(kept)

    def of(self, owner: int, root_key: bytes) -> list[Ghost]:
        """Those of one tree, the newest first."""
        found = [item for item in self._ring if item[0].owner == owner and item[0].root_key == root_key]
        return [Ghost(*item) for item in reversed(found)]
