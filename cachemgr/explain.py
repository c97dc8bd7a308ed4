"""Why is a prompt resident no further? Reads the index, the producers and the ghosts; it changes nothing.

Invariants: recency and counters stay as they are; tokens that stand where a prompt diverges are told only of the
tenant's own tree, never of a wider scope's. Called by `manager.py`; who asks is an operator. The places where else to
look, under other keys and in other scopes, are given by the caller, who knows the secrets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from cachemgr.ghosts import Stamp
from cachemgr.ids import BlockRun, TenantId
from cachemgr.keys import Scope
from cachemgr.layers import match, tail_key, whole_blocks
from cachemgr.nodes import Node, Tree, common_tokens
from cachemgr.radix import Match
from cachemgr.results import ScopeSpan
from cachemgr.state import CacheState
from common.layout import TOKEN_BYTES

MAX_OTHER_TOKENS: Final = 8


class MissReason(IntEnum):
    """Why a prompt is resident no further; the numbers are those of tessera.admin.v1.MissReason."""

    RESIDENT = 1
    DIVERGED = 2
    NEVER_SEEN = 3
    KEY_DIFFERS = 4
    EVICTED = 5
    COMPUTING = 6
    OTHER_SCOPE = 7


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where else a tenant's prompt may lie: under another root, or below another prefix. `differing_parts` names what
    differs between the keys; where none does, the place is in another `scope`."""

    root: bytes
    prefix: ScopeSpan | None
    differing_parts: tuple[str, ...] = ()
    scope: Scope = Scope.PRIVATE


@dataclass(frozen=True, slots=True)
class Explanation:
    """resident_tokens:  leading tokens of the prompt that are cached, `scope_tokens` of them in the wider scope
    other_tokens:     what stands where a prompt diverged, in the tenant's own tree
    differing_parts:  of the key that the prompt is resident under further, for `elsewhere_tokens` tokens
    evicted_ns:       when it was evicted, for the owner `evicted_for`, or by cause: "expired", "operator", "quota",
                      or "credit" (for a decoder's reserve)
    computing_tokens: of the prompt that a running sequence computes
    other_scope:      that it is resident in further, for `elsewhere_tokens` tokens
    """

    resident_tokens: int
    scope_tokens: int
    reason: MissReason
    other_tokens: tuple[int, ...] = ()
    differing_parts: tuple[str, ...] = ()
    evicted_ns: int = 0
    evicted_for: str = ""
    computing_tokens: int = 0
    other_scope: Scope | None = None
    elsewhere_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Stop:
    """Where a prompt stops: after `resident` tokens, in `tree` at `node` (None: the tree is not there); `border` is how
    many blocks of it lie in the wider scope, `key` the root of what comes after them. `lacking`: as `Match.lacking`."""

    resident: int
    tree: Tree | None
    node: Node | None
    border: int
    key: bytes
    lacking: BlockRun | None = None


