"""Which blocks of a draft model's arena each sequence has. Owns the free ones.

Invariant: a block belongs to one sequence or is free, and so does a window block. Where layers have a window, a
sequence gives up what it has passed: where every layer has one its blocks, else their window blocks; so of long ones
there are windows, not all tokens. Nothing comes back to what was passed, as told tokens are never taken back. Called by
`draft_model.py`, on the engine's thread.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, Final

from common.layout import NULL_BLOCK, KvLayout
from decoder.grouped_arena import GroupedArena, usable_blocks, usable_window_blocks
from decoder.windows import Windows

ALL_TOKENS: Final = sys.maxsize


@dataclass(slots=True)
class Table:
    """The blocks of one sequence in order; of the first `passed` the arena keeps no window block, and where every layer
    has a window no block: those are null."""

    blocks: list[int] = field(default_factory=list)
    passed: int = 0


class DraftBlocks:
    """All blocks of `arena`, of which the null ones belong to nobody. No block of it has a window block yet."""

    def __init__(self, layout: KvLayout, arena: Any) -> None:
        self._arena = arena
        self._size = layout.block_tokens
        self._windows = Windows(layout.window_tokens, layout.block_tokens, layout.grouped)
        self._free = list(range(usable_blocks(arena), NULL_BLOCK, -1))
        self._free_windows = list(range(usable_window_blocks(arena), NULL_BLOCK, -1))
        self.most_tokens = self._most_tokens()
        """So many tokens of a sequence can be computed at once when it holds no more than it must."""

    def _most_tokens(self) -> int:
        if not self._windows.tokens:
            return ALL_TOKENS
        pool = self._free_windows if self._windows.grouped else self._free
        return (len(pool) - 1) * self._size - max(self._windows.tokens, self._size + 1) + 1

    @property
    def num_free(self) -> int:
        """Blocks that no sequence has."""
        return len(self._free)

    @property
    def num_free_windows(self) -> int:
        """Window blocks that no sequence has; 0 without layer groups."""
        return len(self._free_windows)

    def leave(self, table: Table, num_computed: int) -> None:
        """Free what a sequence does not read for a token after its first `num_computed`."""
        passed = max(table.passed, self._windows.passed_by(num_computed))
        for place in range(table.passed, passed):
            if self._windows.grouped:
                self._free_window(table.blocks[place])
            else:
                self._free.append(table.blocks[place])
                table.blocks[place] = NULL_BLOCK
        table.passed = passed

    def fits(self, table: Table, num_tokens: int) -> bool:
        """Whether `cover` has what it takes."""
        lacking = self._lacking(table, num_tokens)
        return lacking <= len(self._free) and (not self._windows.grouped or lacking <= len(self._free_windows))

    def cover(self, table: Table, num_tokens: int) -> None:
        """Give a sequence blocks for its first `num_tokens` tokens. Call it where it `fits`."""
        for _ in range(self._lacking(table, num_tokens)):
            table.blocks.append(self._free.pop())
            if isinstance(self._arena, GroupedArena):
                self._arena.of[table.blocks[-1]] = self._free_windows.pop()

    def release(self, table: Table) -> None:
        """Free all that a sequence has."""
        for block in table.blocks[table.passed :]:
            self._free_window(block)
        self._free += [block for block in table.blocks if block != NULL_BLOCK]
        table.blocks, table.passed = [], 0

    def _lacking(self, table: Table, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._size) - len(table.blocks))

    def _free_window(self, block: int) -> None:
        if isinstance(self._arena, GroupedArena):
            self._free_windows.append(int(self._arena.of[block]))
            self._arena.of[block] = NULL_BLOCK
