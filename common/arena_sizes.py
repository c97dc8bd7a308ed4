"""How large the parts of an arena are: blocks, and window blocks behind them where a layout has groups of layers.

Invariant: both pools begin with a null block that is counted in no number; window blocks begin at a multiple of
`WINDOW_ALIGNMENT` bytes, and without them nothing comes after the blocks. Used by `layout.py` (which knows the geometry
within a block), the arena's frames, the arenas themselves and the index journal. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WINDOW_ALIGNMENT: Final = 4096  # bytes: where the window blocks begin


@dataclass(frozen=True, slots=True)
class ArenaSizes:
    """`num_blocks` usable blocks of `block_bytes` bytes, then `num_window_blocks` usable window blocks of
    `window_block_bytes`; 0 and 0 without groups."""

    num_blocks: int
    block_bytes: int
    num_window_blocks: int = 0
    window_block_bytes: int = 0

    @property
    def blocks_bytes(self) -> int:
        """Bytes of all blocks, the null one included."""
        return (self.num_blocks + 1) * self.block_bytes

    @property
    def window_offset(self) -> int:
        """Bytes from the start of the arena to its window blocks, the null one first."""
        return -(-self.blocks_bytes // WINDOW_ALIGNMENT) * WINDOW_ALIGNMENT

    @property
    def arena_bytes(self) -> int:
        """Bytes of the whole arena, both null blocks included."""
        if not self.num_window_blocks:
            return self.blocks_bytes
        return self.window_offset + (self.num_window_blocks + 1) * self.window_block_bytes

    def __str__(self) -> str:
        blocks = f"{self.num_blocks} + 1 blocks of {self.block_bytes} bytes"
        if not self.num_window_blocks:
            return blocks
        return f"{blocks} and {self.num_window_blocks} + 1 window blocks of {self.window_block_bytes} bytes"
