"""The check of window blocks: which block has which, and who needs them. It changes nothing.

Part of the full check of `integrity.py`. Messages name blocks, leases and branches by number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachemgr.blocks import BlockState
from cachemgr.groups import behind
from cachemgr.ids import BlockRun
from cachemgr.integrity_index import say
from cachemgr.ownership import ANYONE, NO_OWNER
from cachemgr.state import CacheState


def check_groups(state: CacheState, found: list[str]) -> None:
    """Every invariant of `window_blocks.py` and `groups.py`, recounted. Nothing where there are no groups."""
    windows = state.window_blocks
    if windows is None:
        return
    most, of, pool = windows.num_window_blocks, windows.of, state.pool
    if int(of.min()) < 0 or int(of.max()) > most or of.item(0):
        found.append("a window block number is outside the pool")
        return
    attached = np.bincount(of[of > 0], minlength=most + 1)
    stack = windows.free_stack
    free = np.bincount(stack, minlength=most + 1) if len(stack) else np.zeros(most + 1, np.int64)
    wrong = attached + free != 1
    wrong[0] = False
    say(found, wrong, "a window block is not free or attached to one block, but both, neither or to several")
    say(found, (of > 0) & (pool.state == BlockState.FREE), "free, and it has a window block")
    content, owners = windows.content[of], pool.owner
    known = (content == owners) & (owners != NO_OWNER)
    used = (pool.state == BlockState.ACTIVE) | (pool.state == BlockState.CACHED)
    say(
        found, (of > 0) & used & ~known & (content != ANYONE), "the content of its window block is said to be another's"
    )
    _check_needs(state, found)


def _check_needs(state: CacheState, found: list[str]) -> None:
    """Who has passed what, and that what is needed is there."""
    windows, total = state.window_blocks, state.pool.num_blocks
    if windows is None:
        return
    of, passed = windows.of, np.zeros(total + 1, np.int64)
    window, size = state.group_window_tokens, state.block_tokens
    for lease in state.book.leases.values():
        name = f"lease {lease.lease_id}"
        if lease.behind > behind(lease.sealed if lease.copy is None else lease.granted, window, size):
            found.append(f"{name}: it has given up window blocks that it may read")
        _count(passed, lease.table[: lease.behind], total)
        _say_lacking(found, of, lease.table[lease.behind : lease.num_blocks], name)
        if lease.copy is not None:
            _say_lacking(found, of, np.array([lease.copy.source], np.intp), f"{name}: the source of its copy")
    for session in state.book.sessions.values():
        credit = np.fromiter(session.credit, np.intp, len(session.credit))
        _say_lacking(found, of, credit, f"session {session.session_id}: its credit")
    for branch in state.kept.branches.values():
        if branch.hold.behind != branch.hold.num_blocks:
            found.append(f"branch {branch.branch_id}: it needs window blocks")
        _count(passed, branch.hold.table[: branch.hold.behind], total)
    for number, pin in state.pins.items():
        _count(passed, pin.blocks[: pin.behind], total)
        _say_lacking(found, of, pin.blocks[pin.behind :], f"pin {number}")
    say(found, windows.passed_by != passed, "the count of those who have passed it is wrong")


def _count(passed: NDArray[np.int64], blocks: BlockRun, total: int) -> None:
    np.add.at(passed, blocks[(blocks >= 1) & (blocks <= total)], 1)


def _say_lacking(found: list[str], of: NDArray[np.int32], blocks: BlockRun, name: str) -> None:
    inside = blocks[(blocks >= 1) & (blocks < len(of))]
    say(found, inside[of[inside] == 0], f"{name}: a window block is missing that may be read")
