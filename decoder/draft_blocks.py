"""Which blocks of a draft model's arena each sequence has. Owns the free ones.

Invariants: a block belongs to one sequence or is free, and so does a window block. Where layers have a window, a
sequence gives up what it has passed: where every layer has one its blocks, else their window blocks; so of long ones
there are windows, not all tokens. Nothing comes back to what was passed, as told tokens are never taken back. Who is
admitted can be computed to its end: nobody waits for a block that another one holds and cannot go on without. Called
by `draft_model.py`, on the engine's thread.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, Final

from common.layout import NULL_BLOCK, KvLayout
from decoder.grouped_arena import GroupedArena, usable_blocks, usable_window_blocks
from decoder.windows import Windows

ALL_TOKENS: Final = sys.maxsize
MOST_GUESSES: Final = 16  # of a sequence at a time, as requests may ask for


@dataclass(slots=True, eq=False)
class Table:
    """The blocks of one sequence in order. With layer groups those from `passed` to `covered` have window blocks; where
    every layer has a window the first `passed` are null. At most `reserved` are held of what windows are read from."""

    blocks: list[int] = field(default_factory=list)
    passed: int = 0
    covered: int = 0
    reserved: int = 0


class DraftBlocks:
    """All blocks of `arena`, of which the null ones belong to nobody. No block of it has a window block yet.

    most_tokens: so many tokens of a sequence may be computed at once, besides guesses
    """

    def __init__(self, layout: KvLayout, arena: Any) -> None:
        self._arena = arena
        self._size = layout.block_tokens
        self._windows = Windows(layout.window_tokens, layout.block_tokens, layout.grouped)
        self._free = list(range(usable_blocks(arena), NULL_BLOCK, -1))
        self._free_windows = list(range(usable_window_blocks(arena), NULL_BLOCK, -1))
        self._pool = len(self._free_windows if layout.grouped else self._free)
        self._reserved = 0
        self.most_tokens, self._most_held = ALL_TOKENS, ALL_TOKENS
        if self._windows.tokens:
            # A chunk no longer than the window, so that a sequence holds little more than two of them.
            window = max(self._windows.tokens, self._size + 1)
            self.most_tokens = max(0, min(window, (self._pool - 1) * self._size - window + 1 - MOST_GUESSES))
            # So many blocks touch a run of tokens at most, wherever it begins.
            self._most_held = (window + self.most_tokens + MOST_GUESSES + 2 * self._size - 3) // self._size

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
        passed = max(table.passed, min(table.covered, self._windows.passed_by(num_computed)))
        for place in range(table.passed, passed):
            if self._windows.grouped:
                self._free_window(table.blocks[place])
            else:
                self._free.append(table.blocks[place])
                table.blocks[place] = NULL_BLOCK
        table.passed = passed

    def fits(self, table: Table, num_tokens: int, most_tokens: int) -> bool:
        """Whether `admit` has what it takes."""
        needed = self._blocks_for(num_tokens)
        if (self._windows.grouped or not self._windows.tokens) and needed - len(table.blocks) > len(self._free):
            return False
        if not self._windows.tokens:
            return True
        return table.reserved > 0 or self._reserved + self._reserve(most_tokens) <= self._pool

    def admit(self, table: Table, num_tokens: int, most_tokens: int) -> None:
        """Make sure that a sequence of `num_tokens` tokens, guesses included, can be computed, and of what windows are
        read from that it can also when it has grown to `most_tokens`. Call it where it `fits`."""
        needed = self._blocks_for(num_tokens)
        if self._windows.grouped or not self._windows.tokens:
            while len(table.blocks) < needed:
                table.blocks.append(self._free.pop())
        if self._windows.tokens and not table.reserved:
            table.reserved = self._reserve(most_tokens)
            self._reserved += table.reserved

    def cover(self, table: Table, num_tokens: int) -> None:
        """Give a sequence that was admitted what its first `num_tokens` tokens are written to."""
        if not self._windows.tokens:
            return
        for place in range(table.covered, self._blocks_for(num_tokens)):
            if isinstance(self._arena, GroupedArena):
                self._arena.of[table.blocks[place]] = self._free_windows.pop()
            else:
                table.blocks.append(self._free.pop())
            table.covered = place + 1

    def release(self, table: Table) -> None:
        """Free all that a sequence has."""
        for block in table.blocks[table.passed : table.covered]:
            self._free_window(block)
        self._free += [block for block in table.blocks if block != NULL_BLOCK]
        self._reserved -= table.reserved
        table.blocks, table.passed, table.covered, table.reserved = [], 0, 0, 0

    def _reserve(self, most_tokens: int) -> int:
        return min(self._blocks_for(most_tokens), self._most_held)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    def _free_window(self, block: int) -> None:
        if isinstance(self._arena, GroupedArena):
            self._free_windows.append(int(self._arena.of[block]))
            self._arena.of[block] = NULL_BLOCK
