"""Claims: what a decoder presents to a new daemon becomes leases again, each block of it checked.

Invariants: a lease is made whole or not at all; a block that may still be written is claimed once; one that is sealed
and not listed may be shared by sequences that hold the same tokens of the same owner at the same place. The blocks of
a sequence that cannot be kept are held until its decoder has acknowledged that. Called by `manager.py`, while the core
is frozen; what is claimed comes out of limbo (`adoption.py`), as `claim_plans.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachemgr.adoption import in_limbo, leave_limbo
from cachemgr.blocks import NO_OWNER, BlockState
from cachemgr.claim_plans import Claim, Plan, Sources, listed_part, plan_claim, source_fits, table_of
from cachemgr.claimed import Claimed, Content
from cachemgr.groups import begin
from cachemgr.ids import BlockArray, SessionId
from cachemgr.layers import tail_key, trees_of, whole_blocks
from cachemgr.leases import NO_LEASE, Deferred, Lease, Session
from cachemgr.resuming import Resumed
from cachemgr.sealing import seal
from cachemgr.state import CacheState
from cachemgr.window_claims import agree, said_by
from common.errors import InvalidArgument


def claim(
    state: CacheState,
    session_id: SessionId,
    claims: Sequence[Claim],
    credit: BlockArray,
    now_ns: int,
    window_blocks: BlockArray,
) -> Resumed:
    """See `CacheManager.claim`."""
    said = said_by(state, window_blocks)
    claimed = state.claimed
    session = state.book.session(session_id)
    limbo = set(in_limbo(state).tolist())
    plans: list[Plan | None] = []
    taken = set(claimed.writable)
    active = int(BlockState.ACTIVE)  # a lease that was claimed may have ended since
    shared = {block: content for block, content in claimed.shared.items() if state.pool.state[block] == active}
    before = dict(shared)
    own = set(credit.tolist())
    if len(own) != len(credit) or not own <= limbo - taken:
        raise InvalidArgument("credit_blocks", "holds blocks twice, or blocks that are not the session's credit")
    if not agree(state, said, credit.astype(np.intp)):
        raise InvalidArgument("window_blocks", "says of credit_blocks what is not so")
    taken |= own
    for item in claims:
        plan = plan_claim(state, item, limbo, taken, shared, said)
        plans.append(plan)
        if plan is not None:
            taken.update(plan.writable)
            shared.update(plan.shared)
    plans = _with_sources(state, plans, before)
    state.revision += 1
    granted = [plan for plan in plans if plan is not None]
    _take(state, granted, own, claimed)
    session.credit |= own
    leases = {id(plan): _grant(state, session, plan, now_ns) for plan in granted}
    for item, plan in zip(claims, plans, strict=True):
        if plan is None:
            _set_aside(state, session, item)
    swaps = [seal(state, session, leases[id(plan)], plan.sealed) for plan in granted]
    if state.journal is not None:
        state.journal.flush()
    numbers = [NO_LEASE if plan is None else leases[id(plan)].lease_id for plan in plans]
    return Resumed(numbers, [swap for swap in swaps if swap is not None], state.revision)


def _with_sources(state: CacheState, plans: list[Plan | None], before: dict[int, Content]) -> list[Plan | None]:
    """The plans whose copies have their sources; `before` are the blocks claimed earlier that are held still. Where one
    is refused, what it alone holds is no source for another."""
    while True:
        sources = Sources(dict(before))
        for plan in plans:
            if plan is not None:
                sources.add(state, plan)
        fitting = [plan if plan is not None and source_fits(state, plan, sources) else None for plan in plans]
        if fitting.count(None) == plans.count(None):
            return fitting
        plans = fitting


def _take(state: CacheState, plans: list[Plan], credit: set[int], claimed: Claimed) -> None:
    """The holds of all plans and of the credit. A block leaves limbo with its first holder."""
    fresh: dict[int, list[int]] = {NO_OWNER: sorted(credit)}
    again: list[int] = []
    before = {*claimed.shared, *claimed.writable}
    claimed.writable |= credit
    for plan in plans:
        copy = plan.claim.held.copy
        for block, content in plan.shared.items():
            (again if block in before else fresh.setdefault(content[0], [])).append(block)
            before.add(block)
            claimed.shared[block] = content
        for block, owner in plan.writable.items():
            fresh.setdefault(owner, []).append(block)
        before.update(plan.writable)
        claimed.writable.update(plan.writable)
        state.pool.hold(plan.listed[plan.passed :])
        if copy is not None and state.pool.published[copy.source]:
            state.pool.hold_one(copy.source)
    for plan in plans:
        copy = plan.claim.held.copy
        if copy is not None and not state.pool.published[copy.source]:
            again.append(copy.source)  # in the table of a sequence that is claimed, too
    for owner, blocks in fresh.items():
        run = np.array(blocks, np.intp)
        leave_limbo(state, run, owner)
        if state.journal is not None:
            state.journal.given(run, state.book.current)
    for block in again:
        state.pool.hold_one(block)


def _grant(state: CacheState, session: Session, plan: Plan, now_ns: int) -> Lease:
    """Makes the lease of a plan, sealed as far as it is listed."""
    item, held = plan.claim, plan.claim.held
    prefix_blocks = whole_blocks(state, item.prefix)
    key = item.root
    if item.prefix is not None and prefix_blocks:
        key = tail_key(state, item.root, item.prefix, prefix_blocks, held.tokens)
    tree, prefix_tree = trees_of(state, plan.owner, item.root, key, item.prefix, prefix_blocks)
    sealed = (len(plan.listed) - (plan.committed > 0)) * state.block_tokens
    lease = Lease(
        lease_id=state.book.next_lease_id(),
        session_id=session.session_id,
        tenant=item.tenant,
        owner=plan.owner,
        tree=tree,
        request_id=item.request_id,
        sample=item.sample,
        tokens=bytearray(held.tokens),
        table=plan.table,
        num_blocks=len(held.blocks),
        num_published=len(plan.listed),
        sealed=sealed,
        granted=sealed if held.copy is None else plan.sealed + held.copy.num_tokens,
        copy=held.copy,
        store=not item.no_store and (not plan.passed or len(plan.listed) > plan.passed),
        priority=item.priority,
        granted_ns=now_ns,
        root=item.root,
        ttl_ns=item.ttl_ns,
        committed=plan.committed,
        prefix_tree=prefix_tree,
        prefix_blocks=prefix_blocks,
        passed=plan.passed,
    )
    begin(state, lease, held.sealed_tokens)
    state.book.add(lease)
    state.waits.enter(lease)
    return lease


def _set_aside(state: CacheState, session: Session, item: Claim) -> None:
    """The decoder may still read and write what is in the table of a refused sequence: until it has acknowledged."""
    table = table_of(state, item) if item.valid else item.held.blocks.astype(np.intp)
    limbo = np.intersect1d(table, in_limbo(state))
    leave_limbo(state, limbo, NO_OWNER)
    if state.journal is not None:
        state.journal.given(limbo, session.session_id)
    listed = listed_part(state, item, table, item.held.sealed_tokens // state.block_tokens)
    listed = listed[listed > 0]
    state.pool.hold(listed)
    for run in (limbo, listed):
        if len(run):
            session.deferred.append(Deferred(state.revision, NO_LEASE, run.copy()))
