"""Expiry: what has outlived its time to live goes before anything else.

Invariant: after `expire`, no idle leaf is past its time but those looked at less than `LOOK_AGAIN_NS` ago, and those
that a call of bounded cost leaves to the next one. A use moves a node's expiry on, never back, so that what hangs below
a node never outlives it, but while it is held. Called by `upkeep.py` as time passes and by `state.py` before anything
else is evicted.
"""

from __future__ import annotations

from typing import Final

from cachemgr.ids import BlockRun
from cachemgr.nodes import NO_BLOCKS, Node, join_runs
from cachemgr.radix import PrefixIndex

MOST: Final = 2048  # nodes that one call looks at, so that it costs some milliseconds at most
LOOK_AGAIN_NS: Final = 1_000_000_000  # what is past its time and in use is looked at so often


def expire(index: PrefixIndex, now_ns: int) -> BlockRun:
    """Unlists the idle blocks of nodes whose time is over; returns them."""
    forest, queue = index.forest, index.forest.queue
    if not queue.is_due(now_ns):
        return NO_BLOCKS
    due: list[Node] = []
    while len(due) < MOST and (node := queue.take_expired(now_ns)) is not None:
        due.append(node)
    due.sort(key=lambda node: -node.start)  # what hangs below goes first
    runs, waiting = [], []
    for node in due:
        if node.node_id not in forest.nodes:
            continue  # it went with what hung below it
        taken, stays = index.take_idle(node)
        runs.append(taken)
        if stays:
            waiting.append(node)
    queue.watch_again(waiting, now_ns + LOOK_AGAIN_NS)
    blocks = join_runs(runs)
    forest.node_of[blocks] = 0
    return blocks
