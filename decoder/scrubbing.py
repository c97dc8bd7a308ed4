"""Scrubbing: blocks that held another tenant's keys and values are filled with zeros.

Invariant: the step loop calls it in its own order, after the message that named the blocks and before anything copies
into, computes into or gives back any of them. It decides nothing: the cache manager names the blocks.
"""

from __future__ import annotations

from decoder.cache_api import Arena
from decoder.sequence import IntArray


def zero_blocks(arena: Arena, blocks: IntArray) -> None:
    """Zeroes blocks; `blocks` is int32 [n]."""
    for block in blocks.tolist():
        arena[block] = 0
