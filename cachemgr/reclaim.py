"""Reclaiming: takes idle blocks out of the index, from the owners that may be asked, in the order of the queue.

Invariant: a block that is held is never taken, nor more of an owner than its budget; a leaf goes from its tail, so that
a child never outlives its parent. Called by `radix.py`. It moves no block of the pool: the caller does, in the same
step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import accumulate
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachemgr.eviction import OwnerQueue, count_idle_tail
from cachemgr.forest import Forest
from cachemgr.ids import BlockRun
from cachemgr.nodes import NO_CHILDREN, Node
from cachemgr.policies import Order

LAST = (1 << 62, 1 << 62)  # after every head
_FEWEST_LEAVES: Final = 4  # below this, one by one is cheaper
_MOST_LEAVES: Final = 256
_BLOCKS, _LEAF_OF, _RANK = attrgetter("blocks"), attrgetter("leaf_of"), attrgetter("priority", "last_use")


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
            until = heads[0][:2] if heads else LAST
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
            left -= self._take_leaves(order, left, until, runs)
            if not left:
                return count
            for node in order.drain() if until is LAST else drain_until(order, until):
                children = node.children
                if (children is not NO_CHILDREN and children) or node.anchored:
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
                if not left:
                    return count
        return count - left

    def _take_leaves(self, order: Order, count: int, until: tuple[int, int], runs: list[BlockRun]) -> int:
        """What `_take_from` would take of an order as long as that is whole leaves of one parent: in a few passes over
        all of them instead of one over each. Returns how many blocks."""
        total = 0
        while count > total:
            first = order.first()
            most = 0 if first is None or first.leaf_of is None else (count - total) // len(first.blocks)
            nodes = order.ahead(min(most, _MOST_LEAVES)) if most >= _FEWEST_LEAVES else []
            num = 0 if len(nodes) < _FEWEST_LEAVES else _leading_leaves(nodes, until)
            if num < _FEWEST_LEAVES:
                break
            blocks = list(map(_BLOCKS, nodes[:num]))
            counts = list(map(len, blocks))
            if sum(counts) > count - total:  # those behind the first may be much longer than it
                num = bisect_right(list(accumulate(counts)), count - total)
                if num < _FEWEST_LEAVES:
                    break
            run = np.concatenate(blocks[:num])
            held = self._references.take(run) != 1
            if np.count_nonzero(held):
                num = bisect_right(list(accumulate(counts)), int(held.argmax()))
                if num < _FEWEST_LEAVES:
                    break
                run = run[: sum(counts[:num])]
            leaves = nodes[:num]
            order.drop(leaves)
            self._forest.remove_leaves(leaves, counts[:num])
            runs.append(run)
            total += len(run)
            if num < len(counts):
                break
        return total


def _leading_leaves(nodes: list[Node], until: tuple[int, int]) -> int:
    """How many of the first nodes are leaves of the same parent, and rank no later than `until`."""
    num = len(nodes)
    parents = list(map(_LEAF_OF, nodes))
    if parents.count(parents[0]) != num:  # by far cheaper than looking where
        num = next(place for place, other in enumerate(parents) if other is not parents[0])
    if until is not LAST:
        num = next((place for place, rank in enumerate(map(_RANK, nodes[:num])) if rank > until), num)
    return num


def drain_until(order: Order, until: tuple[int, int]) -> Iterator[Node]:
    """As `Order.drain`, while the next node ranks no later than `until`."""
    while True:
        node = order.first()
        if node is None or (node.priority, node.last_use) > until:
            return
        order.pop()
        yield node
