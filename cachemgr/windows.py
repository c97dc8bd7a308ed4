"""Windows: where no layer reads further back than so many keys, a running sequence lets go of what lies before them.

The leading blocks that it has passed are null in its table. Those that are listed are cached from then on, like what
any sequence leaves behind; the others are free. A sequence that begins with a cached prefix holds no more of it either
(`gaps.py`). Invariants: no block goes that a token still to be computed may read; of what is listed of a lease, it
holds the last block. Called by `reports.py`; pure arithmetic for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cachemgr.ids import BlockRun
from cachemgr.nodes import NO_BLOCKS

if TYPE_CHECKING:
    from cachemgr.leases import Lease
    from cachemgr.state import CacheState


def passed_blocks(num_tokens: int, window_tokens: int, block_tokens: int) -> int:
    """Leading blocks that lie before a window of every token after the first `num_tokens`. Of those tokens, the last
    whole block is never among them."""
    return max(0, num_tokens + 1 - max(window_tokens, block_tokens + 1)) // block_tokens if window_tokens else 0


def passed_by(state: CacheState, num_tokens: int) -> int:
    """As `passed_blocks`, with the window and the blocks of a manager; 0 where it has no window."""
    return passed_blocks(num_tokens, state.window_tokens, state.block_tokens)


def begins_with(state: CacheState, num_tokens: int, found: BlockRun = NO_BLOCKS) -> int:
    """Blocks of the table that a lease of so many tokens begins with; `found` are those that it shares, null ones too.
    Where they are more than the pool has, and a window lets it compute on in less, half the pool beside the null ones,
    but one more than it shares at least: the rest comes from credit, as its beginning is passed. So a sequence that
    had to give way begins behind what it computed, and goes on by that block also where credit never comes."""
    num_blocks, most = -(-num_tokens // state.block_tokens), state.pool.num_blocks
    if num_blocks <= most or not state.window_tokens:
        return num_blocks
    least = (state.window_tokens + state.block_tokens - 2) // state.block_tokens + 2
    if least > most:
        return num_blocks
    shared = int(np.count_nonzero(found))
    return min(num_blocks, len(found) - shared + max(most // 2, shared + 1))


def most_held(state: CacheState) -> int:
    """Blocks that a sequence holds at most, where it takes one at a time and lets go of what its window has passed."""
    reads = max(state.window_tokens, state.block_tokens + 1)
    return (reads + state.block_tokens - 2) // state.block_tokens + 1


def drop_passed(state: CacheState, lease: Lease) -> None:
    """Lets go of what a lease has passed."""
    first, passed, published = lease.passed, passed_by(state, lease.sealed), lease.num_published
    if state.frozen or passed <= first:
        return
    listed, private = lease.table[first : min(passed, published)].copy(), lease.table[max(first, published) : passed]
    if len(listed):
        state.pool.unhold_published(listed)
        state.rest_path(listed)
    if len(private):
        state.pool.unhold(private.copy())
    lease.table[:passed] = 0
    lease.passed = passed
    unlist_passed(lease)


def unlist_passed(lease: Lease) -> None:
    """A lease that holds nothing that is listed, since it publishes no more, has nothing published."""
    if lease.num_published <= lease.passed:
        lease.num_published = 0
