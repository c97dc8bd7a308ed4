"""Upkeep: what ends or drops many things at once. Detach, the end of a quarantine, eviction on demand, purge.

Invariants: a block that a process may still write is not free before that process is known to be gone; nothing that is
held is dropped from under its holder. Called by `manager.py`.
"""

from __future__ import annotations

import numpy as np

from cachemgr.blocks import NO_OWNER
from cachemgr.ids import SessionId, TenantId
from cachemgr.kept import end_all
from cachemgr.pins import end_expired_pins, end_pins
from cachemgr.results import DetachOutcome
from cachemgr.state import CacheState
from cachemgr.windows import unlist_passed
from common.errors import FailedPrecondition, InvalidArgument


def detach(state: CacheState, session: SessionId, *, process_dead: bool) -> DetachOutcome:
    """See `CacheManager.detach`."""
    ended = state.book.session(session)
    state.revision += 1
    state.waits.session_left(session)
    quarantine = not process_dead
    leases = list(ended.leases.values())
    loose = [run for lease in leases for run in state.end_lease(ended, lease, quarantine=quarantine)]
    loose += [state.let_go(item.blocks, quarantine=quarantine) for item in ended.deferred]
    loose.append(state.pool.unhold(np.array(sorted(ended.credit), np.intp), quarantine=quarantine))
    del state.book.sessions[session]
    blocks = np.concatenate(loose)
    state.pool.ownership.taint(blocks)  # it may not have got as far as zeroing them
    if quarantine and len(blocks):
        state.book.quarantine[session] = blocks
        state.events.add("blocks_quarantined", state.now_ns, session=session, blocks=blocks)
    state.events.add("session_ended", state.now_ns, session=session, leases=len(leases))
    return DetachOutcome(
        leases=len(leases),
        freed_blocks=0 if quarantine else len(blocks),
        quarantined_blocks=len(blocks) if quarantine else 0,
    )


def process_gone(state: CacheState, session: SessionId) -> int:
    """See `CacheManager.process_gone`."""
    blocks = state.book.quarantine.pop(session, None)
    if blocks is None:
        return 0
    state.revision += 1
    state.events.add("quarantine_released", state.now_ns, session=session, blocks=blocks)
    state.pool.end_quarantine(blocks)
    return len(blocks)


def evict(state: CacheState, num_blocks: int | None, tenant: TenantId | None, *, everything: bool) -> int:
    """See `CacheManager.evict`."""
    if num_blocks is not None and num_blocks < 1:
        raise InvalidArgument("num_blocks", f"is {num_blocks}; allowed is 1 and more")
    if num_blocks is None and tenant is None and not everything:
        raise InvalidArgument("all", "one of all, tenant and num_blocks must be set")
    state.refuse_while_frozen()
    if everything and (state.book.leases or state.pool.num_published > state.pool.num_cached):
        held = f"{len(state.book.leases)} leases and {len(state.kept)} kept conversations"
        raise FailedPrecondition(f"{held} hold blocks; nothing was dropped", reason="BLOCKS_IN_USE")
    state.revision += 1
    count = state.pool.num_cached if num_blocks is None else num_blocks
    if tenant is None:
        return state.evict(count, dict.fromkeys(range(1, len(state.tenant_names)), count), "operator")
    owner = state.known_owner(tenant)
    return state.evict(count, {owner: count}, "operator")


def purge(state: CacheState, tenant: TenantId) -> int:
    """See `CacheManager.purge`."""
    state.refuse_while_frozen()
    owner = state.known_owner(tenant)
    if owner == NO_OWNER:
        return 0
    state.revision += 1
    end_pins(state, owner)
    blocks, dropped = state.index.remove_owner(owner)
    state.forget_names(blocks)
    if state.journal is not None:
        state.journal.erase(blocks)
    state.note_unlisted(blocks, "purged")
    state.pool.unpublish(blocks)
    end_all(state, owner, dropped)
    for lease in state.book.leases.values():
        if lease.prefix_tree in dropped:
            lease.num_published = 0
        elif lease.owner == owner or lease.tree in dropped:
            lease.num_published = min(lease.num_published, lease.prefix_blocks)
        else:
            continue
        unlist_passed(lease)
        lease.cut_from_index()
        state.waits.leave(lease)
    state.pool.ownership.taint_owner(owner)
    state.recent.forget(owner)
    state.index.forest.ghosts.forget(owner)
    return len(blocks)


def expire(state: CacheState) -> None:
    """Ends pins and drops cached blocks whose time is over."""
    before = len(state.pins)
    end_expired_pins(state, state.now_ns)
    if state.expire() or len(state.pins) != before:
        state.revision += 1
