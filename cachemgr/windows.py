"""Windows: where no layer reads further back than so many keys, a running sequence lets go of what lies before them.

The leading blocks that went are null in its table. What nobody can find, since it may not be published, goes as soon as
it is passed. What is listed stays as long as there is room, for another prompt may begin with it; where blocks lack it
goes before any sequence has to give way, and with it all that hangs below it in the index.
Invariants: no block goes that a token still to be computed may read, or that anybody else holds; a path of the index
has no gaps: who lets go of a listed block publishes nothing any more. Called by `reports.py` and `relief.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cachemgr.ids import BlockRun
from cachemgr.leases import Lease
from cachemgr.nodes import NO_BLOCKS, Node
from cachemgr.state import CacheState


class Offer(NamedTuple):
    """What a lease would free: its listed blocks from place `first` on to the last one that is passed.

    gain: how many those are    lost: how many blocks less its owner has then, with those that hang below and are idle
    """

    lease: Lease
    first: int
    gain: int
    lost: int


def passed_by(state: CacheState, num_tokens: int) -> int:
    """Leading blocks that lie before the window of every token after the first `num_tokens`; 0 where there is none."""
    if not state.window_tokens:
        return 0
    return max(0, num_tokens + 1 - state.window_tokens) // state.block_tokens


def begins_with(state: CacheState, num_tokens: int) -> int:
    """Blocks that a lease of so many tokens begins with. Where they are more than the pool has, and a window lets it
    compute on in less, half the pool: the rest comes from credit, as its beginning is passed."""
    num_blocks, most = -(-num_tokens // state.block_tokens), state.pool.num_blocks
    if num_blocks <= most or not state.window_tokens:
        return num_blocks
    least = (state.window_tokens + state.block_tokens - 2) // state.block_tokens + 2
    return most // 2 if least <= most else num_blocks


def drop_passed(state: CacheState, lease: Lease) -> None:
    """Lets go of what a lease that publishes nothing has passed. Listed blocks go together, when it has passed all of
    them: whoever holds a block of a path holds all before it."""
    passed, published = passed_by(state, lease.sealed), lease.num_published
    if state.frozen or passed <= lease.passed or passed < published:
        return
    if published:
        state.pool.unhold_published(lease.table[:published])
        state.rest(lease, published)
        lease.num_published = 0
    private = lease.table[lease.passed or published : passed].copy()
    lease.table[:passed] = 0
    lease.passed = passed
    state.pool.unhold(private)


def offers(state: CacheState, asking: int, besides: BlockRun = NO_BLOCKS, *, own: bool = False) -> list[Offer]:
    """What the leases could free for an owner, the largest first: those of all owners, as far as they stay above their
    floors, or with `own` its own alone. `besides` is a path that is about to be held."""
    if not state.window_tokens or state.frozen:
        return []
    found = [_offer(state, lease, besides) for lease in state.book.leases.values() if not own or lease.owner == asking]
    spare: dict[int, int] = {}
    chosen: list[Offer] = []
    for offer in sorted((item for item in found if item is not None), key=lambda item: -item.gain):
        owner = offer.lease.owner
        left = spare.setdefault(owner, state.quotas.above_floor(owner))
        if owner != asking and offer.lost > left:
            continue
        spare[owner] = left - offer.lost
        chosen.append(offer)
    return chosen


def accept(state: CacheState, offer: Offer, asking: int) -> None:
    """Frees what is offered; nothing else may have changed since."""
    lease, forest = offer.lease, state.index.forest
    node = forest.node_at(lease.table.item(offer.first))
    if offer.first > node.start:
        forest.split(node, offer.first - node.start)  # the lower part keeps its id
    forest.ghosts.stamp = (state.now_ns, asking, "room")
    unlisted = forest.cut_off(node)
    state.forget_names(unlisted)
    state.note_unlisted(unlisted, "room")
    state.pool.unpublish(unlisted)
    lease.num_published = offer.first
    lease.committed = 0
    lease.store = lease.grew = False
    state.waits.leave(lease)
    drop_passed(state, lease)


def _offer(state: CacheState, lease: Lease, besides: BlockRun) -> Offer | None:
    """None where a lease has nothing to offer: below the wider scope and `besides`, listed, passed, its alone."""
    passed = passed_by(state, lease.sealed)
    if not lease.store or passed <= lease.prefix_blocks:
        return None
    path = lease.table[:passed]
    shared = np.count_nonzero(state.pool.references.take(path) > 2)  # holders only become fewer along a path
    wanted = np.count_nonzero(path[: len(besides)] == besides[:passed])
    first = max(lease.prefix_blocks, int(shared), int(wanted))
    if first >= passed:
        return None
    node, idle = state.index.forest.node_at(lease.table.item(first)), 0
    for below in _all_below(node):
        idle += int(np.count_nonzero(state.pool.references.take(below.blocks) == 1))
    return Offer(lease, first, passed - first, passed - first + idle)


def _all_below(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        node = stack.pop()
        stack += node.children
        yield node
