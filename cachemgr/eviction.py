"""The eviction queue: which leaf of the index goes next.

Order: lower priority first, then least recently used; leaves only, each trimmed from its tail, so that a child never
outlives its parent. Invariant: every leaf whose last block nobody holds has exactly one entry, whose rank is not above
the leaf's present one. A touch therefore costs nothing here: an entry that is out of date is put back when it is met.
Called by `radix.py`. It never drops a block that is held.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from cachemgr.ids import BlockRun, NodeId
from cachemgr.nodes import Node

_SLACK = 1024  # dead entries that are tolerated before the queue is rebuilt


class EvictionQueue:
    """A heap of (priority, last use, node id) with lazy entries."""

    def __init__(self, nodes: dict[NodeId, Node]) -> None:
        self._nodes = nodes
        self._heap: list[tuple[int, int, NodeId]] = []

    @property
    def entries(self) -> list[tuple[int, int, NodeId]]:
        """The entries, live and dead, for checks."""
        return list(self._heap)

    def push(self, node: Node) -> None:
        """Considers a node from now on. Harmless where it is queued, is the root or has children."""
        if node.queued or node.children or node.parent is None:
            return
        node.queued = True
        heappush(self._heap, (node.priority, node.last_use, node.node_id))
        if len(self._heap) > 2 * len(self._nodes) + _SLACK:
            self._rebuild()

    def pop(self) -> Node | None:
        """The leaf of the lowest rank, taken off the queue, or None."""
        heap = self._heap
        while heap:
            priority, last_use, node_id = heappop(heap)
            node = self._nodes.get(node_id)
            if node is None:
                continue
            if node.children:
                node.queued = False
            elif node.last_use != last_use or node.priority != priority:
                heappush(heap, (node.priority, node.last_use, node_id))
            else:
                node.queued = False
                return node
        return None

    def _rebuild(self) -> None:
        live = [node for node in self._nodes.values() if node.queued]
        self._heap = [(node.priority, node.last_use, node.node_id) for node in live]
        heapify(self._heap)


def count_idle_tail(blocks: BlockRun, references: NDArray[np.int32]) -> int:
    """How many blocks at the end of this run of published blocks nobody holds.

    Whoever holds a block holds all before it, so holders only become fewer along the run.
    """
    if references[blocks[-1]] > 1:
        return 0
    if references[blocks[0]] == 1:
        return len(blocks)
    return int(np.count_nonzero(references.take(blocks) == 1))
