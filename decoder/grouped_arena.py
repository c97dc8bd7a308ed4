"""An arena with two groups of layers: blocks, window blocks, and which window block each block has.

Owns the decoder's mirror of that column. Invariant: it says what the cache manager's last message about a block said;
of blocks that no message named since, and of those that a sequence's window has passed, it may be out of date, and
nothing reads those. Where a layout has no groups an arena is a plain array, and nothing of this is used. Changed by the
engine's thread between steps, read by the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import Internal
from common.layout import KvLayout


@dataclass(frozen=True, slots=True, eq=False)
class GroupedArena:
    """`blocks` [num_blocks + 1, ...] as `KvLayout.array_shape` says, `window_blocks` [num_window_blocks + 1, ...] as
    that of its `window_group` does, both arrays or both tensors; `of` int32 [num_blocks + 1]: the window block of each
    block, 0 where it has none."""

    blocks: Any
    window_blocks: Any
    of: NDArray[np.int32]

    @classmethod
    def over(cls, blocks: Any, window_blocks: Any) -> GroupedArena:
        """Over memory in which no block has a window block yet."""
        return cls(blocks, window_blocks, np.zeros(len(blocks), np.int32))

    def name(self, pairs: NDArray[np.int32]) -> None:
        """Take over what a message says: rows (block, its window block). Raises Internal where one is out of range."""
        if not pairs.size:
            return
        blocks, window_blocks = pairs[:, 0], pairs[:, 1]
        inside = blocks.min() > 0 and blocks.max() < len(self.blocks)
        if not inside or not 0 < window_blocks.min() <= window_blocks.max() < len(self.window_blocks):
            raise Internal("a block or its window block is outside the arena")
        self.of[blocks] = window_blocks

    def windows_of(self, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        """The window block of each of `blocks`, int32 of the same shape. Raises Internal where one has none."""
        found = self.of[blocks]
        if found.size and not found.all():
            raise Internal("a block has no window block")
        return found

    def pairs_of(self, blocks: NDArray[np.int32]) -> NDArray[np.int32]:
        """Rows (block, its window block), int32 [n, 2], each of `blocks` once and only those that have one."""
        named = np.unique(blocks)
        found = self.of[named]
        return np.stack([named[found > 0], found[found > 0]], axis=1).astype(np.int32)


def usable_blocks(arena: Any) -> int:
    """Blocks of an arena of either kind, without the null block."""
    return len(arena.blocks if isinstance(arena, GroupedArena) else arena) - 1


def usable_window_blocks(arena: Any) -> int:
    """Window blocks of an arena, without the null one; 0 where it has no groups."""
    return len(arena.window_blocks) - 1 if isinstance(arena, GroupedArena) else 0


def parts_of(arena: Any, layout: KvLayout) -> list[tuple[Any, KvLayout]]:
    """The memory of an arena and how it lies there: of blocks, then of window blocks where the layout has groups.

    Raises Internal where the arena has groups and the layout none, or the other way round.
    """
    if layout.grouped != isinstance(arena, GroupedArena):
        raise Internal(f"an arena with{'' if not layout.grouped else 'out'} window blocks does not fit the model")
    if not layout.grouped:
        return [(arena, layout)]
    return [(arena.blocks, layout.full_group), (arena.window_blocks, layout.window_group)]


def private_arena(layout: KvLayout, num_blocks: int, num_window_blocks: int | None = None) -> Any:
    """An arena of zeros in this process's own memory, with null blocks on top of `num_blocks`, and where the layout has
    groups of `num_window_blocks`; by default as many as the layout says."""
    blocks = np.zeros((num_blocks + 1, *layout.array_shape), layout.array_type)
    if not layout.grouped:
        return blocks
    count = layout.num_window_blocks(num_blocks) if num_window_blocks is None else num_window_blocks
    return GroupedArena.over(blocks, np.zeros((count + 1, *layout.window_group.array_shape), layout.array_type))


def whole_arena(layout: KvLayout, num_blocks: int) -> Any:
    """As `private_arena`, for whom no cache manager gives window blocks to: each block has the one of its number."""
    arena = private_arena(layout, num_blocks, num_blocks)
    if isinstance(arena, GroupedArena):
        arena.of[:] = np.arange(num_blocks + 1)
    return arena
