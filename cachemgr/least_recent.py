"""The order of eviction by last use: a log of uses, in which only the last one of each node is left standing.

Invariant: a node that is here stands in the log once, at `node.place`; all entries before `_head` are empty, as are
those of uses that a later one or a discard has struck out. A use appends and strikes out, so it costs no lookup; taking
the next ones is cutting a slice. A log that is mostly empty is written anew. Made by `policies.py`. It knows no pool
and no tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from cachemgr.nodes import Node

SLACK: Final = 1024  # empty entries that a log tolerates, beside as many as it has nodes
ROOM: Final = 64  # empty entries before the first, for what is put there


class LeastRecentlyUsed:
    """See `policies.Order`. A path is used from its end to its beginning, so that an end goes before what it hangs
    below."""

    __slots__ = ("_head", "_log", "_most", "_num")

    def __init__(self) -> None:
        self._log: list[Node | None] = []
        self._head = 0  # no entry before this one has a node
        self._num = 0
        self._most = SLACK  # entries, before the log is written anew

    def use(self, node: Node) -> None:
        """See Order."""
        log = self._log
        if node.order is self:
            log[node.place] = None
        else:
            node.order = self
            self._num += 1
        node.place = place = len(log)
        log.append(node)
        if place >= self._most:
            self._write_anew(ROOM)

    def put_first(self, node: Node) -> None:
        """See Order."""
        if not self._head:
            self._write_anew(ROOM + self._num)
        self._head -= 1
        self._log[self._head] = node
        node.order, node.place = self, self._head
        self._num += 1

    def discard(self, node: Node) -> None:
        """See Order."""
        self._log[node.place] = None
        node.order = None
        self._num -= 1

    def first(self) -> Node | None:
        """See Order."""
        if not self._num:
            return None
        log, head = self._log, self._head
        while (node := log[head]) is None:
            head += 1
        self._head = head
        return node

    def drain(self) -> Iterator[Node]:
        """See Order."""
        while (node := self.first()) is not None:
            self._log[self._head] = None
            self._num -= 1
            node.order = None
            yield node

    def ahead(self, count: int) -> list[Node]:
        """See Order."""
        if count < 1 or self.first() is None:
            return []
        end = self._head + count
        found = [node for node in self._log[self._head : end] if node is not None]
        while len(found) < count and end < len(self._log):
            begin, end = end, end + count
            found += [node for node in self._log[begin:end] if node is not None]
        return found[:count]

    def drop(self, nodes: Sequence[Node]) -> None:
        """See Order."""
        if nodes:
            head, self._head = self._head, nodes[-1].place + 1
            self._log[head : self._head] = [None] * (self._head - head)
            self._num -= len(nodes)

    def pop(self) -> Node | None:
        """See Order."""
        return next(self.drain(), None)

    def nodes(self) -> list[Node]:
        """See Order."""
        return [node for node in self._log if node is not None]

    def _write_anew(self, room: int) -> None:
        """Leaves the empty entries out, but for `room` of them before the first node."""
        nodes = self.nodes()
        for place, node in enumerate(nodes, room):
            node.place = place
        self._log = [None] * room
        self._log += nodes
        self._head, self._most = room, 2 * len(nodes) + SLACK
