"""Fork, rollback and copy-on-write: several sequences over one set of blocks.

Invariants: whole blocks are shared and never written again; a partly filled block has one lease that writes it, each
branch gets a copy; the source of a copy stays held until the copy is reported. Called by `manager.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachemgr import groups
from cachemgr.ids import BlockRun, LeaseId, SessionId
from cachemgr.layers import cut, own_tail, owner_at, shorten
from cachemgr.leases import Lease, to_wire
from cachemgr.nodes import NO_BLOCKS
from cachemgr.relief import relieve
from cachemgr.results import Branch, CopyPlan
from cachemgr.sealing import publish_tail
from cachemgr.state import CacheState
from cachemgr.windows import passed_by
from common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from common.layout import TOKEN_BYTES


def fork(
    state: CacheState, session_id: SessionId, lease_id: LeaseId, samples: Sequence[int], num_tokens: int, now_ns: int
) -> list[Branch]:
    """See `CacheManager.fork`."""
    session = state.book.session(session_id)
    parent = session.lease(lease_id)
    if not 1 <= num_tokens <= parent.sealed:
        raise InvalidArgument("num_tokens", f"is {num_tokens}; allowed is 1..{parent.sealed}, the sealed tokens")
    if any(sample < 0 for sample in samples):
        raise InvalidArgument("samples", "allowed is 0 and more")
    if passed_by(state, num_tokens) < parent.passed or not groups.is_there(state, parent.blocks, num_tokens):
        return []
    whole, rest = divmod(num_tokens, state.block_tokens)
    needed = len(samples) if rest else 0
    try:
        reads = groups.needed_of(state, parent.blocks, num_tokens) if state.window_blocks is not None else NO_BLOCKS
        _require(state, needed, parent.owner, reads)
    except ResourceExhausted:
        return []
    state.pool.hold(reads)  # the parent may have passed them
    fresh = state.allocate(needed, parent.owner)
    branches = []
    for number, sample in enumerate(samples):
        table = parent.table[:whole].copy()
        state.pool.hold(table[parent.passed :])
        copy = None
        if rest:
            copy = _pin(state, int(parent.table[whole]), int(fresh[number]), rest)
            table = np.append(table, fresh[number])
        lease = _branch(state, parent, sample, num_tokens, table, copy, now_ns)
        branches.append(Branch(lease.lease_id, to_wire(table), copy))
    state.pool.unhold(reads)
    state.revision += 1
    return branches


def rollback(
    state: CacheState, session_id: SessionId, lease_id: LeaseId, num_tokens: int, now_ns: int
) -> CopyPlan | None:
    """See `CacheManager.rollback`."""
    lease = state.book.session(session_id).lease(lease_id)
    if not 1 <= num_tokens <= lease.num_tokens:
        raise InvalidArgument("num_tokens", f"is {num_tokens}; allowed is 1..{lease.num_tokens}")
    _refuse_while_copying(lease)
    sealed = min(lease.sealed, num_tokens)
    if passed_by(state, sealed) < lease.passed or not groups.is_there(state, lease.blocks, sealed):
        raise FailedPrecondition(
            "the sequence has let go of blocks that it would read again from there", reason="WINDOW_PASSED"
        )
    if _is_shared(state, lease, sealed):
        needed = groups.needed_of(state, lease.blocks, sealed)
        _require(state, 1, owner_at(lease, sealed // state.block_tokens), needed)
    if state.window_blocks is not None:
        groups.begin(state, lease, sealed)
    keep = min(lease.num_blocks, -(-num_tokens // state.block_tokens))
    dropped = lease.table[keep : lease.num_blocks].copy()
    last_published = lease.num_published
    lease.num_blocks = keep
    lease.sealed = sealed
    lease.granted = min(lease.granted, sealed)
    lease.num_published = min(last_published, sealed // state.block_tokens)
    lease.grew = lease.grew and lease.num_published == last_published
    lease.committed = 0
    del lease.tokens[num_tokens * TOKEN_BYTES :]
    state.pool.unhold(dropped)
    state.waits.leave(lease)
    shorten(state, lease, num_tokens)
    plan = _privatise(state, lease)
    own_tail(state, lease)
    state.rest(lease, last_published)
    state.revision += 1
    return plan


def make_writable(state: CacheState, session_id: SessionId, lease_id: LeaseId) -> CopyPlan | None:
    """See `CacheManager.make_writable`."""
    lease = state.book.session(session_id).lease(lease_id)
    _refuse_while_copying(lease)
    if not _is_shared(state, lease, lease.sealed):
        return None
    _require(state, 1, owner_at(lease, lease.sealed // state.block_tokens))
    plan = _privatise(state, lease)
    state.revision += 1
    return plan


def commit(state: CacheState, session_id: SessionId, lease_id: LeaseId, num_tokens: int) -> None:
    """See `CacheManager.commit`."""
    lease = state.book.session(session_id).lease(lease_id)
    if not 1 <= num_tokens <= lease.sealed:
        raise InvalidArgument("num_tokens", f"is {num_tokens}; allowed is 1..{lease.sealed}, the sealed tokens")
    if not lease.store:
        raise FailedPrecondition("blocks of this lease are not to be published", reason="NO_STORE")
    depth = lease.sealed // state.block_tokens
    count = num_tokens - depth * state.block_tokens
    if count <= 0 or lease.committed:
        return  # whole blocks are published as they are sealed
    publish_tail(state, lease, num_tokens)
    if lease.num_published > depth:
        lease.committed = count
        state.revision += 1


def _require(state: CacheState, needed: int, owner: int, besides: BlockRun = NO_BLOCKS) -> None:
    """Checks that `needed` blocks can be had for an owner, the window blocks of `besides` not taken for it; kept
    branches give way where they cannot be had else."""
    room, left = state.room_for(owner), state.quotas.left(owner)
    if needed > room:
        relieve(state, needed - room, asking=owner)
    if needed > left:
        relieve(state, needed - left, asking=owner, own=True)
    state.quotas.check(owner, needed)
    groups.require(state, needed, owner, besides)
    state.require(needed, state.room_for(owner))


def _is_shared(state: CacheState, lease: Lease, sealed: int) -> bool:
    """Whether the block of the first token that is not sealed is partly sealed and has another holder."""
    place, rest = divmod(sealed, state.block_tokens)
    return bool(rest) and place < lease.num_blocks and int(state.pool.references[lease.table[place]]) > 1


def _privatise(state: CacheState, lease: Lease) -> CopyPlan | None:
    if not _is_shared(state, lease, lease.sealed):
        return None
    place, rest = divmod(lease.sealed, state.block_tokens)
    if lease.committed:
        lease.committed = 0
        lease.num_published = place
    # The table's hold on the old block becomes the pin of the copy.
    target = int(state.allocate(1, owner_at(lease, place), asking=lease.owner)[0])
    lease.copy = CopyPlan(int(lease.table[place]), target, rest)
    lease.table[place] = target
    lease.granted = lease.sealed
    lease.sealed = place * state.block_tokens
    return lease.copy


def _refuse_while_copying(lease: Lease) -> None:
    if lease.copy is not None:
        raise FailedPrecondition("the lease's copy has not been reported", reason="COPY_PENDING")


def _pin(state: CacheState, source: int, target: int, num_tokens: int) -> CopyPlan:
    state.pool.hold_one(source)
    return CopyPlan(source, target, num_tokens)


def _branch(
    state: CacheState,
    parent: Lease,
    sample: int,
    num_tokens: int,
    table: BlockRun,
    copy: CopyPlan | None,
    now_ns: int,
) -> Lease:
    whole = num_tokens // state.block_tokens
    tree, prefix_tree, prefix_blocks = cut(state, parent, num_tokens)
    lease = Lease(
        lease_id=state.book.next_lease_id(),
        session_id=parent.session_id,
        tenant=parent.tenant,
        owner=parent.owner,
        tree=tree,
        request_id=parent.request_id,
        sample=sample,
        tokens=parent.tokens[: num_tokens * TOKEN_BYTES],
        table=table,
        num_blocks=len(table),
        num_published=min(parent.num_published, whole),
        sealed=whole * state.block_tokens,
        granted=num_tokens,
        copy=copy,
        store=parent.store,
        cut_off=parent.cut_off,
        priority=parent.priority,
        granted_ns=now_ns,
        parent=parent.lease_id,
        root=parent.root,
        prefix_tree=prefix_tree,
        prefix_blocks=prefix_blocks,
        ttl_ns=parent.ttl_ns,
        passed=parent.passed,
    )
    groups.begin(state, lease, num_tokens)
    state.book.add(lease)
    state.events.add(
        "lease_forked",
        now_ns,
        owner=lease.owner,
        session=lease.session_id,
        lease=lease.lease_id,
        parent=parent.lease_id,
        num_tokens=num_tokens,
    )
    return lease
