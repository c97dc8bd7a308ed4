"""The children of a node, sorted by the bytes of their first block.

Invariant: keys are in ascending order over all chunks, each differs from the others, and no chunk is empty unless it is
the only one. Lookup is a bisection; a change moves the pointers of one chunk, so that ten thousands of prompts below
one root cost no more than a few. Called by `forest.py` for writing and `radix.py` for reading. It knows no tree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cachemgr.nodes import Node

CHUNK: Final = 512  # a chunk is halved beyond twice this


class Children:
    """A sorted map from a key (packed tokens of at most one block) to a child."""

    __slots__ = ("_borders", "_keys", "_nodes")

    def __init__(self) -> None:
        self._borders: list[bytes] = []  # chunk i has keys below border i, chunk i + 1 keys from it on
        self._keys: list[list[bytes]] = [[]]
        self._nodes: list[list[Node]] = [[]]

    def __len__(self) -> int:
        return len(self._keys[0]) if not self._borders else sum(map(len, self._keys))

    def __bool__(self) -> bool:
        return bool(self._keys[0])

    def __iter__(self) -> Iterator[Node]:
        for nodes in self._nodes:
            yield from nodes

    def keys(self) -> list[bytes]:
        """All keys in order."""
        return [key for keys in self._keys for key in keys]

    def get(self, key: bytes) -> Node | None:
        """The child of exactly this key."""
        chunk = bisect_right(self._borders, key) if self._borders else 0
        keys = self._keys[chunk]
        place = bisect_left(keys, key)
        return self._nodes[chunk][place] if place < len(keys) and keys[place] == key else None

    def around(self, key: bytes) -> tuple[Node | None, Node | None]:
        """The child at or after a key, and the one before it: one of them shares the longest prefix with the key."""
        chunk = bisect_right(self._borders, key) if self._borders else 0
        nodes = self._nodes[chunk]
        place = bisect_left(self._keys[chunk], key)
        if place < len(nodes):
            after: Node | None = nodes[place]
        else:
            after = self._nodes[chunk + 1][0] if chunk < len(self._borders) else None
        if place:
            before: Node | None = nodes[place - 1]
        else:
            before = self._nodes[chunk - 1][-1] if chunk else None
        return after, before

    def add(self, key: bytes, node: Node) -> None:
        """Adds a child. Raises ValueError where the key is taken."""
        chunk = bisect_right(self._borders, key)
        keys, nodes = self._keys[chunk], self._nodes[chunk]
        place = bisect_left(keys, key)
        if place < len(keys) and keys[place] == key:
            raise ValueError("a child with these tokens is there already")
        keys.insert(place, key)
        nodes.insert(place, node)
        if len(keys) > 2 * CHUNK:
            self._keys[chunk : chunk + 1] = [keys[:CHUNK], keys[CHUNK:]]
            self._nodes[chunk : chunk + 1] = [nodes[:CHUNK], nodes[CHUNK:]]
            self._borders.insert(chunk, keys[CHUNK])

    def replace(self, key: bytes, node: Node) -> None:
        """Puts another node under a key. Raises KeyError where there is none."""
        chunk, place = self._find(key)
        self._nodes[chunk][place] = node

    def remove(self, key: bytes) -> None:
        """Removes a child. Raises KeyError where there is none."""
        chunk, place = self._find(key)
        del self._keys[chunk][place], self._nodes[chunk][place]
        if not self._keys[chunk] and self._borders:
            del self._keys[chunk], self._nodes[chunk], self._borders[max(chunk - 1, 0)]

    def _find(self, key: bytes) -> tuple[int, int]:
        chunk = bisect_right(self._borders, key)
        keys = self._keys[chunk]
        place = bisect_left(keys, key)
        if place == len(keys) or keys[place] != key:
            raise KeyError("no child has these tokens")
        return chunk, place
