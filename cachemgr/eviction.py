"""The eviction queue: which leaf of an owner's trees goes next, and when nodes expire.

Order: lower priority first, then as the policy says (least recently used); leaves only, each trimmed from its tail, so
that a child never outlives its parent. Invariant: every leaf whose last block nobody holds stands in the order of its
owner and priority. Inner and held nodes may stand there too; they are taken off when they are met. Whose turn it is
among the owners is decided in `quotas.py`. Called by `radix.py`, `forest.py` and `reclaim.py`. It drops no block.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachemgr.ids import BlockRun, NodeId
from cachemgr.nodes import NEVER, Node
from cachemgr.policies import DEFAULT_POLICY, POLICIES, Order, Policy

_SLACK: Final = 1024  # entries of nodes that are gone that the heap of expiries tolerates


class OwnerQueue:
    """The orders of one owner, by priority. An empty order stays: there are at most 101."""

    __slots__ = ("_levels", "_policy", "orders")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._levels: list[int] = []
        self.orders: dict[int, Order] = {}

    def level_of(self, node: Node) -> int:
        """The key of the order that a node belongs in by its present priority."""
        return node.priority if self._policy.by_priority else 0

    def order_of(self, node: Node) -> Order:
        """The order that a node belongs in by its present priority; made where it is missing."""
        level = node.priority if self._policy.by_priority else 0
        order = self.orders.get(level)
        if order is None:
            order = self.orders[level] = self._policy.make_order()
            insort(self._levels, level)
        return order

    def lowest(self) -> Iterator[Order]:
        """The orders that hold anything, of the lowest priority first."""
        for level in self._levels:
            order = self.orders[level]
            if order.first() is not None:
                yield order

    def head(self) -> tuple[int, int] | None:
        """(priority, last use) of the node that goes next, or None."""
        for order in self.lowest():
            node = order.first()
            if node is not None:
                return node.priority, node.last_use
        return None


class EvictionQueue:
    """The queues of all owners, and a heap of (expiry, node id) of the nodes that expire."""

    def __init__(self, nodes: dict[NodeId, Node], policy: Policy = POLICIES[DEFAULT_POLICY]) -> None:
        self._nodes = nodes
        self._policy = policy
        self.owners: dict[int, OwnerQueue] = {}
        self.expiries: list[tuple[int, NodeId]] = []

    def of(self, owner: int) -> OwnerQueue:
        """The queue of an owner."""
        queue = self.owners.get(owner)
        if queue is None:
            queue = self.owners[owner] = OwnerQueue(self._policy)
        return queue

    def use(self, node: Node) -> None:
        """A node that is no root was used, or has a new priority."""
        order = self.of(node.tree.owner).order_of(node)
        if node.order is not None and node.order is not order:
            node.order.discard(node)
        order.use(node)

    def push(self, node: Node, *, first: bool = False) -> None:
        """A node may be evictable now. Harmless where it is in its order, is the root or has something below it.

        `first`: it became a leaf because what hung below it went, and nobody used it since.
        """
        if node.order is not None or node.children or node.anchored or node.parent is None:
            return
        order = self.of(node.tree.owner).order_of(node)
        if first:
            order.put_first(node)
        else:
            order.use(node)

    def discard(self, node: Node) -> None:
        """A node is in no tree any more."""
        if node.order is not None:
            node.order.discard(node)

    def will_expire(self, node: Node) -> None:
        """Watches a new node whose expiry is set. A later expiry is seen when this one comes."""
        if node.expires_ns != NEVER:
            self._watch(node, node.expires_ns)

    def is_due(self, now_ns: int) -> bool:
        """Whether `take_expired` may find anything."""
        return bool(self.expiries) and self.expiries[0][0] <= now_ns

    def take_expired(self, now_ns: int) -> Node | None:
        """The next node that has expired, or None. If it stays in its tree it is to be watched again."""
        while self.is_due(now_ns):
            node = self._nodes.get(heappop(self.expiries)[1])
            if node is None:
                continue
            if node.expires_ns <= now_ns:
                return node
            self.will_expire(node)
        return None

    def watch_again(self, nodes: list[Node], at_ns: int) -> None:
        """Expired nodes that are in use: they are looked at again then."""
        for node in nodes:
            self._watch(node, at_ns)

    def _watch(self, node: Node, at_ns: int) -> None:
        heappush(self.expiries, (at_ns, node.node_id))
        if len(self.expiries) > 2 * len(self._nodes) + _SLACK:
            self.expiries = [entry for entry in self.expiries if entry[1] in self._nodes]
            heapify(self.expiries)


def count_idle_tail(blocks: BlockRun, references: NDArray[np.int32]) -> int:
    """How many blocks at the end of this run of published blocks nobody holds.

    Whoever holds a block holds all before it, so holders only become fewer along the run.
    """
    if references[blocks[-1]] > 1:
        return 0
    if references[blocks[0]] == 1:
        return len(blocks)
    return int(np.count_nonzero(references.take(blocks) == 1))
