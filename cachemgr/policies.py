"""Eviction policies: in what order the nodes of one owner and one priority go.

An order holds nodes that may be evicted one day, inner ones too, and names the next one. Invariant: a node stands in at
most one order, `node.order`, at most once; what was popped stands in none. A policy says how orders are made and
whether priorities count. Used by `eviction.py`, which `bench/replay.py` runs on recorded traces. Orders know no pool
and no tree: whether a node can go now is the caller's question.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Final, Protocol

from cachemgr.least_recent import LeastRecentlyUsed
from cachemgr.nodes import Node

__all__ = ["DEFAULT_POLICY", "POLICIES", "LeastRecentlyUsed", "Order", "Policy", "Sieve", "Worth"]

_SLACK: Final = 1024  # dead entries that a heap tolerates before it is rebuilt
_DEPTH_SCALE: Final = 256  # blocks before a block that double what it costs to compute it again


class Order(Protocol):
    """An order of eviction."""

    def use(self, node: Node) -> None:
        """A node was used; one that is not here enters."""

    def put_first(self, node: Node) -> None:
        """A node that is not here enters, to go as soon as its order allows."""

    def discard(self, node: Node) -> None:
        """A node leaves."""

    def first(self) -> Node | None:
        """The node that goes next, or None."""

    def drain(self) -> Iterator[Node]:
        """Takes off the node that goes next, whenever asked for one, until there is none: as `pop`, and cheaper."""

    def ahead(self, count: int) -> list[Node]:
        """At most `count` nodes that go next, one after the other; none where that cannot be told ahead."""

    def drop(self, nodes: Sequence[Node]) -> None:
        """Takes off the first ones that `ahead` has just named, and which leave the tree with it: their `order` means
        nothing any more."""

    def pop(self) -> Node | None:
        """Takes off the node that goes next, or None."""

    def nodes(self) -> list[Node]:
        """All nodes, for checks."""


class _OneByOne:
    """An order whose next node is known only once the one before it went."""

    __slots__ = ()

    def drain(self) -> Iterator[Node]:
        """See Order."""
        return iter(self.pop, None)

    def ahead(self, count: int) -> list[Node]:
        """See Order."""
        return []

    def drop(self, nodes: Sequence[Node]) -> None:
        """See Order."""
        for node in nodes:
            self.discard(node)

    def discard(self, node: Node) -> None:
        """See Order."""
        raise NotImplementedError

    def pop(self) -> Node | None:
        """See Order."""
        raise NotImplementedError


class Sieve(_OneByOne):
    """SIEVE (Zhang et al., NSDI 2024): first in, first out, but the hand passes a node once for its uses since.

    The queue, oldest first, is `_passed` and then `_ahead`; the hand stands between them.
    """

    __slots__ = ("_ahead", "_passed")

    def __init__(self) -> None:
        self._ahead: OrderedDict[Node, bool] = OrderedDict()  # node -> used since it came, or since the hand passed
        self._passed: OrderedDict[Node, bool] = OrderedDict()

    def use(self, node: Node) -> None:
        """See Order."""
        if node.order is not self:
            node.order = self
            self._ahead[node] = False
        elif node in self._ahead:
            self._ahead[node] = True
        else:
            self._passed[node] = True

    def put_first(self, node: Node) -> None:
        """See Order."""
        node.order = self
        self._ahead[node] = False
        self._ahead.move_to_end(node, last=False)

    def discard(self, node: Node) -> None:
        """See Order."""
        del (self._ahead if node in self._ahead else self._passed)[node]
        node.order = None

    def first(self) -> Node | None:
        """See Order."""
        while True:
            if not self._ahead:
                if not self._passed:
                    return None
                self._ahead, self._passed = self._passed, self._ahead
            node, used = next(iter(self._ahead.items()))
            if not used:
                return node
            del self._ahead[node]
            self._passed[node] = False

    def pop(self) -> Node | None:
        """See Order."""
        node = self.first()
        if node is not None:
            del self._ahead[node]
            node.order = None
        return node

    def nodes(self) -> list[Node]:
        """See Order."""
        return [*self._passed, *self._ahead]


class Worth(_OneByOne):
    """By a worth that uses raise and age lowers: GreedyDual-Size-Frequency (Cherkasova, 1998) with a cost for each use.

    The age is the worth of what went last, so that what was once used much does not stay for ever. With a cost of 1 it
    is LFU with dynamic aging. `cost` of a node is that of computing one of its blocks again.
    """

    __slots__ = ("_age", "_cost", "_heap", "_uses", "_worth")

    def __init__(self, cost: Callable[[Node], float]) -> None:
        self._cost = cost
        self._age = 0.0
        self._heap: list[tuple[float, int, Node]] = []  # the ids order equal worths, so that nodes are never compared
        self._uses: dict[Node, int] = {}
        self._worth: dict[Node, float] = {}

    def use(self, node: Node) -> None:
        """See Order."""
        self._enter(node, self._uses.get(node, 0) + 1)

    def put_first(self, node: Node) -> None:
        """See Order."""
        self._enter(node, self._uses.get(node, 0))

    def discard(self, node: Node) -> None:
        """See Order."""
        del self._worth[node], self._uses[node]
        node.order = None

    def first(self) -> Node | None:
        """See Order."""
        heap = self._heap
        while heap:
            worth, _, node = heap[0]
            now = self._worth.get(node)
            if now == worth:
                return node
            heappop(heap)
        return None

    def pop(self) -> Node | None:
        """See Order."""
        node = self.first()
        if node is not None:
            heappop(self._heap)
            self._age = self._worth[node]
            self.discard(node)
        return node

    def nodes(self) -> list[Node]:
        """See Order."""
        return list(self._worth)

    def _enter(self, node: Node, uses: int) -> None:
        node.order = self
        self._uses[node] = uses
        worth = self._worth[node] = self._age + uses * self._cost(node)
        heappush(self._heap, (worth, node.node_id, node))
        if len(self._heap) > 4 * len(self._worth) + _SLACK:
            self._heap = [(worth, node.node_id, node) for node, worth in self._worth.items()]
            heapify(self._heap)


@dataclass(frozen=True, slots=True)
class Policy:
    """How orders are made, and whether a lower priority goes before a higher one whatever the order says."""

    make_order: Callable[[], Order]
    by_priority: bool = True


def _even(node: Node) -> float:
    return 1.0


def _depth(node: Node) -> float:
    # The attention of a token reads all tokens before it.
    return 1.0 + node.start / _DEPTH_SCALE


DEFAULT_POLICY: Final = "priority-lru"
POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {
        DEFAULT_POLICY: Policy(LeastRecentlyUsed),
        "lru": Policy(LeastRecentlyUsed, by_priority=False),
        "sieve": Policy(Sieve),
        "lfu": Policy(lambda: Worth(_even)),
        "cost": Policy(lambda: Worth(_depth)),
    }
)
