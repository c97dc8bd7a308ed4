"""What a decoder says of window blocks when it claims what it held, beside what the journal said of the same blocks.

Invariant: a sequence is leased again only where both say the same of each block that it still reads or writes: what it
computes next is then read from the very memory that its decoder computed into. What the journal lost is never guessed.
Pure. Called by `claims.py` and `claim_plans.py`, and where an adopted index gets its window blocks back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cachemgr.groups import behind
from cachemgr.ids import BlockArray, BlockRun
from cachemgr.recovery import Recovered
from cachemgr.resuming import Held
from cachemgr.state import CacheState
from common.errors import InvalidArgument

Said = NDArray[np.int32]  # [num_blocks + 1]: the window block that a decoder says a block has, 0 none


def said_by(state: CacheState, pairs: BlockArray) -> Said:
    """Of int32 [n, 2] pairs. Raises InvalidArgument where one names a block that is not there."""
    blocks = pairs[:, 0]
    if len(pairs) and not 1 <= int(blocks.min()) <= int(blocks.max()) <= state.pool.num_blocks:
        raise InvalidArgument("window_blocks", f"names a block that is none; allowed are 1..{state.pool.num_blocks}")
    said = np.zeros(state.pool.num_blocks + 1, np.int32)
    said[blocks] = pairs[:, 1]
    return said


def agree(state: CacheState, said: Said, blocks: BlockRun) -> bool:
    """Whether these blocks have window blocks, and the decoder says the same ones; all, where there are no groups."""
    windows = state.window_blocks
    if windows is None or not len(blocks):
        return True
    found = windows.of.take(blocks)
    return bool(found.all()) and np.array_equal(found, said.take(blocks))


def table_agrees(state: CacheState, said: Said, held: Held, table: BlockRun) -> bool:
    """As `agree`, for what a held sequence may still read or write of its table, which has blocks of the pool alone."""
    if state.window_blocks is None:
        return True
    passed = behind(held.sealed_tokens, state.group_window_tokens, state.block_tokens)
    if held.copy is not None:
        source = held.copy.source
        if not 1 <= source <= state.pool.num_blocks or not agree(state, said, np.array((source,), np.intp)):
            return False
    return agree(state, said, table[passed:])


def adopt_windows(state: CacheState, found: Recovered, order: Sequence[int]) -> None:
    """Gives each block the window block that the journal says it has, also those that are not listed: their last writer
    may come back. `order` has the nodes that were hung, by their last use: what the ends of paths need goes last."""
    windows = state.window_blocks
    if windows is None:
        return
    blocks = np.flatnonzero(found.windows)
    windows.claim(blocks, found.windows[blocks].astype(np.intp))
    windows.taint_all()
    ranks = np.zeros(found.num_nodes, np.int64)
    ranks[np.array(order, np.intp)] = np.arange(1, len(order) + 1)
    windows.age(found.blocks, np.repeat(ranks, np.diff(found.starts)), _ends(state, found))


def _ends(state: CacheState, found: Recovered) -> BlockRun:
    """What the token after each path that nothing comes after needs of it."""
    size, count = state.block_tokens, state.pool.num_blocks + 1
    above = np.zeros(count, np.intp)
    above[found.blocks[1:]] = found.blocks[:-1]
    above[found.blocks[found.starts[:-1]]] = found.parents
    followed = np.zeros(count, np.bool_)
    followed[found.parents] = True
    last = found.starts[1:] - 1
    last = last[~followed[found.blocks[last]]]
    places = found.first_places + np.diff(found.starts) - 1
    places = places[~followed[found.blocks[found.starts[1:] - 1]]]
    num_tokens = places * size + found.counts[last]
    needed = places + 1 - np.maximum(0, num_tokens + 1 - state.group_window_tokens) // size
    at, runs = found.blocks[last], [np.zeros(0, np.intp)]
    while len(at):
        runs.append(at)
        needed = needed - 1
        at, needed = above[at[needed > 0]], needed[needed > 0]
        at, needed = at[at > 0], needed[at > 0]
    return np.unique(np.concatenate(runs))
