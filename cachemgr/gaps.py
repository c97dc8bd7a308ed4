"""The index of a model whose layers all have a window: a path may lack blocks that its end does not need.

A null entry among the blocks of a node is a gap: its tokens are known, its keys and values are gone. Invariants: the
last block of a node that nothing hangs below is no gap; a hit of n tokens has every block that the window of the token
after them touches, and holds none before. So any block that nobody holds can go, also from the head of a path whose end
is held. It replaces `radix.py`, whose door it keeps, where there is a window; `forest.py` and `reclaim.py` likewise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachemgr.eviction import EvictionQueue, OwnerQueue
from cachemgr.forest import Forest
from cachemgr.ids import BlockRun
from cachemgr.nodes import NO_BLOCKS, Node, Tree, node_before
from cachemgr.policies import DEFAULT_POLICY, POLICIES
from cachemgr.radix import Match, PrefixIndex
from cachemgr.reclaim import LAST, Reclaimer, drain_until
from cachemgr.windows import passed_blocks


class GappedQueue(EvictionQueue):
    """Inner nodes may be evictable, too."""

    def push(self, node: Node, *, first: bool = False) -> None:
        """See EvictionQueue."""
        if node.order is not None or node.parent is None:
            return
        order = self.of(node.tree.owner).order_of(node)
        if first:
            order.put_first(node)
        else:
            order.use(node)


class GappedForest(Forest):
    """Trees whose nodes may have gaps."""

    def __init__(self, num_blocks: int, block_tokens: int, references: NDArray[np.int32]) -> None:
        super().__init__(num_blocks, block_tokens, references)
        self.queue = GappedQueue(self.nodes, POLICIES[DEFAULT_POLICY])
        self._untidy: list[Node] = []

    def split(self, lower: Node, count: int) -> Node:
        """See Forest."""
        upper = super().split(lower, count)
        self.node_of[0] = 0  # of gaps
        self.queue.push(upper)
        return upper

    def take(self, node: Node, places: NDArray[np.intp]) -> BlockRun:
        """Makes gaps of places of a node; returns its blocks there. Gaps at an end with nothing below are cut off."""
        taken: BlockRun = node.blocks[places]
        first, size, ghosts = int(places.min()), self.block_bytes, self.ghosts
        parent = node if first or node.parent is None else node.parent
        tokens = node.edge[first * size : (first + 1) * size]
        ghosts.note((node.tree, node.start + first, tokens, len(places), parent.node_id, ghosts.stamp))
        blocks = node.blocks.copy()
        blocks[places] = 0
        node.blocks = blocks
        self._tidy(node)
        return taken

    def fill(self, node: Node, place: int, block: int) -> None:
        """Lists a block where a node has a gap."""
        blocks = node.blocks.copy()
        blocks[place - node.start] = block
        node.blocks = blocks
        self.node_of[block], self.position[block] = node.node_id, place

    def _list(self, node: Node, blocks: BlockRun, start: int) -> None:
        self.node_of[blocks] = node.node_id
        self.position[blocks] = np.arange(start, start + len(blocks))  # a path may be longer than the pool

    def _tidy(self, node: Node) -> None:
        """Cuts off the gaps at the end of a node that nothing hangs below, and what becomes such an end by that: one
        after the other, since a path of gaps may have more nodes than Python's stack has room for."""
        self._untidy.append(node)
        if len(self._untidy) > 1:
            return  # the call that tidies now goes on with it
        try:
            for end in self._untidy:  # it grows meanwhile
                self._cut_gaps(end)
        finally:
            self._untidy.clear()

    def _cut_gaps(self, node: Node) -> None:
        if node.children or node.anchored or node.parent is None:
            return
        present = np.flatnonzero(node.blocks)
        if not len(present):
            self.remove(node)
        elif int(present[-1]) + 1 < len(node.blocks):
            self.trim(node, int(present[-1]) + 1)

    def has_become_leaf(self, node: Node) -> None:
        super().has_become_leaf(node)
        self._tidy(node)

    def _release_anchor(self, tree: Tree) -> None:
        node = tree.anchor
        super()._release_anchor(tree)
        if node is not None:
            self._tidy(node)


