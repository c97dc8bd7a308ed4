"""Acquire: a lease on the blocks of a whole sequence, shared where cached, new where not. All or nothing.

Invariants: what matches is pinned before anything is allocated, so that no eviction can take it; the last token is
never matched; a lease that cannot be had changes nothing. Called by `manager.py`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cachemgr.ids import SessionId, TenantId
from cachemgr.keys import ROOT_BYTES
from cachemgr.leases import Lease, to_wire
from cachemgr.nodes import NO_BLOCKS
from cachemgr.radix import Match
from cachemgr.results import Acquired, CopyPlan
from cachemgr.state import CacheState
from common.errors import InvalidArgument, ResourceExhausted
from common.layout import TOKEN_BYTES

MAX_PRIORITY: Final = 100
MAX_REQUEST_ID: Final = 256


def acquire(
    state: CacheState,
    session_id: SessionId,
    *,
    tenant: TenantId,
    root: bytes,
    tokens: bytes,
    request_id: str,
    sample: int,
    no_read: bool,
    no_store: bool,
    resumed: bool,
    priority: int,
    now_ns: int,
) -> Acquired:
    """See `CacheManager.acquire`."""
    session = state.book.session(session_id)
    _validate(tenant, root, tokens, request_id, sample, priority)
    num_tokens = len(tokens) // TOKEN_BYTES
    total = -(-num_tokens // state.block_tokens)
    pool, index = state.pool, state.index
    if total > pool.num_blocks:
        raise ResourceExhausted(
            f"{total} blocks are needed and the pool has {pool.num_blocks}",
            subject="blocks",
            needed=total,
            usable=pool.num_blocks,
            reason="EXCEEDS_POOL",
        )
    known = index.forest.trees.get((state.known_owner(tenant), root))
    match = Match(NO_BLOCKS, 0, 0, None) if known is None or no_read else index.match(known, tokens, num_tokens - 1)
    blocks, source, rest = match.blocks, match.source, match.num_tail_tokens
    fresh = total - len(blocks)
    num_idle = pool.count_idle(blocks)
    room = state.room - num_idle
    source_room = int(source != 0 and pool.references[source] == 1)
    if fresh > room - source_room:
        # The source of the copy may be the very block that is missing: then its tokens are computed again.
        source = rest = source_room = 0
    state.require(fresh, room - source_room)

    owner = state.owner_of(tenant)
    pool.hold_published(blocks, num_idle)
    if source:
        pool.hold_one(source)
    if match.node is not None:
        index.touch(match.node, priority)
    new = state.allocate(fresh, owner)
    table = np.concatenate((blocks, new)) if len(blocks) else new
    copy = CopyPlan(source, int(new[0]), rest) if source else None
    whole_tokens = len(blocks) * state.block_tokens
    lease = Lease(
        lease_id=state.book.next_lease_id(),
        session_id=session.session_id,
        tenant=tenant,
        owner=owner,
        tree=index.forest.tree(owner, root),
        request_id=request_id,
        sample=sample,
        tokens=bytearray(tokens),
        table=table,
        num_blocks=total,
        num_published=len(blocks),
        sealed=whole_tokens,
        granted=whole_tokens + rest,
        copy=copy,
        store=not no_store,
        priority=priority,
        granted_ns=now_ns,
    )
    state.book.add(lease)
    if not resumed:
        state.counters.count_admission(owner, lease.granted)
    state.revision += 1
    return Acquired(lease.lease_id, to_wire(table), lease.granted, copy)


def _validate(tenant: TenantId, root: bytes, tokens: bytes, request_id: str, sample: int, priority: int) -> None:
    if not tenant:
        raise InvalidArgument("tenant", "is empty; a tenant is needed")
    if len(root) != ROOT_BYTES:
        raise InvalidArgument("root", f"has {len(root)} bytes; allowed is {ROOT_BYTES}")
    if not tokens or len(tokens) % TOKEN_BYTES:
        raise InvalidArgument("tokens", f"{len(tokens)} bytes are no packed int32 tokens; at least one is needed")
    if not request_id or len(request_id) > MAX_REQUEST_ID:
        raise InvalidArgument("request_id", f"allowed are 1..{MAX_REQUEST_ID} characters")
    if sample < 0:
        raise InvalidArgument("sample", f"is {sample}; allowed is 0 and more")
    if not 0 <= priority <= MAX_PRIORITY:
        raise InvalidArgument("priority", f"is {priority}; allowed is 0..{MAX_PRIORITY}")