def explain(
    state: CacheState,
    tenant: TenantId,
    root: bytes,
    tokens: bytes,
    prefix: ScopeSpan | None,
    others: Sequence[Elsewhere],
) -> Explanation:
    """See `CacheManager.explain`."""
    num_tokens = len(tokens) // TOKEN_BYTES
    stop = _find(state, tenant, root, tokens, prefix)
    resident = stop.resident
    in_scope = min(resident, stop.border * state.block_tokens)
    if resident == num_tokens:
        return Explanation(resident, in_scope, MissReason.RESIDENT)
    computing = _computing(state, tenant, stop, prefix, tokens)
    if computing > resident:
        return Explanation(resident, in_scope, MissReason.COMPUTING, computing_tokens=computing)
    stamp = _ghost(state, tenant, stop, prefix, tokens) if stop.lacking is None else _taken(state, stop.lacking)
    if stamp is not None:
        when, owner, cause = stamp
        by = state.tenant_names[owner] or "credit" if cause == "room" else cause
        return Explanation(resident, in_scope, MissReason.EVICTED, evicted_ns=when, evicted_for=by)
    elsewhere = _elsewhere(state, tenant, resident, tokens, others)
    if elsewhere is not None:
        place, count = elsewhere
        if place.differing_parts:
            return Explanation(
                resident,
                in_scope,
                MissReason.KEY_DIFFERS,
                differing_parts=place.differing_parts,
                elsewhere_tokens=count,
            )
        return Explanation(resident, in_scope, MissReason.OTHER_SCOPE, other_scope=place.scope, elsewhere_tokens=count)
    standing = _standing(state, stop, tokens)
    if not standing:
        return Explanation(resident, in_scope, MissReason.NEVER_SEEN)
    own = stop.tree is not None and stop.tree.owner == state.known_owner(tenant)
    shown = np.frombuffer(standing, "<i4", min(len(standing) // TOKEN_BYTES, MAX_OTHER_TOKENS)).tolist() if own else ()
    return Explanation(resident, in_scope, MissReason.DIVERGED, other_tokens=tuple(shown))


def _find(state: CacheState, tenant: TenantId, root: bytes, tokens: bytes, prefix: ScopeSpan | None) -> _Stop:
    index, num_tokens = state.index, len(tokens) // TOKEN_BYTES
    border = whole_blocks(state, prefix)
    own_tree = (state.known_owner(tenant), root)
    if prefix is None or not border:
        tree = index.forest.trees.get(own_tree)
        if tree is None:
            return _Stop(0, None, None, 0, root)
        found = index.match(tree, tokens, num_tokens)
        return _Stop(_length(state, found), tree, found.node, 0, root, found.lacking)
    key = tail_key(state, root, prefix, border, tokens)
    found = match(state, tenant, key, prefix, border, tokens, num_tokens)
    resident = _length(state, found)
    in_tail = resident >= border * state.block_tokens
    name = (state.known_owner(tenant), key) if in_tail else (state.known_owner(prefix.owner), prefix.root)
    tree = index.forest.trees.get(name)
    node = found.node
    if in_tail and tree is not None and (node is None or node.tree is not tree):
        node = tree.root
    return _Stop(resident, tree, node, border, key, found.lacking)


def _length(state: CacheState, found: Match) -> int:
    return len(found.blocks) * state.block_tokens + found.num_tail_tokens


def _computing(state: CacheState, tenant: TenantId, stop: _Stop, prefix: ScopeSpan | None, tokens: bytes) -> int:
    """How many tokens of the prompt a running sequence of the same tree computes; 0 where none does."""
    trees, size = state.index.forest.trees, state.block_tokens
    resident, limit = stop.resident // size, len(tokens) // TOKEN_BYTES // size
    found = state.waits.find(trees.get((state.known_owner(tenant), stop.key)), tokens, stop.border, resident, limit)
    if found is None and prefix is not None:
        wider = trees.get((state.known_owner(prefix.owner), prefix.root))
        found = state.waits.find(wider, tokens, 0, resident, stop.border)
    return 0 if found is None else found[1] * size


def _ghost(state: CacheState, tenant: TenantId, stop: _Stop, prefix: ScopeSpan | None, tokens: bytes) -> Stamp | None:
    """The stamp of the eviction that took what comes next in the prompt, if it is remembered."""
    size, forest = state.block_tokens, state.index.forest
    place = stop.resident // size
    if prefix is not None and stop.border and place < stop.border:
        owner, key = state.known_owner(prefix.owner), prefix.root
    else:
        owner, key = state.known_owner(tenant), stop.key
    for ghost in forest.ghosts.of(owner, key):
        if not ghost.start <= place < ghost.start + ghost.count:
            continue
        common = common_tokens(ghost.tokens, tokens[ghost.start * state.index.block_bytes :])
        if ghost.start < place:
            if common == size:  # its first blocks are there again
                return ghost.stamp
            continue
        parent = forest.nodes.get(ghost.parent)
        elsewhere = parent is not None and not (stop.node is not None and _is_above(parent, stop.node))
        if not elsewhere and place * size + common > stop.resident:
            return ghost.stamp
    return None


def _taken(state: CacheState, lacking: BlockRun) -> Stamp | None:
    """The stamp of the need for room that took the last window block that a longer match lacks. Its blocks are there
    still: what they hold for the layers that read all keys is of no use without."""
    windows = state.window_blocks
    if windows is None:
        return None
    gone = lacking[windows.of.take(lacking) == 0]
    last = gone[np.argmax(windows.taken_ns.take(gone))] if len(gone) else 0
    return windows.taken_ns.item(last), windows.taken_for.item(last), "room"


def _is_above(parent: Node, node: Node) -> bool:
    """Whether a node is another one or lies on the path to it."""
    step: Node | None = node
    while step is not None and step is not parent:
        step = step.parent
    return step is not None


def _elsewhere(
    state: CacheState, tenant: TenantId, resident: int, tokens: bytes, others: Sequence[Elsewhere]
) -> tuple[Elsewhere, int] | None:
    """The other place that has most of the prompt, if that is more than the `resident` tokens."""
    best = None
    for place in others:
        count = _find(state, tenant, place.root, tokens, place.prefix).resident
        if count > resident:
            best, resident = place, count
    return None if best is None else (best, resident)


def _standing(state: CacheState, stop: _Stop, tokens: bytes) -> bytes:
    """The packed tokens that stand where the prompt stops; empty where nothing does."""
    node = stop.node
    if node is None:
        return b""
    offset = (stop.resident - node.start * state.block_tokens) * TOKEN_BYTES
    if offset < len(node.edge):
        return node.edge[offset:]
    begin = stop.resident * TOKEN_BYTES
    after, before = node.children.around(tokens[begin : begin + state.index.block_bytes])
    beside = after if after is not None else before
    return b"" if beside is None else beside.edge
