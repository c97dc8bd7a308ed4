"""Scrubbing: blocks that held another tenant's keys and values are filled with zeros.

Invariant: the step loop calls it in its own order, after the message that named the blocks and before anything copies
into, computes into or gives back any of them. It decides nothing: the cache manager names the blocks.
"""

from __future__ import annotations

from decoder.cache_api import Arena, Scrub
from decoder.grouped_arena import GroupedArena


def zero_blocks(arena: Arena, scrub: Scrub) -> None:
    """Zeroes the blocks, and window blocks, of a scrub."""
    blocks = arena.blocks if isinstance(arena, GroupedArena) else arena
    for block in scrub.blocks.tolist():
        blocks[block] = 0
    if isinstance(arena, GroupedArena):
        for block in scrub.window_blocks.tolist():
            arena.window_blocks[block] = 0
