"""The admin service's messages: pages asked for, and views of the core as protobuf. Pure.

Invariant: only counts, ids, names and token numbers go out; never a token, a secret or a byte of keys and values.
Called by `admin.py` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from cachemgr import tenant_views, views
from cachemgr.blocks import BlockState
from cachemgr.tenant_keys import check_tenant_name
from common.errors import InvalidArgument
from tessera.admin.v1 import admin_pb2

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000
MAX_PAGE_TOKEN: Final = 2**63 - 1


_STATES: Final = {
    BlockState.FREE: admin_pb2.BLOCK_STATE_FREE,
    BlockState.ACTIVE: admin_pb2.BLOCK_STATE_ACTIVE,
    BlockState.CACHED: admin_pb2.BLOCK_STATE_CACHED,
    BlockState.QUARANTINED: admin_pb2.BLOCK_STATE_QUARANTINED,
}


class PageRequest(Protocol):
    """What every list request has."""

    @property
    def page_size(self) -> int: ...
    @property
    def page_token(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PageAsked:
    """A page: at most `limit` items after the id `after` (0 = from the first)."""

    after: int
    limit: int


def page_asked(request: PageRequest) -> PageAsked:
    """The page of a request. Raises InvalidArgument with the field that is wrong."""
    return PageAsked(_after(request.page_token), page_limit(request))


def page_limit(request: PageRequest) -> int:
    """The page size of a request. Raises InvalidArgument."""
    size = request.page_size
    if not 0 <= size <= MAX_PAGE:
        raise InvalidArgument("page_size", f"is {size}; allowed is 1..{MAX_PAGE}, or 0 for {DEFAULT_PAGE}")
    return size or DEFAULT_PAGE


def tenant_after(request: PageRequest) -> str:
    """The name after which a page of tenants begins. Raises InvalidArgument."""
    return check_tenant_name(request.page_token, "page_token") if request.page_token else ""


def next_token(next_after: int) -> str:
    """The token of the page after; empty where there is none."""
    return str(next_after) if next_after else ""


def state_asked(number: int) -> BlockState | None:
    """The state to filter for; None means any. Raises InvalidArgument."""
    if number == admin_pb2.BLOCK_STATE_UNSPECIFIED:
        return None
    try:
        return BlockState(number)  # the numbers are the same
    except ValueError:
        raise InvalidArgument("state", f"is {number}; allowed are the named states") from None


def snapshot_message(view: views.Snapshot, block_bytes: int) -> admin_pb2.GetSnapshotResponse:
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
        tenants=[
            admin_pb2.TenantUsage(
                tenant=usage.tenant,
                cached_blocks=usage.cached_blocks,
                active_blocks=usage.active_blocks,
                hits=usage.hits,
                misses=usage.misses,
                hit_tokens=usage.hit_tokens,
            )
            for usage in view.tenants
        ],
        indexed_blocks=view.indexed_blocks,
        credit_blocks=view.credit_blocks,
        block_tokens=view.block_tokens,
        block_bytes=block_bytes,
        hash_collisions=view.hash_collisions,
        queued_requests=view.queued_requests,
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
    )


def prefix_message(view: views.PrefixView) -> admin_pb2.Prefix:
    """One node of the index."""
    return admin_pb2.Prefix(
        node=view.node,
        parent=view.parent,
        tenant=view.tenant,
        start_token=view.start_token,
        num_tokens=view.num_tokens,
        blocks=view.blocks,
        references=view.references,
        name=view.name,
        children=view.children,
    )


def lease_message(view: views.LeaseView, now_ns: int) -> admin_pb2.Lease:
    """One lease; its age at `now_ns`."""
    return admin_pb2.Lease(
        lease=view.lease,
        session=view.session,
        tenant=view.tenant,
        request_id=view.request_id,
        sample=view.sample,
        num_blocks=len(view.blocks),
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
    )


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


def _after(token: str) -> int:
    if not token:
        return 0
    if not (token.isascii() and token.isdigit() and len(token) <= 19 and int(token) <= MAX_PAGE_TOKEN):
        raise InvalidArgument("page_token", "is none of ours; pass next_page_token of the page before, or nothing")
    return int(token)
