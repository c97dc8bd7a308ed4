"""Fork, rollback and copy-on-write: several sequences over one set of blocks.

Invariants: whole blocks are shared and never written again; a partly filled block has one lease that writes it, each
branch gets a copy; the source of a copy stays held until the copy is reported. Called by `manager.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachemgr.ids import BlockRun, LeaseId, SessionId
from cachemgr.leases import Lease, to_wire
from cachemgr.results import Branch, CopyPlan
from cachemgr.state import CacheState
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
    whole, rest = divmod(num_tokens, state.block_tokens)
    needed = len(samples) if rest else 0
    try:
        state.require(needed, state.room)
    except ResourceExhausted:
        return []
    fresh = state.allocate(needed, parent.owner)
    branches = []
    for number, sample in enumerate(samples):
        table = parent.table[:whole].copy()
        state.pool.hold(table)
        copy = None
        if rest:
            copy = _pin(state, int(parent.table[whole]), int(fresh[number]), rest)
            table = np.append(table, fresh[number])
        lease = _branch(state, parent, sample, num_tokens, table, copy, now_ns)
        branches.append(Branch(lease.lease_id, to_wire(table), copy))
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
    if _is_shared(state, lease, sealed):
        state.require(1, state.room)
    keep = min(lease.num_blocks, -(-num_tokens // state.block_tokens))
    dropped = lease.table[keep : lease.num_blocks].copy()
    last_published = lease.num_published
    lease.num_blocks = keep
    lease.sealed = sealed
    lease.granted = min(lease.granted, sealed)
    lease.num_published = min(last_published, sealed // state.block_tokens)
    lease.grew = lease.grew and lease.num_published == last_published
    del lease.tokens[num_tokens * TOKEN_BYTES :]
    state.pool.unhold(dropped)
    plan = _privatise(state, lease)
    state.rest(lease, last_published)
    state.revision += 1
    return plan


def make_writable(state: CacheState, session_id: SessionId, lease_id: LeaseId) -> CopyPlan | None:
    """See `CacheManager.make_writable`."""
    lease = state.book.session(session_id).lease(lease_id)
    _refuse_while_copying(lease)
    if not _is_shared(state, lease, lease.sealed):
        return None
    state.require(1, state.room)
    plan = _privatise(state, lease)
    state.revision += 1
    return plan


def _is_shared(state: CacheState, lease: Lease, sealed: int) -> bool:
    """Whether the block of the first token that is not sealed is partly sealed and has another holder."""
    place, rest = divmod(sealed, state.block_tokens)
    return bool(rest) and place < lease.num_blocks and int(state.pool.references[lease.table[place]]) > 1


def _privatise(state: CacheState, lease: Lease) -> CopyPlan | None:
    if not _is_shared(state, lease, lease.sealed):
        return None
    place, rest = divmod(lease.sealed, state.block_tokens)
    # The table's hold on the old block becomes the pin of the copy.
    target = int(state.allocate(1, lease.owner)[0])
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
    lease = Lease(
        lease_id=state.book.next_lease_id(),
        session_id=parent.session_id,
        tenant=parent.tenant,
        owner=parent.owner,
        tree=parent.tree,
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
        priority=parent.priority,
        granted_ns=now_ns,
        parent=parent.lease_id,
    )
    state.book.add(lease)
    return lease
