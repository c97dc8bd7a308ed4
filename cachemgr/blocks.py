"""The block pool: which block is free, held, cached or quarantined.

Invariants: free + cached + active + quarantined = total, every block in exactly one of them; references = holds + 1 if
published. Columns, one entry a block, so that every operation works on a run of blocks and makes no object per block.
Called by the manager's modules only. It knows no tokens, no lease and no session, and never decides what to evict.
"""

from __future__ import annotations

from enum import IntEnum


class BlockState(IntEnum):
    """State of a block; the numbers are those of tessera.admin.v1.BlockState."""

    FREE = 1
    ACTIVE = 2
    CACHED = 3
    QUARANTINED = 4
