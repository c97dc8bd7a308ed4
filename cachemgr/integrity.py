"""The full check: every invariant of the core, recounted from the tables up. It changes nothing.

It trusts no counter and no column that it can derive: references are counted again from leases, pins, credit, deferred
runs and kept branches; the trees are walked from their roots; states follow from both. Called by
`CacheManager.check_integrity`.
Messages name blocks, nodes, leases and sessions by number, never tokens or tenants.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cachemgr.blocks import BlockState
from cachemgr.ids import BlockRun, NodeId
from cachemgr.integrity_groups import check_groups
from cachemgr.integrity_index import check_queue, check_trees, say
from cachemgr.integrity_kept import check_kept
from cachemgr.integrity_quotas import check_quotas
from cachemgr.integrity_waits import check_waits
from cachemgr.leases import Lease
from cachemgr.state import CacheState
from cachemgr.windows import passed_by


def check_integrity(state: CacheState) -> list[str]:
    """One line for each violation; empty means that every invariant holds."""
    found: list[str] = []
    listed = check_trees(state, found)
    holds = _count_holds(state, found)
    _check_pool(state, holds, listed, found)
    _check_leases(state, found)
    check_kept(state, found)
    check_quotas(state, found)
    check_groups(state, found)
    check_queue(state, found)
    check_waits(state, found)
    return found


def _count_holds(state: CacheState, found: list[str]) -> NDArray[np.int64]:
    """Holds of each block: tables, pins, credit, deferred runs, kept branches."""
    total = state.pool.num_blocks
    runs: list[BlockRun] = []
    for session in state.book.sessions.values():
        runs.append(np.fromiter(session.credit, np.intp, len(session.credit)))
        runs += [item.blocks for item in session.deferred]
        for lease in session.leases.values():
            runs.append(lease.held)
            if lease.copy is not None:
                runs.append(np.array([lease.copy.source], np.intp))
    runs += [branch.hold.held for branch in state.kept.branches.values()]
    runs += [pin.blocks for pin in state.pins.values()]
    blocks = np.concatenate(runs) if runs else np.zeros(0, np.intp)
    inside = (blocks >= 1) & (blocks <= total)
    if not inside.all():
        found.append("a table, a pin or a credit has a block number outside the pool")
    return np.bincount(blocks[inside], minlength=total + 1)


def _check_pool(state: CacheState, holds: NDArray[np.int64], listed: NDArray[np.int64], found: list[str]) -> None:
    pool = state.pool
    present = listed > 0
    say(found, pool.references != holds + present, "the references are not the holders, plus one if published")
    say(found, pool.published != present, "published and not in the index, or the reverse")
    quarantined = np.zeros(pool.num_blocks + 1, np.bool_)
    for session_id, blocks in state.book.quarantine.items():
        if session_id in state.book.sessions:
            found.append(f"session {session_id} is attached and has a quarantine")
        say(found, blocks[quarantined[blocks]], "quarantined twice")
        quarantined[blocks] = True
    say(found, quarantined & ((holds > 0) | present), "quarantined and in use")
    expected = np.full(pool.num_blocks + 1, int(BlockState.FREE), np.uint8)
    expected[present] = BlockState.CACHED
    expected[holds > 0] = BlockState.ACTIVE
    expected[quarantined] = BlockState.QUARANTINED
    expected[0] = 0
    say(found, pool.state != expected, "the state does not follow from its holders")
    stack = pool.free_stack
    if len(np.unique(stack)) != len(stack):
        found.append("the free stack has a block twice")
    free = np.zeros(pool.num_blocks + 1, np.bool_)
    free[stack] = True
    say(found, free != (expected == BlockState.FREE), "on the free stack and not free, or the reverse")
    for what, count, wanted in (
        ("cached", pool.num_cached, BlockState.CACHED),
        ("quarantined", pool.num_quarantined, BlockState.QUARANTINED),
    ):
        actual = int(np.count_nonzero(expected == wanted))
        if actual != count:
            found.append(f"{actual} blocks are {what}, {count} are counted")


def _check_leases(state: CacheState, found: list[str]) -> None:
    book = state.book
    sessions = {number: lease for session in book.sessions.values() for number, lease in session.leases.items()}
    if sessions != book.leases:
        found.append("the register of leases is not what the sessions hold")
    users: dict[int, int] = {}
    tables: list[BlockRun] = []
    open_blocks: list[BlockRun] = []
    credit: set[int] = set()
    for session in book.sessions.values():
        if session.epoch != state.epoch or session.deadline_ns < session.attached_ns:
            found.append(f"session {session.session_id} is of another epoch, or has no deadline")
        if credit & session.credit:
            found.append("a block is in the credit of two sessions")
        credit |= session.credit
        if not session.lent.keys() <= session.credit:
            found.append("a block that was lent to a lease is no credit of its session")
    for lease in book.leases.values():
        for tree in (lease.tree, lease.prefix_tree):
            users[id(tree)] = users.get(id(tree), 0) + 1
        tables.append(lease.held)
        open_blocks.append(lease.blocks[lease.sealed // state.block_tokens + (lease.committed > 0) :])
        _check_lease(state, lease, found)
    for branch in state.kept.branches.values():
        tables.append(branch.hold.held)
        for tree in (branch.hold.tree, branch.hold.prefix_tree):
            users[id(tree)] = users.get(id(tree), 0) + 1
    for tree in state.index.forest.trees.values():
        if tree.users != users.get(id(tree), 0):
            found.append("the users of a tree are not its leases and kept branches")
    if tables:
        counts = np.bincount(np.concatenate(tables), minlength=state.pool.num_blocks + 1)
        writable = np.concatenate([tables[0][:0], *open_blocks])
        say(found, writable[counts[writable] != 1], "writable and in two tables")
        say(found, writable[state.pool.published[writable]], "writable and published")
        if credit & set(np.flatnonzero(counts).tolist()):
            found.append("a block is in a credit and in a table")


def _check_lease(state: CacheState, lease: Lease, found: list[str]) -> None:
    name, size = f"lease {lease.lease_id}", state.block_tokens
    if lease.session_id not in state.book.sessions:
        found.append(f"{name}: its session is not attached")
    if len(np.unique(lease.held)) != len(lease.held) or not lease.held.all():
        found.append(f"{name}: a block is twice in its table, or missing")
    if lease.table[: lease.passed].any() or 0 < lease.num_published <= lease.passed:
        found.append(f"{name}: it has let go of blocks that are in its table, or of the last one that is published")
    if lease.passed > passed_by(state, lease.sealed if lease.copy is None else lease.granted):
        found.append(f"{name}: it has let go of blocks that it may read")
    if not lease.sealed <= min(lease.num_tokens, lease.num_blocks * size):
        found.append(f"{name}: more is sealed than it has tokens or blocks")
    whole, rest = divmod(lease.sealed, size)
    waits = state.window_blocks is not None and lease.num_published < whole  # for a branch that copies (`groups.py`)
    if lease.store and lease.num_published != whole + (lease.committed > 0) and not waits:
        found.append(f"{name}: sealed whole blocks are not published")
    if not 0 <= lease.committed <= rest:
        found.append(f"{name}: more of its last block is committed than is sealed")
    if not lease.num_published <= min(lease.num_blocks, whole + (lease.committed > 0)):
        found.append(f"{name}: more is published than sealed")
        return
    owners = np.full(lease.num_blocks, lease.owner)
    if lease.prefix_tree is not None:
        owners[: lease.prefix_blocks] = lease.prefix_tree.owner
    owners = owners[lease.passed :]
    say(found, lease.held[state.pool.owner[lease.held] != owners], f"{name}: of another owner")
    if (lease.prefix_tree is not None, lease.tree.root.start) != (lease.prefix_blocks > 0, lease.prefix_blocks):
        found.append(f"{name}: its trees do not fit its prefix")
    if lease.copy is not None and lease.copy.target not in lease.blocks:
        found.append(f"{name}: the target of its copy is not in its table")
    _check_path(state, lease, found)


def _check_path(state: CacheState, lease: Lease, found: list[str]) -> None:
    """The published part of a table is a path of the index that holds the lease's own tokens."""
    forest, size = state.index.forest, state.index.block_bytes
    depth, table = lease.num_published, lease.table
    while depth > lease.passed:
        node = forest.nodes.get(NodeId(int(forest.node_of[table[depth - 1]])))
        tree = lease.prefix_tree if depth <= lease.prefix_blocks else lease.tree
        if node is None or not node.start < depth <= node.end or node.tree is not tree:
            found.append(f"lease {lease.lease_id}: its published blocks are no path of the index")
            return
        count, place = depth - node.start, max(node.start, lease.passed)
        same_blocks = np.array_equal(node.blocks[place - node.start : count], table[place:depth])
        listed = node.edge[: count * size]  # of a committed block fewer tokens may be listed than the lease has
        first = node.start * size
        if not same_blocks or lease.tokens[first : first + len(listed)] != listed:
            found.append(f"lease {lease.lease_id}: its tokens or blocks are not those of node {node.node_id}")
            return
        depth = node.start
