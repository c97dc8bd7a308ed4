"""The children of a node, by the bytes of their first block, and in the order of these.

Invariants: the sorted keys are in ascending order over all chunks, each differs from the others, and every child's is
among them; no chunk is empty unless it is the only one. A key whose child is gone is *stale*: it stays until a new key
comes beside it or its chunk is swept, so that taking a child away costs one dictionary entry. A lookup is one of a
dictionary, a neighbour one bisection; a change moves the pointers of one chunk, so that ten thousands of prompts below
one root cost no more than a few. Called by `forest.py` for writing and `radix.py` for reading. It knows no tree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cachemgr.nodes import Node

CHUNK: Final = 512  # a chunk is halved beyond twice this
SWEEP: Final = 256  # removals after which a chunk is swept, once more keys than `SLACK` and all children are stale
SLACK: Final = 1024
BESIDE: Final = 4  # keys after a new one that are looked at: as many stale ones go as new ones come


class Children:
    """A sorted map from a key (packed tokens of at most one block) to a child."""

    __slots__ = ("_borders", "_keys", "_nodes", "_num_keys", "_removed", "_swept")

    def __init__(self) -> None:
        self._borders: list[bytes] = []  # chunk i has keys below border i, chunk i + 1 keys from it on
        self._keys: list[list[bytes]] = [[]]
        self._nodes: dict[bytes, Node] = {}
        self._num_keys = 0  # stale ones too
        self._removed = 0  # since the last sweep
        self._swept = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter([self._nodes[key] for key in self.keys()])

    def keys(self) -> list[bytes]:
        """All keys in order."""
        return [key for keys in self._keys for key in keys if key in self._nodes]

    def get(self, key: bytes) -> Node | None:
        """The child of exactly this key."""
        return self._nodes.get(key)

    def around(self, key: bytes) -> tuple[Node | None, Node | None]:
        """The child at or after a key, and the one before it: one of them shares the longest prefix with the key."""
        if not self._nodes:
            return None, None
        chunk = bisect_right(self._borders, key) if self._borders else 0
        place = bisect_left(self._keys[chunk], key)
        return self._next(chunk, place), self._last(chunk, place)

    def _next(self, chunk: int, place: int) -> Node | None:
        """The child at a place or after it."""
        while chunk < len(self._keys):
            keys = self._keys[chunk]
            for number in range(place, len(keys)):
                node = self._nodes.get(keys[number])
                if node is not None:
                    return node
            chunk, place = chunk + 1, 0
        return None

    def _last(self, chunk: int, place: int) -> Node | None:
        """The child before a place."""
        while chunk >= 0:
            keys = self._keys[chunk]
            for number in range(place - 1, -1, -1):
                node = self._nodes.get(keys[number])
                if node is not None:
                    return node
            chunk -= 1
            place = len(self._keys[chunk])
        return None

    def add(self, key: bytes, node: Node) -> None:
        """Adds a child. Raises ValueError where the key is taken."""
        if key in self._nodes:
            raise ValueError("a child with these tokens is there already")
        any_stale = self._num_keys > len(self._nodes)
        self._nodes[key] = node
        chunk = bisect_right(self._borders, key)
        keys = self._keys[chunk]
        place = bisect_left(keys, key)
        if any_stale:
            if place < len(keys) and keys[place] == key:
                return
            beside = keys[place : place + BESIDE]
            kept = [other for other in beside if other in self._nodes]
            self._num_keys += 1 + len(kept) - len(beside)
            keys[place : place + BESIDE] = [key, *kept]
        else:
            self._num_keys += 1
            keys.insert(place, key)
        if len(keys) > 2 * CHUNK:
            self._keys[chunk : chunk + 1] = [keys[:CHUNK], keys[CHUNK:]]
            self._borders.insert(chunk, keys[CHUNK])

    def replace(self, key: bytes, node: Node) -> None:
        """Puts another node under a key. Raises KeyError where there is none."""
        if key not in self._nodes:
            raise KeyError("no child has these tokens")
        self._nodes[key] = node

    def remove(self, key: bytes) -> bool:
        """Removes a child; whether it was the last. Raises KeyError where there is none."""
        nodes = self._nodes
        del nodes[key]
        removed = self._removed = self._removed + 1
        if removed >= SWEEP and self._num_keys > 2 * len(nodes) + SLACK:
            self._sweep()
        return not nodes

    def remove_all(self, keys: list[bytes]) -> bool:
        """As `remove`, for several."""
        nodes = self._nodes
        deque(map(nodes.__delitem__, keys), maxlen=0)
        self._removed += len(keys)
        if self._removed >= SWEEP and self._num_keys > 2 * len(nodes) + SLACK:
            self._sweep()
        return not nodes

    def _sweep(self) -> None:
        """Rids one chunk of its stale keys; each in its turn."""
        self._removed = 0
        chunk = self._swept % len(self._keys)
        self._swept = chunk + 1
        keys = self._keys[chunk]
        self._keys[chunk] = list(filter(self._nodes.__contains__, keys))
        self._num_keys += len(self._keys[chunk]) - len(keys)
        if not self._keys[chunk] and self._borders:
            del self._keys[chunk], self._borders[max(chunk - 1, 0)]
