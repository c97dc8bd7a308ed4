"""Sharing while computing, as an acquire sees it: is it worth waiting for a sequence that computes more of the prompt?

Invariant: only a producer of the very trees that the request would lie in is waited for, its tenant's own and the wider
scope's that it names, and only for at least one block more than is resident. Called by `admission.py`; `waiting.py`
keeps the books. It leases nothing.
"""

from __future__ import annotations

from cachemgr.ids import TenantId
from cachemgr.layers import whole_blocks
from cachemgr.leases import Session
from cachemgr.radix import Match
from cachemgr.results import ScopeSpan, Waiting
from cachemgr.state import CacheState
from common.layout import TOKEN_BYTES


def wait_for_prefix(
    state: CacheState,
    session: Session,
    tenant: TenantId,
    key: bytes,
    prefix: ScopeSpan | None,
    tokens: bytes,
    found: Match,
    request: tuple[str, int],
) -> Waiting | None:
    """A wait, if another lease of the same tree computes at least one block more of the prompt than is resident.

    key: of the tree of what comes after `prefix`    found: what is resident    request: its id and sample
    """
    waits = state.waits
    if not waits.producers:
        return None
    size, forest = state.block_tokens, state.index.forest
    num_tokens, resident = len(tokens) // TOKEN_BYTES, len(found.blocks) * size + found.num_tail_tokens
    best = None
    border = whole_blocks(state, prefix)
    if prefix is not None and border:
        wider = forest.trees.get((state.known_owner(prefix.owner), prefix.root))
        best = waits.find(wider, tokens, 0, len(found.blocks), border)
    tree = forest.trees.get((state.known_owner(tenant), key))
    most = len(found.blocks) if best is None else best[1]
    best = waits.find(tree, tokens, border, most, num_tokens // size) or best
    if best is None:
        return None
    producer, blocks = best
    coming = min(blocks * size, num_tokens - 1)
    if coming - resident < size:
        return None
    wait_id = waits.wait(producer, blocks, (session.session_id, *request))
    if not wait_id:
        return None
    state.counters.waits += 1
    state.revision += 1
    return Waiting(wait_id, resident, coming)
