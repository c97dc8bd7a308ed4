"""The index of a model with layer groups: paths have no gaps, but their blocks may lack window blocks.

Invariant: a hit ends where all window blocks that its window touches are there; the source of a copy has one. It takes
the place of `PrefixIndex` in a manager that has `window_blocks`; it changes nothing in those.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachemgr import groups
from cachemgr.nodes import Tree, node_before
from cachemgr.radix import Match, PrefixIndex
from cachemgr.window_blocks import WindowBlocks
from common.layout import TOKEN_BYTES


class GroupedIndex(PrefixIndex):
    """As PrefixIndex, of blocks that have window blocks or not: paths have no gaps, and a hit ends where those that its
    window touches are there."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        references: NDArray[np.int32],
        windows: WindowBlocks,
        window_tokens: int,
    ) -> None:
        super().__init__(num_blocks, block_tokens, references)
        self._windows = windows
        self._window_tokens = window_tokens

    def match(self, tree: Tree, tokens: bytes, num_tokens: int) -> Match:
        """See PrefixIndex."""
        return self.usable(super().match(tree, tokens, num_tokens))

    def path(self, tree: Tree, tokens: bytes, num_tokens: int) -> Match:
        """See PrefixIndex."""
        return super().match(tree, tokens, num_tokens)

    def usable(self, found: Match) -> Match:
        """See PrefixIndex. What the longest path would have needed is `lacking`."""
        size, window, of = self.block_tokens, self._window_tokens, self._windows.of
        blocks, rest = found.blocks, found.num_tail_tokens if found.source else 0
        needed = blocks[groups.behind(len(blocks) * size + rest, window, size) :]
        if of.take(needed).all() and (not rest or of.item(found.source)):
            return found
        count = groups.usable_blocks(of, blocks, window, size)
        node = node_before(found.node, count)
        lacking = np.append(needed, found.source) if rest else needed
        cut = (len(blocks) - count) * size + rest
        return Match(blocks[:count], 0, 0, node, lacking, cut)


def alone_from(found: Match) -> int:
    """From which block on a matched path is nobody else's: where it was matched whole, as a conversation is that goes
    on, from where it parts from others. Behind its end, where it parts from another there."""
    node, never = found.node, len(found.blocks) + 1
    if node is None or node.parent is None or node.children or node.anchored or found.lacking is not None:
        return never
    if not node.tail:
        return never if found.source or len(found.blocks) < node.end else node.start
    if found.num_tail_tokens * TOKEN_BYTES < len(node.edge):
        return never
    above = node.parent
    return node.start if len(above.children) > 1 or above.anchored else above.start
