"""Reclaiming: takes idle blocks out of the index, from the owners that may be asked, in the order of the queue.

Invariant: a block that is held is never taken, nor more of an owner than its budget; a leaf goes from its tail, so that
a child never outlives its parent. Called by `radix.py`. It moves no block of the pool: the caller does, in the same
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from cachemgr.eviction import OwnerQueue, count_idle_tail
from cachemgr.forest import Forest
from cachemgr.ids import BlockRun
from cachemgr.nodes import NO_CHILDREN

_LAST = (1 << 62, 1 << 62)  # after every head


class Reclaimer:
    """Works on one forest. `references` is the pool's column: at 1, nobody but the index has the block."""

    def __init__(self, forest: Forest, references: NDArray[np.int32]) -> None:
        self._forest = forest
        self._references = references
        self._holders = memoryview(references)  # type: ignore[arg-type]  # one entry costs a third of numpy's

    def take(self, budgets: Mapping[int, int], count: int) -> list[BlockRun]:
        """Unlists up to `count` idle blocks, of each owner at most its budget: the lowest priority first, then the
        least recently used, whoever's they are."""
        runs: list[BlockRun] = []
        left = dict(budgets)
        while count > 0:
            taken = self._take_round(left, count, runs)
            count -= taken
            if not taken:
                break  # else a prefix may have become a leaf, whose owner had none before
        return runs

    def _take_round(self, left: dict[int, int], count: int, runs: list[BlockRun]) -> int:
        """As `take`, from the owners that have a leaf now; `left` are their budgets. Returns how many blocks."""
        total, heads = 0, []
        for owner, budget in left.items():
            queue = self._forest.queue.owners.get(owner)
            head = queue.head() if queue is not None and budget > 0 else None
            if head is not None:
                heads.append((*head, owner))
        heapify(heads)
        while heads and total < count:
            owner = heappop(heads)[2]
            queue = self._forest.queue.owners[owner]
            until = heads[0][:2] if heads else _LAST
            taken = self._take_from(queue, min(left[owner], count - total), until, runs)
            left[owner] -= taken
            total += taken
            head = queue.head() if left[owner] > 0 else None
            if head is not None:
                heappush(heads, (*head, owner))
        return total

    def _take_from(self, queue: OwnerQueue, count: int, until: tuple[int, int], runs: list[BlockRun]) -> int:
        """Up to `count` blocks of one owner, while its next node ranks no later than `until`. Returns how many."""
        forest, holders = self._forest, self._holders
        left = count
        for order in queue.lowest():
            while left > 0:
                if until is not _LAST:
                    node = order.first()
                    if node is not None and (node.priority, node.last_use) > until:
                        return count - left
                node = order.pop()
                if node is None:
                    break
                if (node.children is not NO_CHILDREN and node.children) or node.anchored:
                    continue
                blocks = node.blocks
                size = len(blocks)
                idle = size if holders[blocks.item(0)] == 1 else count_idle_tail(blocks, self._references)
                if idle == size <= left:
                    runs.append(blocks)
                    forest.remove(node)
                    left -= size
                elif idle:
                    dropped = min(idle, left)
                    runs.append(blocks[-dropped:])
                    forest.trim(node, size - dropped)
                    left -= dropped
                    if dropped < idle:
                        order.put_first(node)
            if left <= 0:
                break
        return count - left
