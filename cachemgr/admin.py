"""AdminService: what operators see and do. Thin: it validates, asks the manager or the tenants, and converts.

Invariant: nothing is half done: a call that is refused changed nothing, and an eviction never reports success with
entries left that it was asked to drop. Its credential is checked before any method is reached. It never shows prompt
text, secrets or bytes of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from cachemgr.admin_messages import (
    block_message,
    lease_message,
    next_token,
    page_asked,
    page_limit,
    prefix_message,
    session_message,
    snapshot_message,
    state_asked,
    tenant_after,
    tenant_message,
)
from cachemgr.clocks import Clocks
from cachemgr.ids import TenantId
from cachemgr.manager import CacheManager
from cachemgr.pool_owner import PoolOwner
from cachemgr.sessions import Sessions
from cachemgr.tenant_keys import check_tenant_name
from cachemgr.tenants import Tenants
from common.errors import FailedPrecondition, InvalidArgument, NotFound, Unimplemented
from common.logs import get_logger
from tessera.admin.v1 import admin_pb2, admin_pb2_grpc

ADMIN_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
MAX_REQUEST_ID_CHARACTERS: Final = 128
MAX_KEY_ID_CHARACTERS: Final = 64
_COUNT_PAGE: Final = 1000

# Method names are those of the RPCs.
# ruff: noqa: N802


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """The operator's view of one daemon."""

    def __init__(self, *, owner: PoolOwner, sessions: Sessions, tenants: Tenants, clocks: Clocks) -> None:
        self._owner = owner
        self._sessions = sessions
        self._tenants = tenants
        self._clocks = clocks
        self._log = get_logger()

    async def GetSnapshot(self, _request: admin_pb2.GetSnapshotRequest, _context: Any) -> admin_pb2.GetSnapshotResponse:
        """All counters; zeros but for the epoch before the first decoder has attached."""
        manager, layout = self._owner.manager, self._owner.layout
        if manager is None or layout is None:
            return admin_pb2.GetSnapshotResponse(epoch=self._owner.epoch)
        return snapshot_message(manager.snapshot(), layout.block_bytes)

    async def CheckIntegrity(
        self, _request: admin_pb2.CheckIntegrityRequest, _context: Any
    ) -> admin_pb2.CheckIntegrityResponse:
        """Every invariant; what is broken is also logged."""
        manager = self._owner.manager
        violations = [] if manager is None else manager.check_integrity()
        if violations:
            self._log.error("integrity_violated", violations=len(violations), first=violations[0])
        return admin_pb2.CheckIntegrityResponse(
            ok=not violations, violations=violations, checked_blocks=self._owner.num_blocks
        )

    async def ListBlocks(self, request: admin_pb2.ListBlocksRequest, _context: Any) -> admin_pb2.ListBlocksResponse:
        """A page of blocks by number."""
        page, state, manager = page_asked(request), state_asked(request.state), self._owner.manager
        if manager is None:
            return admin_pb2.ListBlocksResponse()
        found = manager.list_blocks(page.after, page.limit, state)
        return admin_pb2.ListBlocksResponse(
            blocks=map(block_message, found.items), next_page_token=next_token(found.next_after)
        )

    async def ListPrefixes(
        self, request: admin_pb2.ListPrefixesRequest, _context: Any
    ) -> admin_pb2.ListPrefixesResponse:
        """A page of index nodes, parents before children."""
        page, manager = page_asked(request), self._owner.manager
        tenant = self._tenant_asked(request.tenant)
        if manager is None:
            return admin_pb2.ListPrefixesResponse()
        found = manager.list_prefixes(page.after, page.limit, tenant)
        return admin_pb2.ListPrefixesResponse(
            prefixes=map(prefix_message, found.items), next_page_token=next_token(found.next_after)
        )

    async def ListLeases(self, request: admin_pb2.ListLeasesRequest, _context: Any) -> admin_pb2.ListLeasesResponse:
        """A page of leases by id."""
        page, manager, now = page_asked(request), self._owner.manager, self._clocks.steady_ns()
        if manager is None:
            return admin_pb2.ListLeasesResponse()
        found = manager.list_leases(page.after, page.limit)
        return admin_pb2.ListLeasesResponse(
            leases=[lease_message(view, now) for view in found.items], next_page_token=next_token(found.next_after)
        )

    async def ListSessions(
        self, request: admin_pb2.ListSessionsRequest, _context: Any
    ) -> admin_pb2.ListSessionsResponse:
        """A page of attached decoders by session id."""
        page, manager, now = page_asked(request), self._owner.manager, self._clocks.steady_ns()
        if manager is None:
            return admin_pb2.ListSessionsResponse()
        found = manager.list_sessions(page.after, page.limit)
        sessions = [
            session_message(view, now, mapped=self._sessions.is_mapped(view.process_id)) for view in found.items
        ]
        return admin_pb2.ListSessionsResponse(sessions=sessions, next_page_token=next_token(found.next_after))

    async def EvictBlocks(self, request: admin_pb2.EvictBlocksRequest, _context: Any) -> admin_pb2.EvictBlocksResponse:
        """Drop cached blocks: all of the pool, or of a tenant, or a number of either."""
        if request.all and (request.tenant or request.num_blocks):
            raise InvalidArgument("all", "excludes tenant and num_blocks; a tenant alone means all of that tenant")
        if not (request.all or request.tenant or request.num_blocks):
            raise InvalidArgument("all", "one of all, tenant and num_blocks must be set")
        tenant, manager = self._tenant_asked(request.tenant), self._owner.manager
        if manager is None:
            return admin_pb2.EvictBlocksResponse()
        if request.all:
            _refuse_in_use(manager)
        evicted = manager.evict(num_blocks=request.num_blocks or None, tenant=tenant, everything=request.all)
        remaining = _indexed_blocks(manager, tenant)
        self._log.info("blocks_evicted", blocks=evicted, remaining=remaining, tenant=tenant)
        return admin_pb2.EvictBlocksResponse(evicted_blocks=evicted, remaining_blocks=remaining)

    async def AbortRequest(
        self, request: admin_pb2.AbortRequestRequest, _context: Any
    ) -> admin_pb2.AbortRequestResponse:
        """End a request on whichever decoder has it."""
        if not 1 <= len(request.request_id) <= MAX_REQUEST_ID_CHARACTERS:
            raise InvalidArgument("request_id", f"allowed are 1..{MAX_REQUEST_ID_CHARACTERS} characters")
        if not await self._sessions.abort(request.request_id):
            raise NotFound("no decoder knows this request")
        self._log.info("request_aborted", request_id=request.request_id)
        return admin_pb2.AbortRequestResponse()

    async def CreateTenant(
        self, request: admin_pb2.CreateTenantRequest, _context: Any
    ) -> admin_pb2.CreateTenantResponse:
        """A new tenant with a secret of its own."""
        tenant = self._tenants.create_tenant(request.tenant, self._clocks.wall_ns())
        self._log.info("tenant_created", tenant=tenant)
        return admin_pb2.CreateTenantResponse(tenant=tenant)

    async def ListTenants(self, request: admin_pb2.ListTenantsRequest, _context: Any) -> admin_pb2.ListTenantsResponse:
        """A page of tenants by name."""
        limit = page_limit(request)
        found = self._tenants.list_tenants(tenant_after(request), limit + 1)
        more = found[limit - 1].tenant if len(found) > limit else ""
        return admin_pb2.ListTenantsResponse(tenants=map(tenant_message, found[:limit]), next_page_token=more)

    async def CreateKey(self, request: admin_pb2.CreateKeyRequest, _context: Any) -> admin_pb2.CreateKeyResponse:
        """A new key; this answer is the only place where it is shown."""
        ttl = request.ttl_seconds if request.HasField("ttl_seconds") else None
        key_id, text = self._tenants.create_key(request.tenant, request.name, ttl, self._clocks.wall_ns())
        self._log.info("key_created", tenant=request.tenant, key_id=key_id)
        return admin_pb2.CreateKeyResponse(key_id=key_id, key=text)

    async def RevokeKey(self, request: admin_pb2.RevokeKeyRequest, _context: Any) -> admin_pb2.RevokeKeyResponse:
        """End a key at once: for new requests, and for grants that it was given before."""
        if not 1 <= len(request.key_id) <= MAX_KEY_ID_CHARACTERS:
            raise InvalidArgument("key_id", f"allowed are 1..{MAX_KEY_ID_CHARACTERS} characters")
        tenant = self._tenants.revoke_key(request.key_id)
        self._log.info("key_revoked", tenant=tenant, key_id=request.key_id)
        return admin_pb2.RevokeKeyResponse()

    def _tenant_asked(self, name: str) -> TenantId | None:
        """The tenant of a filter; None means all. Raises InvalidArgument or NotFound."""
        if not name:
            return None
        tenant = check_tenant_name(name)
        if not self._tenants.has_tenant(tenant):
            raise NotFound("there is no such tenant")
        return tenant


