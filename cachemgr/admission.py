"""Acquire: a lease on the blocks of a whole sequence, shared where cached, new where not. All or nothing; or a wait for
a sequence that computes more of it now.

Invariants: what matches is pinned before anything is allocated, so that no eviction can take it; the last token is
never matched; a lease that cannot be had changes nothing. Called by `manager.py`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cachemgr import kept
from cachemgr.ids import SessionId, TenantId
from cachemgr.keys import ROOT_BYTES
from cachemgr.layers import NO_MATCH, match, tail_key, trees_of, whole_blocks
from cachemgr.leases import Lease, to_wire
from cachemgr.relief import relieve
from cachemgr.results import Acquired, CopyPlan, ScopeSpan, Waiting
from cachemgr.sharing import wait_for_prefix
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
    ttl_ns: int,
    prefix: ScopeSpan | None,
    may_wait: bool,
    base: bytes = b"",
    base_tokens: int = 0,
    will_keep: bool = False,
    now_ns: int,
) -> Acquired | Waiting:
    """See `CacheManager.acquire`."""
    session = state.book.session(session_id)
    asked, continued = tokens, b""
    branch = kept.find(state, tenant, base, now_ns, root) if base else None
    if branch is not None:
        continued = kept.base_of(state, branch, base_tokens)
        tokens = continued + asked
        prefix = kept.span_of(state, branch, len(continued) // TOKEN_BYTES) or prefix
    _validate(tenant, root, tokens, request_id, sample, priority)
    if ttl_ns < 0:
        raise InvalidArgument("ttl", "allowed is 0 and more")
    if will_keep and not resumed:
        kept.refuse_more(state, state.known_owner(tenant), 1)
    if prefix is not None:
        _validate_prefix(prefix, tokens)
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
    prefix_blocks = 0 if prefix is None else whole_blocks(state, prefix)
    key = root
    if prefix is not None and prefix_blocks:
        key = tail_key(state, root, prefix, prefix_blocks, tokens)
    if no_read:
        found = NO_MATCH
    elif prefix is not None and prefix_blocks:
        found = match(state, tenant, key, prefix, prefix_blocks, tokens, num_tokens - 1)
    else:
        known = index.forest.trees.get((state.known_owner(tenant), root))
        found = NO_MATCH if known is None else index.match(known, tokens, num_tokens - 1)
    blocks, source, rest = found.blocks, found.source, found.num_tail_tokens
    num_published, store = len(blocks), not no_store
    start = None
    if branch is not None and not no_read and kept.lies_in(branch, key, prefix_blocks):
        start = kept.longer(state, branch, found, len(continued) // TOKEN_BYTES, num_tokens - 1)
    if start is not None:
        blocks, source, rest, num_published = start.blocks, start.source, start.num_tail_tokens, start.num_published
        store = store and start.store
    elif may_wait and not no_read:
        waiting = wait_for_prefix(state, session, tenant, key, prefix, tokens, found, (request_id, sample))
        if waiting is not None:
            return waiting
    fresh = total - len(blocks)
    num_idle = 0 if start is not None else pool.count_idle(blocks)
    owner = state.known_owner(tenant)
    shared = max(0, prefix_blocks - len(blocks)) if prefix is not None else 0
    room = state.room_for(owner) - num_idle
    left = state.quotas.left(owner, num_idle)
    source_room = int(start is None and source != 0 and pool.references[source] == 1)
    if fresh > room - source_room or fresh - shared > left - source_room:
        # The source of the copy may be the very block that is missing: then its tokens are computed again.
        source = rest = source_room = 0
    if (fresh > room and relieve(state, fresh - room, asking=owner, besides=blocks, last=branch)) or (
        fresh - shared > left
        and relieve(state, fresh - shared - left, asking=owner, besides=blocks, last=branch, own=True)
    ):
        return acquire(
            state,
            session_id,
            tenant=tenant,
            root=root,
            tokens=asked,
            request_id=request_id,
            sample=sample,
            no_read=no_read,
            no_store=no_store,
            resumed=resumed,
            priority=priority,
            ttl_ns=ttl_ns,
            prefix=prefix,
            may_wait=False,
            base=base,
            base_tokens=base_tokens,
            will_keep=will_keep,
            now_ns=now_ns,
        )
    state.quotas.check(owner, fresh - shared, num_idle + source_room)
    state.require(fresh, room - source_room)

    owner = state.owner_of(tenant)
    pool.hold_published(blocks, num_idle)
    if source:
        pool.hold_one(source)
    index.use(found, priority, state.expiry(ttl_ns))
    if prefix is not None and shared:
        wider = state.allocate(shared, state.owner_of(prefix.owner))
        new = np.concatenate((wider, state.allocate(fresh - shared, owner)))
    else:
        new = state.allocate(fresh, owner)
    if prefix is None or not prefix_blocks:
        tree, prefix_tree = index.forest.tree(owner, root), None
    else:
        tree, prefix_tree = trees_of(state, owner, root, key, prefix, prefix_blocks)
    table = np.concatenate((blocks, new)) if len(blocks) else new
    copy = CopyPlan(source, int(new[0]), rest) if source else None
    whole_tokens = len(blocks) * state.block_tokens
    lease = Lease(
        lease_id=state.book.next_lease_id(),
        session_id=session.session_id,
        tenant=tenant,
        owner=owner,
        tree=tree,
        request_id=request_id,
        sample=sample,
        tokens=bytearray(tokens),
        table=table,
        num_blocks=total,
        num_published=num_published,
        sealed=whole_tokens,
        granted=whole_tokens + rest,
        copy=copy,
        store=store,
        priority=priority,
        granted_ns=now_ns,
        root=root,
        prefix_tree=prefix_tree,
        prefix_blocks=prefix_blocks,
        ttl_ns=ttl_ns,
    )
    state.book.add(lease)
    if num_tokens - lease.granted >= state.block_tokens:
        state.waits.enter(lease)
    state.events.add(
        "lease_granted",
        now_ns,
        owner,
        session.session_id,
        lease.lease_id,
        num_tokens=num_tokens,
        cached_tokens=lease.granted,
    )
    if not resumed:
        state.counters.count_admission(owner, lease.granted, num_tokens)
        wider_root = b"" if prefix is None else prefix.root
        state.recent.add(owner, root, wider_root, prefix_blocks, tokens, lease.granted)
    state.revision += 1
    return Acquired(lease.lease_id, to_wire(table), lease.granted, copy, continued)


def _validate_prefix(prefix: ScopeSpan, tokens: bytes) -> None:
    if len(prefix.root) != ROOT_BYTES:
        raise InvalidArgument("prefix.root", f"has {len(prefix.root)} bytes; allowed is {ROOT_BYTES}")
    most = len(tokens) // TOKEN_BYTES
    if not prefix.owner or not 0 <= prefix.num_tokens <= most:
        raise InvalidArgument(
            "prefix.num_tokens", f"is {prefix.num_tokens}; allowed are 0..{most}, the prompt's tokens"
        )


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
