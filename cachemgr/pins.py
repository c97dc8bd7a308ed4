"""Pins: prefixes that an operator keeps from eviction, within a budget; and the priority of what is resident.

A pin holds its blocks as a lease does, from the first one on, so that they are active and never evicted. Invariants: a
pin's blocks are a path of one tree of its owner, or one of a wider scope's with the owner's tail below it; the distinct
blocks of an owner's pins, those of scopes too, fit its budget when a pin is made; a pin ends when it is ended, when its
time is over, or when its owner's prefixes, or those of the scope, go. Called by `manager_quotas.py`, `upkeep.py` and
`pruning.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cachemgr.groups import needed_of
from cachemgr.ids import BlockRun, TenantId
from cachemgr.keys import ROOT_BYTES
from cachemgr.layers import match, tail_key, whole_blocks
from cachemgr.nodes import NEVER, NO_BLOCKS, Node
from cachemgr.radix import Match
from cachemgr.results import ScopeSpan
from cachemgr.state import CacheState
from common.errors import InvalidArgument, NotFound, ResourceExhausted
from common.layout import TOKEN_BYTES

MAX_PRIORITY: Final = 100


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """One pin. `num_tokens` are resident and kept, by the blocks from place `first` on: a window sees none before;
    `expires_ns` is NEVER for one that stays until it is ended. It needs no window blocks of its first `behind` ones.
    The blocks before place `prefix_blocks` are those of owner `scope`, a wider one (0: none are)."""

    pin_id: int
    owner: int
    blocks: BlockRun
    num_tokens: int
    expires_ns: int
    first: int = 0
    behind: int = 0
    scope: int = 0
    prefix_blocks: int = 0


def pin(
    state: CacheState,
    tenant: TenantId,
    root: bytes,
    tokens: bytes,
    now_ns: int,
    ttl_ns: int | None,
    prefix: ScopeSpan | None = None,
) -> Pin:
    """See `CacheManager.pin`."""
    if ttl_ns is not None and ttl_ns <= 0:
        raise InvalidArgument("ttl", "allowed is a time above 0")
    owner = state.known_owner(tenant)
    found = _resident(state, tenant, root, tokens, prefix)
    blocks = found.blocks[found.blocks > 0]
    if found.source:
        blocks = np.append(blocks, found.source)
    budget = state.quotas.of(owner).pin_blocks
    needed = len(np.union1d(pinned_blocks(state, owner), blocks))
    if needed > budget:
        raise ResourceExhausted(
            f"the tenant's pins would keep {needed} blocks; its budget is {budget}",
            subject="pin_blocks",
            needed=needed,
            usable=budget,
            reason="PIN_BUDGET_EXCEEDED",
        )
    num_tokens = len(found.blocks) * state.block_tokens + found.num_tail_tokens
    behind = _begin_window(state, blocks, num_tokens)
    state.pool.hold(blocks)
    state.last_pin += 1
    first = len(found.blocks) + (found.source > 0) - len(blocks)
    expires_ns = NEVER if ttl_ns is None else now_ns + ttl_ns
    scope = 0 if prefix is None else state.known_owner(prefix.owner)
    prefix_blocks = min(whole_blocks(state, prefix), first + len(blocks))
    made = Pin(state.last_pin, owner, blocks.copy(), num_tokens, expires_ns, first, behind, scope, prefix_blocks)
    state.pins[made.pin_id] = made
    state.events.add("pin_made", now_ns, owner=owner, blocks=made.blocks, pin=made.pin_id)
    state.revision += 1
    return made


def _begin_window(state: CacheState, blocks: BlockRun, num_tokens: int) -> int:
    """What a pin needs no window blocks of, and counts as passed: all but its end. Raises ResourceExhausted where pins
    would need more of them than leaves room to run."""
    windows = state.window_blocks
    if windows is None:
        return 0
    needed = needed_of(state, blocks, num_tokens)
    pinned = np.unique(np.concatenate([needed, *(pin.blocks[pin.behind :] for pin in state.pins.values())]))
    if len(pinned) > windows.lasting:
        raise ResourceExhausted(
            f"the pins of this node would keep {len(pinned)} window blocks; {windows.lasting} are the most",
            subject="window_blocks",
            needed=len(pinned),
            usable=windows.lasting,
            reason="PIN_BUDGET_EXCEEDED",
        )
    behind = len(blocks) - len(needed)
    windows.passed(blocks[:behind])
    return behind


def unpin(state: CacheState, pin_id: int) -> None:
    """See `CacheManager.unpin`."""
    ended = state.pins.pop(pin_id, None)
    if ended is None:
        raise NotFound("there is no such pin", reason="PIN_NOT_FOUND")
    _let_go(state, ended)
    state.revision += 1


def end_pins(state: CacheState, owner: int) -> None:
    """Ends all pins of an owner whose prefixes are about to be purged, and all that begin in them."""
    for ended in [item for item in state.pins.values() if owner in (item.owner, item.scope)]:
        unpin(state, ended.pin_id)


def end_unlisted_pins(state: CacheState, scope: int) -> None:
    """Ends the pins that begin in a wider scope, and of which the index lists not all any more."""
    listed = state.index.forest.node_of
    for ended in [item for item in state.pins.values() if item.scope == scope and not listed[item.blocks].all()]:
        unpin(state, ended.pin_id)


def end_expired_pins(state: CacheState, now_ns: int) -> None:
    """Ends the pins whose time is over."""
    for ended in [item for item in state.pins.values() if item.expires_ns <= now_ns]:
        unpin(state, ended.pin_id)


def pinned_blocks(state: CacheState, owner: int | None = None) -> BlockRun:
    """The distinct blocks that the pins of one owner keep, or those of all."""
    runs = [item.blocks for item in state.pins.values() if owner in (None, item.owner)]
    return np.unique(np.concatenate(runs)) if runs else NO_BLOCKS


def set_priority(
    state: CacheState,
    tenant: TenantId,
    root: bytes,
    tokens: bytes,
    priority: int,
    prefix: ScopeSpan | None = None,
) -> int:
    """See `CacheManager.set_priority`."""
    if not 0 <= priority <= MAX_PRIORITY:
        raise InvalidArgument("priority", f"is {priority}; allowed is 0..{MAX_PRIORITY}")
    found = _resident(state, tenant, root, tokens, prefix)
    node = _end_of(state, found)
    if node is None:
        raise NotFound("no whole block of this prefix is resident", reason="PREFIX_NOT_RESIDENT")
    changed = node.start * state.block_tokens + len(node.edge) // TOKEN_BYTES
    queue = state.index.forest.queue
    step: Node | None = node
    while step is not None:
        if step.priority != priority:
            step.priority = priority
            if step.order is not None:
                queue.use(step)
        step = _above(step)
    state.revision += 1
    return changed


def _resident(state: CacheState, tenant: TenantId, root: bytes, tokens: bytes, prefix: ScopeSpan | None) -> Match:
    if len(root) != ROOT_BYTES:
        raise InvalidArgument("root", f"has {len(root)} bytes; allowed is {ROOT_BYTES}")
    if not tokens or len(tokens) % TOKEN_BYTES:
        raise InvalidArgument("tokens", f"{len(tokens)} bytes are no packed int32 tokens; at least one is needed")
    found, num_tokens, border = None, len(tokens) // TOKEN_BYTES, whole_blocks(state, prefix)
    tree = state.index.forest.trees.get((state.known_owner(tenant), root))
    if prefix is not None and border:
        key = tail_key(state, root, prefix, border, tokens)
        found = match(state, tenant, key, prefix, border, tokens, num_tokens)
    elif tree is not None:
        found = state.index.match(tree, tokens, num_tokens)
    if found is None or not (len(found.blocks) or found.source):
        raise NotFound("nothing of this prefix is resident", reason="PREFIX_NOT_RESIDENT")
    return found


def _end_of(state: CacheState, found: Match) -> Node | None:
    """The node that ends where the match ends, cut there if it goes on; a partly matched block is left out."""
    node = found.node
    if node is None:
        return None
    if node.tail:
        return node if len(node.edge) // TOKEN_BYTES == found.num_tail_tokens else _above(node)
    inside = len(found.blocks) - node.start
    if inside <= 0:
        return _above(node)
    return state.index.forest.split(node, inside) if inside < len(node.blocks) else node


def _above(node: Node) -> Node | None:
    """The node before one on its path, in the wider tree that its own hangs below too; None where it is the first."""
    above = node.parent
    return node.tree.anchor if above is None or above.parent is None else above


def _let_go(state: CacheState, ended: Pin) -> None:
    """Drops the holds of a pin that is over. A tail that something longer covers by now goes at once."""
    last = int(ended.blocks[-1])
    state.events.add("pin_ended", state.now_ns, owner=ended.owner, blocks=ended.blocks, pin=ended.pin_id)
    if state.window_blocks is not None:
        state.window_blocks.needed_again(ended.blocks[: ended.behind])
    state.let_go(ended.blocks)
    if state.pool.published[last]:
        state.discard(state.index.drop_superseded(last))
