"""Layer groups: what a sequence needs of window blocks, where some layers have a window and others read all keys.

A sequence holds all its blocks, for the layers that read all, and needs the window blocks of those that its window has
not passed: `Lease.behind` is how many it has. Invariants: each block of a lease from there on has a window block, and
so have the source of a copy and a session's credit; a hit ends where all that its window touches is there. Kept
branches need none: what they have goes like what is cached. Called by the manager's modules, each where the manager
has `window_blocks`; they move the pool's blocks in the same step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cachemgr.ids import BlockRun
from cachemgr.nodes import NO_BLOCKS
from cachemgr.window_blocks import ASKED
from common.errors import ResourceExhausted

if TYPE_CHECKING:
    from cachemgr.leases import Lease
    from cachemgr.state import CacheState

BEGIN_SHARE = 4  # a table begins with new blocks for one in so many window blocks, where they are not all


def behind(num_tokens: int, window_tokens: int, block_tokens: int) -> int:
    """Leading blocks that lie before the window of every token after the first `num_tokens`."""
    return max(0, num_tokens + 1 - window_tokens) // block_tokens


def needed_of(state: CacheState, blocks: BlockRun, num_tokens: int) -> BlockRun:
    """Those blocks of a table whose window blocks the token after the first `num_tokens` reads, or the block that it
    is written to; a view."""
    size = state.block_tokens
    return blocks[behind(num_tokens, state.group_window_tokens, size) : -(-num_tokens // size)]


def is_there(state: CacheState, blocks: BlockRun, num_tokens: int) -> bool:
    """Whether a sequence can go on after the first `num_tokens` tokens of a table."""
    windows = state.window_blocks
    return windows is None or bool(windows.of.take(needed_of(state, blocks, num_tokens)).all())


def can_begin(state: CacheState, blocks: BlockRun, num_tokens: int) -> int:
    """How many of the first `num_tokens` tokens of a table a sequence can begin with: all, or whole blocks."""
    windows, size = state.window_blocks, state.block_tokens
    if windows is None or is_there(state, blocks, num_tokens):
        return num_tokens
    return usable_blocks(windows.of, blocks[: num_tokens // size], state.group_window_tokens, size) * size


def usable_blocks(of: NDArray[np.int32], blocks: BlockRun, window_tokens: int, block_tokens: int) -> int:
    """How many leading blocks of a path a sequence can begin with, so that it lacks no window block."""
    if not len(blocks):
        return 0
    ends = np.arange(1, len(blocks) + 1)
    gaps = np.maximum.accumulate(np.where(of.take(blocks) == 0, ends, 0))  # the last place that lacks one, from 1
    fits = np.flatnonzero(gaps <= np.maximum(0, ends * block_tokens + 1 - window_tokens) // block_tokens)
    return int(fits[-1]) + 1 if len(fits) else 0


def has_window(state: CacheState) -> bool:
    """Whether any layer has one."""
    return state.window_tokens > 0 or state.window_blocks is not None


# ---- leases and kept branches


def begin_path(
    state: CacheState, blocks: BlockRun, num_tokens: int, needed: BlockRun, lacking: BlockRun | None, alone_from: int
) -> int:
    """A lease, whose holds are in place, begins behind the first `num_tokens` tokens of a path; returns how many of its
    blocks are behind its window. Those of `needed` are used; from place `alone_from` on they were kept for this alone.
    Where a longer path was cached and lacked those of `lacking`, they are worth keeping too once they are computed
    again: paths part there."""
    windows = state.window_blocks
    if windows is None:
        return 0
    first = behind(num_tokens, state.group_window_tokens, state.block_tokens)
    windows.passed(blocks[:first])
    shared = max(0, alone_from - first)
    windows.use(needed[:shared])
    windows.leave_end(needed[shared:])
    if lacking is not None:
        windows.use(lacking)
    return first


def place(state: CacheState, lease: Lease, passed: int) -> None:
    """The window of a lease has passed its first `passed` blocks, no more and no less. 0 as its holds go."""
    windows = state.window_blocks
    if windows is None or passed == lease.behind:
        return
    before, lease.behind = lease.behind, passed
    if passed > before:
        windows.passed(lease.table[before:passed])
    else:
        windows.needed_again(lease.table[passed:before])


def begin(state: CacheState, lease: Lease, num_tokens: int) -> None:
    """A lease begins, its holds in place, or is rolled back: the next token is the one after `num_tokens`."""
    if state.window_blocks is not None:
        place(state, lease, behind(num_tokens, state.group_window_tokens, state.block_tokens))


def advance(state: CacheState, lease: Lease) -> None:
    """A lease has sealed more. What it passes of the end of its prompt is worth more than what is merely passed."""
    windows, window, size, before = state.window_blocks, state.group_window_tokens, state.block_tokens, lease.behind
    passed = behind(lease.sealed, window, size)
    if windows is None or passed <= before:
        return
    place(state, lease, passed)
    if before * size < lease.asked:
        first, stop = max(before, behind(lease.asked - 1, window, size)), min(passed, -(-lease.asked // size))
        if first < stop:
            windows.use(lease.table[first:stop], ASKED)


def end(state: CacheState, lease: Lease) -> None:
    """A lease ends, its holds in place still; what its end needs is used now."""
    if state.window_blocks is not None:
        place(state, lease, 0)
        state.window_blocks.use(needed_of(state, lease.blocks, lease.sealed))


def rest(state: CacheState, hold: Lease) -> None:
    """A lease has become a kept branch: all that it holds counts as passed."""
    if state.window_blocks is not None:
        place(state, hold, hold.num_blocks)
        state.window_blocks.use(needed_of(state, hold.blocks, hold.sealed))


def alone(state: CacheState, lease: Lease, first: int, stop: int) -> int:
    """Up to where, from block `first` to `stop`, a lease may publish: a block that somebody else needs too, a branch
    that is yet to copy from it, waits, for its window block might have to move to a listed one."""
    windows, own = state.window_blocks, lease.table[first:stop]
    if windows is None:
        return stop
    needed = state.pool.references.take(own) - windows.passed_by.take(own)
    mine = np.arange(first, stop) >= lease.behind
    others = np.flatnonzero((needed > mine) & ~state.pool.published.take(own))
    return first + int(others[0]) if len(others) else stop


def lend(state: CacheState, own: BlockRun, listed: BlockRun) -> None:
    """Before a lease changes its own blocks for listed ones with the same tokens: those of them that lack a window
    block get that of the own block, which the lease needs no more."""
    windows = state.window_blocks
    if windows is None:
        return
    lacking = (windows.of.take(listed) == 0) & (own != listed)
    for source, target in zip(own[lacking].tolist(), listed[lacking].tolist(), strict=True):
        windows.move(source, target)


# ---- room


def room(state: CacheState, owner: int, wanted: int, besides: BlockRun = NO_BLOCKS) -> int:
    """How many of `wanted` new blocks for an owner can have window blocks now, `besides` keeping theirs."""
    windows = state.window_blocks
    if windows is None or wanted <= windows.num_free:
        return wanted
    if state.frozen:
        return min(wanted, windows.num_free)
    floors = state.quotas.floors_besides(owner) if state.quotas.any_floor else {}
    return min(wanted, windows.room(state.pool, state.kept.holds, floors, besides))


def require(state: CacheState, count: int, owner: int, besides: BlockRun = NO_BLOCKS) -> None:
    """Checks, before anything is changed, that `count` new blocks can have window blocks. Raises ResourceExhausted."""
    usable = room(state, owner, count, besides)
    if count > usable:
        raise ResourceExhausted(
            f"{count} window blocks are needed and {usable} can be had now",
            subject="window_blocks",
            needed=count,
            usable=usable,
            reason="POOL_FULL",
        )


def take_room(state: CacheState, count: int, owner: int) -> None:
    """Makes so many window blocks free for an owner; there is room."""
    windows = state.window_blocks
    if windows is not None and count > windows.num_free:
        floors = state.quotas.floors_besides(owner) if state.quotas.any_floor else {}
        windows.reclaim(state.pool, state.kept.holds, floors, count, (state.now_ns, owner))


def begins_with(state: CacheState, owner: int, fresh: int, shared: BlockRun) -> int:
    """With how many of its `fresh` new blocks the table of a lease begins; `shared` are those it has of others that
    keep their window blocks. As many as window blocks can be had for, up to a part of the pool; no fewer than it takes
    to go on by credit, as its beginning is passed."""
    windows = state.window_blocks
    if windows is None or not fresh:
        return fresh
    least = min(fresh, max(1, windows.reach - len(shared)))
    most = min(fresh, max(2 * windows.reach, windows.num_window_blocks // BEGIN_SHARE))
    return max(least, room(state, owner, most, shared))
