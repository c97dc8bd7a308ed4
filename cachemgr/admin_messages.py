"""The admin service's messages: views of the core and of tenants as protobuf. Pure.

Invariant: only counts, ids, names and token numbers go out; never a token, a secret or a byte of keys and values.
Called by the parts of the admin service.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cachemgr import tenant_views, views
from cachemgr.blocks import BlockState
from cachemgr.ids import TenantId
from cachemgr.scopes import PUBLIC_OWNER, group_of
from cachemgr.tenant_quotas import TenantQuota
from common.errors import InvalidArgument
from tessera.admin.v1 import admin_pb2
from tessera.common.v1 import common_pb2

_STATES: Final = {
    BlockState.FREE: admin_pb2.BLOCK_STATE_FREE,
    BlockState.ACTIVE: admin_pb2.BLOCK_STATE_ACTIVE,
    BlockState.CACHED: admin_pb2.BLOCK_STATE_CACHED,
    BlockState.QUARANTINED: admin_pb2.BLOCK_STATE_QUARANTINED,
}


def state_asked(number: int) -> BlockState | None:
    """The state to filter for; None means any. Raises InvalidArgument."""
    if number == admin_pb2.BLOCK_STATE_UNSPECIFIED:
        return None
    try:
        return BlockState(number)  # the numbers are the same
    except ValueError:
        raise InvalidArgument("state", f"is {number}; allowed are the named states") from None


def snapshot_message(
    view: views.Snapshot, block_bytes: int, window_block_bytes: int, quotas: Mapping[TenantId, TenantQuota]
) -> admin_pb2.GetSnapshotResponse:
    """All counters."""
    return admin_pb2.GetSnapshotResponse(
        total_blocks=view.total_blocks,
        usable_blocks=view.usable_blocks,
        free_blocks=view.free_blocks,
        cached_blocks=view.cached_blocks,
        active_blocks=view.active_blocks,
        quarantined_blocks=view.quarantined_blocks,
        leases=view.leases,
        sessions=view.sessions,
        hits=view.hits,
        misses=view.misses,
        hit_tokens=view.hit_tokens,
        cow_copies=view.cow_copies,
        evictions=view.evictions,
        preemptions=view.preemptions,
        generated_tokens=view.generated_tokens,
        epoch=view.epoch,
        revision=view.revision,
        tenants=[_usage_message(usage, quotas.get(usage.tenant, TenantQuota())) for usage in view.tenants],
        indexed_blocks=view.indexed_blocks,
        credit_blocks=view.credit_blocks,
        block_tokens=view.block_tokens,
        block_bytes=block_bytes,
        hash_collisions=view.hash_collisions,
        queued_requests=view.queued_requests,
        pinned_blocks=view.pinned_blocks,
        kept_branches=view.kept_branches,
        scrubbed_blocks=view.scrubbed_blocks,
        waits=view.waits,
        prompt_tokens=view.prompt_tokens,
        adopted_blocks=view.adopted_blocks,
        fenced_operations=view.fenced_operations,
        windows=_windows_message(view.windows, window_block_bytes),
    )


def _windows_message(view: views.WindowView | None, block_bytes: int) -> admin_pb2.WindowPool | None:
    if view is None:
        return None
    return admin_pb2.WindowPool(
        total_blocks=view.total_blocks,
        free_blocks=view.free_blocks,
        needed_blocks=view.needed_blocks,
        reclaimed_blocks=view.reclaimed_blocks,
        shortened_hits=view.shortened_hits,
        shortened_tokens=view.shortened_tokens,
        block_bytes=block_bytes,
    )


def _usage_message(usage: views.TenantView, quota: TenantQuota) -> admin_pb2.TenantUsage:
    return admin_pb2.TenantUsage(
        tenant=usage.tenant,
        cached_blocks=usage.cached_blocks,
        active_blocks=usage.active_blocks,
        hits=usage.hits,
        misses=usage.misses,
        hit_tokens=usage.hit_tokens,
        indexed_blocks=usage.indexed_blocks,
        used_blocks=usage.used_blocks,
        floor_blocks=quota.floor_blocks,
        ceiling_blocks=quota.ceiling_blocks,
        weight=quota.weight,
        pinned_blocks=usage.pinned_blocks,
        evictions=usage.evictions,
        kept_branches=usage.kept_branches,
    )


def block_message(view: views.BlockView) -> admin_pb2.Block:
    """One block."""
    return admin_pb2.Block(
        block=view.block,
        generation=view.generation,
        state=_STATES[view.state],
        references=view.references,
        published=view.published,
        tenant=view.tenant,
        evictable=view.evictable,
        num_tokens=view.num_tokens,
        pinned=view.pinned,
        window_block=view.window_block,
    )


def prefix_message(view: views.PrefixView, now_ns: int) -> admin_pb2.Prefix:
    """One node of the index; what is left of its time at `now_ns`."""
    group = group_of(view.tenant)
    scope = common_pb2.SCOPE_PUBLIC if view.tenant == PUBLIC_OWNER else common_pb2.SCOPE_PRIVATE
    message = admin_pb2.Prefix(
        node=view.node,
        parent=view.parent,
        tenant=view.tenant,
        start_token=view.start_token,
        num_tokens=view.num_tokens,
        blocks=view.blocks,
        references=view.references,
        name=view.name,
        children=view.children,
        priority=view.priority,
        pinned=view.pinned,
        scope=common_pb2.SCOPE_GROUP if group else scope,
        group=group,
    )
    if view.expires_ns is not None:
        message.expires_in_seconds = max(0, view.expires_ns - now_ns) / 1e9
    return message


def lease_message(view: views.LeaseView, now_ns: int) -> admin_pb2.Lease:
    """One lease; its age at `now_ns`."""
    return admin_pb2.Lease(
        lease=view.lease,
        session=view.session,
        tenant=view.tenant,
        request_id=view.request_id,
        sample=view.sample,
        num_blocks=len(view.blocks) - view.blocks.count(0),
        num_tokens=view.num_tokens,
        sealed_tokens=view.sealed_tokens,
        age_seconds=(now_ns - view.granted_ns) / 1e9,
        blocks=view.blocks,
        parent=view.parent,
    )


def session_message(view: views.SessionView, now_ns: int, *, mapped: bool) -> admin_pb2.Session:
    """One attached decoder; its age at `now_ns`."""
    return admin_pb2.Session(
        session=view.session,
        decoder_name=view.decoder_name,
        process_id=view.process_id,
        leases=view.leases,
        credit_blocks=view.credit_blocks,
        age_seconds=(now_ns - view.attached_ns) / 1e9,
        mapped=mapped,
        queued_requests=view.queued_requests,
        lease_seconds_left=max(0, view.deadline_ns - now_ns) / 1e9,
        away=view.away,
    )


def branch_message(view: views.BranchView, now_ns: int) -> admin_pb2.Branch:
    """One kept branch; what is left of it at `now_ns`."""
    return admin_pb2.Branch(
        branch=view.branch,
        tenant=view.tenant,
        num_tokens=view.num_tokens,
        num_blocks=view.num_blocks,
        references=view.references,
        expires_in_seconds=max(0, view.expires_ns - now_ns) / 1e9,
    )


def pin_message(view: views.PinView, now_ns: int) -> admin_pb2.Pin:
    """One pin; what is left of it at `now_ns`."""
    message = admin_pb2.Pin(pin=view.pin, tenant=view.tenant, num_tokens=view.num_tokens, num_blocks=view.num_blocks)
    if view.expires_ns is not None:
        message.expires_in_seconds = max(0, view.expires_ns - now_ns) / 1e9
    return message


def tenant_message(view: tenant_views.TenantView) -> admin_pb2.Tenant:
    """One tenant with its keys."""
    return admin_pb2.Tenant(
        tenant=view.tenant,
        created_unix_seconds=view.created_ns / 1e9,
        keys=[
            admin_pb2.Key(
                key_id=key.key_id,
                name=key.name,
                created_unix_seconds=key.created_ns / 1e9,
                expires_unix_seconds=(key.expires_ns or 0) / 1e9,
                last_used_unix_seconds=(key.last_used_ns or 0) / 1e9,
                revoked=key.revoked,
            )
            for key in view.keys
        ],
        floor_blocks=view.quota.floor_blocks,
        ceiling_blocks=view.quota.ceiling_blocks,
        weight=view.quota.weight,
        pin_blocks=view.quota.pin_blocks,
        groups=view.groups,
    )