def _indexed_blocks(manager: CacheManager, tenant: TenantId | None) -> int:
    """Published blocks, held or not, of a tenant or of all."""
    if tenant is None:
        return manager.snapshot().indexed_blocks
    count, after = 0, 0
    while True:
        page = manager.list_prefixes(after, _COUNT_PAGE, tenant)
        count += sum(len(view.blocks) for view in page.items)
        if not page.next_after:
            return count
        after = page.next_after


def _refuse_in_use(manager: CacheManager) -> None:
    """Raises FailedPrecondition, with numbers, while leases hold blocks."""
    now = manager.snapshot()
    if now.leases:
        held = now.active_blocks - now.credit_blocks
        raise FailedPrecondition(
            f"{now.leases} leases hold {held} blocks; nothing was dropped",
            reason="BLOCKS_IN_USE",
            metadata={"leases": str(now.leases), "held_blocks": str(held), "indexed_blocks": str(now.indexed_blocks)},
        )


def _not_served(method: str) -> Callable[..., Any]:
    async def refuse(*_: Any) -> NoReturn:
        raise Unimplemented(f"AdminService.{method} is not served by this build", metadata={"method": method})

    return refuse


for _method in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods:
    if _method.name not in AdminService.__dict__:
        setattr(AdminService, _method.name, _not_served(_method.name))
