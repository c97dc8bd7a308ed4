"""Acquire: a lease on the blocks of a whole sequence, shared where cached, new where not. All or nothing; or a wait for
a sequence that computes more of it now.

Invariants: what matches is pinned before anything is allocated, so that no eviction can take it; the last token is
never matched; a lease that cannot be had changes nothing. Called by `manager.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachemgr import groups, kept
from cachemgr.asks import Ask
from cachemgr.grouped_index import alone_from
from cachemgr.ids import BlockRun, SessionId
from cachemgr.kept_book import KeptBranch
from cachemgr.layers import NO_MATCH, match, tail_key, trees_of, whole_blocks
from cachemgr.leases import Lease, Session, to_wire
from cachemgr.nodes import NO_BLOCKS
from cachemgr.quotas import blocks_are
from cachemgr.radix import Match
from cachemgr.reach import refuse_beyond_reach
from cachemgr.relief import relieve
from cachemgr.results import Acquired, CopyPlan, Waiting
from cachemgr.sharing import wait_for_prefix
from cachemgr.state import CacheState
from cachemgr.windows import begins_with, most_held
from common.errors import ResourceExhausted
from common.layout import TOKEN_BYTES


class _Beginning(NamedTuple):
    """Where a lease would begin: `found` in the index, or `held` by the kept branch that it continues, as a `Start`;
    `blocks` are those of that.

    key, prefix_blocks: of the tree of what comes after so many blocks of a wider scope
    """

    key: bytes
    prefix_blocks: int
    found: Match
    held: kept.Start | None
    blocks: BlockRun


class _Need(NamedTuple):
    """What a lease takes beside what it shares: `fresh` blocks, `wider` of them for a scope; `num_idle` of the shared
    ones are cached now, the `passed` leading ones are null. `source` (0: none) has `num_tail_tokens` tokens to copy.

    now, wider_now: of both what the table begins with; the rest comes from credit (`groups.py`)
    lasting: of the shared blocks and the source, those whose window blocks it needs
    room, left: fresh blocks that can be had, and those of them that are the tenant's own below its ceiling
    references: of the shared blocks; None where the kept branch has them
    """

    fresh: int
    wider: int
    now: int
    wider_now: int
    lasting: BlockRun
    passed: int
    num_idle: int
    source: int
    num_tail_tokens: int
    source_room: int
    room: int
    left: int
    references: NDArray[np.int32] | None


def acquire(state: CacheState, session_id: SessionId, asked: Ask) -> Acquired | Waiting:
    """See `CacheManager.acquire`."""
    session = state.book.session(session_id)
    branch, continued, ask = None, b"", asked
    if asked.base:
        branch = kept.find(state, asked.tenant, asked.base, asked.now_ns, asked.root)
        continued = kept.base_of(state, branch, asked.base_tokens)
        span = kept.span_of(state, branch, len(continued) // TOKEN_BYTES)
        ask = asked._replace(tokens=continued + asked.tokens, prefix=span)
    ask.check()
    if ask.will_keep and not ask.resumed:
        kept.refuse_more(state, state.known_owner(ask.tenant), 1)
    owner, num_tokens, num_base = state.known_owner(ask.tenant), ask.num_tokens, len(continued) // TOKEN_BYTES
    num_blocks = begins_with(state, num_tokens)
    _refuse_beyond_pool(state, num_blocks)
    is_long = num_blocks * state.block_tokens < num_tokens
    if is_long:
        num_base = min(num_base, num_blocks * state.block_tokens)
        ask = ask._replace(may_wait=False, prefix=ask.prefix if whole_blocks(state, ask.prefix) <= num_blocks else None)
    begin = _find(state, ask, owner, num_tokens - 1, branch, num_base)
    if begin.held is None and ask.may_wait and not ask.no_read:
        request = (ask.request_id, ask.sample)
        waiting = wait_for_prefix(state, session, ask.tenant, begin.key, ask.prefix, ask.tokens, begin.found, request)
        if waiting is not None:
            return waiting
    if is_long:
        num_blocks = begins_with(state, num_tokens, begin.blocks)
    need = _need(state, owner, begin, num_blocks)
    if begin.held is None and begin.found.source and not need.source and groups.has_window(state):
        # Without the copy it begins earlier, and reads further back.
        num_shared = len(begin.blocks) * state.block_tokens
        begin = _find(state, ask, owner, num_shared, branch, num_base)
        need = _need(state, owner, begin, begins_with(state, num_tokens, begin.blocks))
    if _relieved(state, owner, begin, need, branch):
        return acquire(state, session_id, asked._replace(may_wait=False))  # what was found may be gone
    if need.fresh - need.wider > need.left - need.source_room:
        state.quotas.check(owner, need.fresh - need.wider, need.num_idle + need.source_room)
    room = need.room - need.source_room
    begins = need.fresh + len(begin.blocks) - need.passed
    later = max(0, most_held(state) - begins) if is_long else 0  # from credit, all of it held at once
    if need.fresh + later > room:
        refuse_beyond_reach(state, owner, need.fresh + later, begin.blocks[need.passed :])
    if need.fresh <= room:
        groups.require(state, need.now, owner, need.lasting)
    state.require(need.fresh, room)
    return _grant(state, session, ask, begin, need, continued)


def _refuse_beyond_pool(state: CacheState, num_blocks: int) -> None:
    most = state.pool.num_blocks
    if num_blocks > most:
        raise ResourceExhausted(
            f"{blocks_are(num_blocks)} needed and the pool has {most}",
            subject="blocks",
            needed=num_blocks,
            usable=most,
            reason="EXCEEDS_POOL",
        )


def _find(state: CacheState, ask: Ask, owner: int, limit: int, branch: KeptBranch | None, num_base: int) -> _Beginning:
    """The longest beginning of the sequence that can be shared, `limit` tokens at most. Changes nothing."""
    prefix = ask.prefix
    prefix_blocks = whole_blocks(state, prefix)
    key, found = ask.root, NO_MATCH
    if prefix is not None and prefix_blocks:
        key = tail_key(state, ask.root, prefix, prefix_blocks, ask.tokens)
        if not ask.no_read:
            found = match(state, ask.tenant, key, prefix, prefix_blocks, ask.tokens, limit)
    elif not ask.no_read:
        tree = state.index.forest.trees.get((owner, ask.root))
        if tree is not None:
            found = state.index.match(tree, ask.tokens, limit)
    held = None
    if branch is not None and not ask.no_read and kept.lies_in(branch, key, prefix_blocks):
        held = kept.longer(state, branch, found, num_base, limit)
    return _Beginning(key, prefix_blocks, found, held, found.blocks if held is None else held.blocks)


def _need(state: CacheState, owner: int, begin: _Beginning, num_blocks: int) -> _Need:
    """What the lease takes. The source of its copy may be the very block that is missing: then it has none, and those
    tokens are computed again."""
    pool, held, blocks = state.pool, begin.held, begin.blocks
    fresh = num_blocks - len(blocks)
    wider, passed = max(0, begin.prefix_blocks - len(blocks)), 0
    if state.window_tokens:
        passed = len(blocks) - int(np.count_nonzero(blocks))
        blocks = blocks[passed:]
    if held is not None:
        room, left = state.room_for(owner), state.quotas.left(owner)
        source, rest = held.source, held.num_tail_tokens
        lasting = _lasting(state, begin.blocks, source, rest)
        now = groups.begins_with(state, owner, fresh, lasting)
        return _Need(fresh, wider, now, min(wider, now), lasting, passed, 0, source, rest, 0, room, left, None)
    references = pool.references.take(blocks)
    num_idle = pool.count_idle(blocks, references, from_first=not state.window_tokens)
    room, left = state.room_for(owner) - num_idle, state.quotas.left(owner, num_idle)
    source, rest = begin.found.source, begin.found.num_tail_tokens
    source_room = int(source != 0 and pool.references.item(source) == 1)
    if source_room and (fresh > room - 1 or fresh - wider > left - 1):
        source = rest = source_room = 0
    lasting = _lasting(state, begin.blocks, source, rest)
    now = groups.begins_with(state, owner, fresh, lasting)
    if source and state.window_blocks is not None and groups.room(state, owner, now, lasting) < now:
        source = rest = source_room = 0
    wider_now = min(wider, now)
    return _Need(
        fresh, wider, now, wider_now, lasting, passed, num_idle, source, rest, source_room, room, left, references
    )


def _lasting(state: CacheState, blocks: BlockRun, source: int, num_tail_tokens: int) -> BlockRun:
    """The shared blocks whose window blocks a sequence needs that begins with these, and with a copy from `source`."""
    if state.window_blocks is None:
        return NO_BLOCKS
    lasting = groups.needed_of(state, blocks, len(blocks) * state.block_tokens + num_tail_tokens)
    return np.append(lasting, source) if source else lasting


def _relieved(state: CacheState, owner: int, begin: _Beginning, need: _Need, branch: KeptBranch | None) -> bool:
    """Whether kept branches had to give way for the lease, and did."""
    missing = need.fresh - need.room
    if missing > 0 and relieve(state, missing, asking=owner, besides=begin.blocks, last=branch):
        return True
    missing = need.fresh - need.wider - need.left
    return missing > 0 and relieve(state, missing, asking=owner, besides=begin.blocks, last=branch, own=True)


def _grant(state: CacheState, session: Session, ask: Ask, begin: _Beginning, need: _Need, continued: bytes) -> Acquired:
    pool, index, blocks, held, prefix = state.pool, state.index, begin.blocks, begin.held, ask.prefix
    owner = state.owner_of(ask.tenant)
    pool.hold_published(blocks[need.passed :] if need.passed else blocks, need.num_idle, need.references)
    if need.source:
        pool.hold_one(need.source)
    index.use(begin.found, ask.priority, state.expiry(ask.ttl_ns))
    granted = len(blocks) * state.block_tokens + need.num_tail_tokens
    alone = alone_from(begin.found) if held is None and not ask.no_store else len(blocks) + 1
    behind = groups.begin_path(state, blocks, granted, need.lasting, begin.found.lacking, alone)
    new = state.allocate(need.now, owner) if not need.wider_now else NO_BLOCKS
    if prefix is not None and need.wider_now:
        wider = state.allocate(need.wider_now, state.owner_of(prefix.owner), asking=owner)
        new = np.concatenate((wider, state.allocate(need.now - need.wider_now, owner)))
    tree, prefix_tree = trees_of(state, owner, ask.root, begin.key, prefix, begin.prefix_blocks)
    table = np.concatenate((blocks, new)) if len(blocks) else new
    copy = CopyPlan(need.source, int(new[0]), need.num_tail_tokens) if need.source else None
    whole_tokens = len(blocks) * state.block_tokens
    store = not ask.no_store and (held is None or held.store)
    num_published = len(blocks) if held is None else held.num_published
    lease = Lease(  # by place: so many keywords would take a microsecond
        state.book.next_lease_id(), session.session_id, ask.tenant, owner, tree, ask.request_id, ask.sample,
        bytearray(ask.tokens), table, len(table), num_published, whole_tokens, granted, copy, store, ask.priority,
        ask.now_ns, root=ask.root, prefix_tree=prefix_tree, prefix_blocks=begin.prefix_blocks, ttl_ns=ask.ttl_ns,
        passed=need.passed, behind=behind, asked=ask.num_tokens,
    )  # fmt: skip
    state.book.add(lease)
    num_tokens = ask.num_tokens
    if num_tokens - granted >= state.block_tokens:
        state.waits.enter(lease)
    _tell(state, ask, begin, lease, num_tokens)
    state.revision += 1
    base_span = ask.prefix if ask.base and begin.prefix_blocks else None
    return Acquired(lease.lease_id, to_wire(table), granted, copy, continued, base_span)


def _tell(state: CacheState, ask: Ask, begin: _Beginning, lease: Lease, num_tokens: int) -> None:
    """Counts and logs an admission; one that was counted before is not counted again."""
    state.events.add(
        "lease_granted",
        ask.now_ns,
        lease.owner,
        lease.session_id,
        lease.lease_id,
        detail={"num_tokens": num_tokens, "cached_tokens": lease.granted},
    )
    if not ask.resumed:
        state.counters.count_admission(lease.owner, lease.granted, num_tokens)
        if begin.held is None and begin.found.cut_tokens:
            state.counters.shortened_hits += 1
            state.counters.shortened_tokens += begin.found.cut_tokens
        wider_root = b"" if ask.prefix is None else ask.prefix.root
        state.recent.add(lease.owner, ask.root, wider_root, begin.prefix_blocks, ask.tokens, lease.granted)
