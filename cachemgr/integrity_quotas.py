"""The check of ownership and pins: who is charged for what, whose content is where, and what pins hold.

Part of the full check of `integrity.py`. It changes nothing. Messages name owners, pins and blocks by number.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from cachemgr.blocks import NO_OWNER, BlockState
from cachemgr.ids import NodeId
from cachemgr.integrity_index import say
from cachemgr.ownership import ANYONE
from cachemgr.pins import Pin
from cachemgr.state import CacheState


def check_quotas(state: CacheState, found: list[str]) -> None:
    """Counts of each owner, from the blocks; the content of each block in use; the pins."""
    pool, ownership = state.pool, state.pool.ownership
    cached = pool.state == BlockState.CACHED
    used = cached | (pool.state == BlockState.ACTIVE)
    for what, counts, mask in (("charged", ownership.charged, used), ("idle", ownership.idle, cached)):
        _compare(what, counts, ownership.owner[mask], found)
    say(found, used & (ownership.owner >= len(state.tenant_names)), "of an owner that nobody is")
    known = (ownership.dirty_owner == ownership.owner) & (ownership.owner != NO_OWNER)
    say(found, used & ~known & (ownership.dirty_owner != ANYONE), "in use, and its content is said to be another's")
    for number, pin in state.pins.items():
        _check_pin(state, number, pin, found)


def _compare(what: str, counts: defaultdict[int, int], owners: NDArray[np.int32], found: list[str]) -> None:
    actual = dict(enumerate(np.bincount(owners).tolist()))
    for owner in sorted({*actual, *counts}):
        if actual.get(owner, 0) != counts.get(owner, 0):
            found.append(f"owner {owner}: {actual.get(owner, 0)} blocks are {what}, {counts.get(owner, 0)} are counted")


def _check_pin(state: CacheState, number: int, pin: Pin, found: list[str]) -> None:
    """What a pin holds is one path from the first block on: of a tree of its owner, or from one of a wider scope's into
    one that hangs there."""
    forest, blocks = state.index.forest, pin.blocks
    if pin.pin_id != number or not 0 < number <= state.last_pin:
        found.append(f"pin {number}: it is registered under a wrong number")
    depth, below = pin.first + len(blocks), None
    while depth > pin.first:
        node = forest.nodes.get(NodeId(int(forest.node_of[blocks[depth - 1 - pin.first]])))
        owner = pin.scope if depth <= pin.prefix_blocks else pin.owner
        if node is None or node.tree.owner != owner or not node.start < depth <= node.end:
            found.append(f"pin {number}: its blocks are no path of its owner's trees")
            return
        place = max(node.start, pin.first)
        held = blocks[place - pin.first : depth - pin.first]
        if not np.array_equal(node.blocks[place - node.start : depth - node.start], held):
            found.append(f"pin {number}: its blocks are not those of node {node.node_id}")
            return
        if below is not None and below.tree is not node.tree and below.tree.anchor is not node:
            found.append(f"pin {number}: its blocks are of two trees, one of which does not hang at the other")
            return
        depth, below = node.start, node