class GappedReclaimer(Reclaimer):
    """Takes whatever nobody holds of the node whose turn it is."""

    def __init__(self, forest: GappedForest, references: NDArray[np.int32], window_tokens: int) -> None:
        super().__init__(forest, references)
        self._gapped = forest
        self._window_tokens = window_tokens

    def _take_from(self, queue: OwnerQueue, count: int, until: tuple[int, int], runs: list[BlockRun]) -> int:
        left = count
        for order in queue.lowest():
            for node in order.drain() if until is LAST else drain_until(order, until):
                places = self.idle_places(node)
                if len(places):
                    more = len(places) > left
                    runs.append(self._gapped.take(node, places[:left]))
                    left -= min(left, len(places))
                    if more:
                        order.put_first(node)
                if not left:
                    return count
        return count - left

    def idle_places(self, node: Node) -> NDArray[np.intp]:
        """Where a node has blocks that nobody holds, in the order in which they go: what its end does not need from
        its head on; then, of one that nothing hangs below, from its end."""
        idle = np.flatnonzero(self._references.take(node.blocks) == 1)
        if node.children or node.anchored:
            return idle
        size = self._gapped.block_bytes // 4
        needed = passed_blocks(node.end * size, self._window_tokens, size) - node.start
        return np.concatenate((idle[idle < needed], idle[idle >= needed][::-1]))


class GappedIndex(PrefixIndex):
    """As PrefixIndex, for layers that read `window_tokens` back."""

    forest: GappedForest

    def __init__(self, num_blocks: int, block_tokens: int, references: NDArray[np.int32], window_tokens: int) -> None:
        super().__init__(num_blocks, block_tokens, references)
        self.forest = GappedForest(num_blocks, block_tokens, references)
        self._reclaimer = self._gapped = GappedReclaimer(self.forest, references, window_tokens)
        self._window_tokens = window_tokens

    def match(self, tree: Tree, tokens: bytes, num_tokens: int) -> Match:
        """See PrefixIndex. Blocks that the window has passed are null."""
        return self.usable(super().match(tree, tokens, num_tokens))

    def path(self, tree: Tree, tokens: bytes, num_tokens: int) -> Match:
        """See PrefixIndex."""
        return super().match(tree, tokens, num_tokens)

    def usable(self, found: Match) -> Match:
        """See PrefixIndex."""
        size, blocks = self.block_tokens, found.blocks
        rest = found.num_tail_tokens if found.source else 0
        count, source = len(blocks), found.source
        passed = passed_blocks(count * size + rest, self._window_tokens, size)
        for gap in np.flatnonzero(blocks == 0)[::-1].tolist():
            if gap < passed:
                break
            count, rest, source = gap, 0, 0
            passed = passed_blocks(count * size, self._window_tokens, size)
        if count == len(blocks) and not passed and rest == found.num_tail_tokens:
            return found
        blocks = blocks[:count].copy()
        blocks[:passed] = 0
        node = found.node if rest else node_before(found.node, count)
        return found._replace(blocks=blocks, source=source, num_tail_tokens=rest, node=node)

    def fill(
        self, node: Node, depth: int, tokens: bytes, own: BlockRun, existing: BlockRun
    ) -> tuple[BlockRun, list[int]]:
        """See PrefixIndex."""
        filled: list[int] = np.flatnonzero(existing == 0).tolist()
        size = self.block_bytes
        for index in filled:
            place = depth + index
            while node.parent is not None and node.start > place:
                node = node.parent
            while node.end <= place:
                offset = (node.end - depth) * size
                below = node.children.get(tokens[offset : offset + size])
                if below is None:
                    raise ValueError("a gap lies on no path")
                node = below
            self.forest.fill(node, place, own.item(index))
        return np.where(existing == 0, own[: len(existing)], existing), filled

    def take_idle(self, node: Node) -> tuple[BlockRun, bool]:
        """See PrefixIndex."""
        places = self._gapped.idle_places(node)
        taken = self.forest.take(node, places) if len(places) else NO_BLOCKS
        return taken, node.node_id in self.forest.nodes
