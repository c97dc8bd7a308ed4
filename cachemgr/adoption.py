"""Adoption: a new daemon fills its empty core with what the journal says, and lets surviving decoders claim the rest.

Invariants: while the core is frozen nothing is allocated or evicted; every block that is neither listed nor claimed is
in limbo, a quarantine of nobody's; the last writer of a block in limbo may live, so limbo ends only when the caller
knows that none does, or that all that live have claimed. Called by `manager.py`; `claims.py` does the claiming.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np

from cachemgr.blocks import NO_OWNER
from cachemgr.claimed import Claimed
from cachemgr.ids import BlockRun, NodeId, SessionId, TenantId
from cachemgr.nodes import NEVER, Node, Tree
from cachemgr.recovery import Recovered
from cachemgr.state import CacheState
from cachemgr.upkeep import process_gone
from cachemgr.window_claims import adopt_windows

LIMBO = SessionId(0)  # no session ever has this number
NOT_KNOWN = -1  # of the last holder of a block


def adopt(state: CacheState, found: Recovered, accept: Callable[[TenantId], bool]) -> BlockRun:
    """See `CacheManager.adopt`. Returns the blocks that are listed now."""
    if state.pool.num_free != state.pool.num_blocks:
        raise ValueError("only an empty cache manager can adopt")
    everything = state.pool.allocate(state.pool.num_blocks, NO_OWNER)
    state.pool.ownership.take_scrub()
    state.pool.ownership.taint(everything)
    nodes = list(_hang(state, found, accept))
    listed = np.flatnonzero(state.index.forest.node_of)
    _charge(state, nodes)
    state.pool.publish(listed)
    state.pool.unhold(listed)
    order = _enqueue(state, nodes, found)
    adopt_windows(state, found, order)
    loose = state.pool.unhold(everything[state.index.forest.node_of[everything] == 0], quarantine=True)
    if len(loose):
        state.book.quarantine[LIMBO] = loose
    state.frozen = True
    state.last_holders = found.holders
    state.counters.adopted_blocks = len(listed)
    state.revision += 1
    state.events.add("blocks_adopted", state.now_ns, blocks=listed)
    return listed


def finish(state: CacheState, writers: Collection[int]) -> int:
    """See `CacheManager.finish_adoption`."""
    state.frozen = False
    state.claimed = Claimed()
    state.revision += 1
    holders, state.last_holders = state.last_holders, None
    limbo = in_limbo(state)
    if holders is None or not writers or not len(limbo):
        return process_gone(state, LIMBO)
    unsafe = np.isin(holders[limbo], [*writers, NOT_KNOWN])
    state.book.quarantine[LIMBO] = limbo[~unsafe]
    freed = process_gone(state, LIMBO)
    if unsafe.any():
        state.book.quarantine[LIMBO] = limbo[unsafe]
    return freed


def in_limbo(state: CacheState) -> BlockRun:
    """The blocks that nobody has claimed yet."""
    return state.book.quarantine.get(LIMBO, np.zeros(0, np.intp))


def leave_limbo(state: CacheState, blocks: BlockRun, owner: int) -> None:
    """Claimed blocks of limbo, distinct, are active from now on, each with one holder."""
    if not len(blocks):
        return
    rest = np.setdiff1d(in_limbo(state), blocks)
    if len(rest):
        state.book.quarantine[LIMBO] = rest
    else:
        state.book.quarantine.pop(LIMBO, None)
    state.pool.claim(blocks, owner)


def _hang(state: CacheState, found: Recovered, accept: Callable[[TenantId], bool]) -> Iterator[tuple[int, Node]]:
    """(number, node) of each node that could be hung; what would hang below one that could not is left out too."""
    forest, size = state.index.forest, state.index.block_bytes
    trees = {
        number: _tree(state, found, number) for number in found.names if accept(TenantId(found.names[number].owner))
    }
    counts, starts = found.counts, found.starts.tolist()
    expiries = np.where(found.expiries == 0, NEVER, found.expiries).tolist()
    priorities, tails = found.priorities.tolist(), found.tails.tolist()
    node_of = forest.node_of
    for number, (above, tree_number) in enumerate(zip(found.parents.tolist(), found.trees.tolist(), strict=True)):
        tree = trees.get(tree_number)
        if tree is None or (above and not node_of[above]):
            continue
        first, end = starts[number], starts[number + 1]
        blocks, tail = found.blocks[first:end], tails[number]
        stop = first * size + int(counts[first]) * 4 if tail else end * size
        edge = found.tokens[first * size : stop]
        parent = tree.root
        if above:
            parent = forest.nodes[NodeId(int(node_of[above]))]
        if above and parent.tree is not tree:
            if tree.anchor is None:
                forest.anchor(tree, parent)
            parent = tree.root
        if parent.children.get(edge[:size]) is not None:
            continue
        node = forest.add_child(parent, edge, blocks, priorities[number], tail=tail, expires_ns=expiries[number])
        if state.weak_names is not None:
            state.weak_names.add(tree.root_key, 0 if parent is tree.root else above, edge, blocks)
        yield number, node
    for tree in trees.values():
        forest.forget_if_empty(tree)


def _tree(state: CacheState, found: Recovered, number: int) -> Tree:
    name = found.names[number]
    owner = state.owner_of(TenantId(name.owner))
    if name.start:
        return state.index.forest.layered_tree(owner, name.root, name.base, name.start)
    return state.index.forest.tree(owner, name.root)


def _charge(state: CacheState, nodes: list[tuple[int, Node]]) -> None:
    runs: dict[int, list[BlockRun]] = {}
    for _, node in nodes:
        runs.setdefault(node.tree.owner, []).append(node.blocks)
    for owner, blocks in runs.items():
        state.pool.ownership.give(np.concatenate(blocks), owner)


def _enqueue(state: CacheState, nodes: list[tuple[int, Node]], found: Recovered) -> list[int]:
    """Puts the leaves in the order of eviction: by when they, or anything below them, were published last. Returns the
    nodes in that order."""
    forest = state.index.forest
    newest: dict[NodeId, int] = {}
    stamps = found.stamps.tolist()
    for number, node in reversed(nodes):
        stamp = max(stamps[number], newest.get(node.node_id, 0))
        newest[node.node_id] = stamp
        above = node.parent if node.parent is not None and node.parent.parent is not None else node.tree.anchor
        if above is not None and newest.get(above.node_id, 0) < stamp:
            newest[above.node_id] = stamp
    nodes.sort(key=lambda item: newest[item[1].node_id])
    for _, node in nodes:
        forest.uses += 1
        node.last_use = forest.uses
        forest.queue.push(node)
    return [number for number, _ in nodes]
