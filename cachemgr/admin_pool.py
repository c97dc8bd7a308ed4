"""The admin service's part for the pool: counters, lists, integrity, eviction, drain, abort.

Invariant: an eviction never reports success with entries left that it was asked to drop; a drain refuses new leases
until it is resumed, and says how it ended. It shows counts, ids and names, never tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final

from cachemgr.admin_base import AdminBase, seconds_asked
from cachemgr.admin_messages import (
    block_message,
    lease_message,
    prefix_message,
    session_message,
    snapshot_message,
    state_asked,
)
from cachemgr.admin_pages import next_token, page_asked
from cachemgr.ids import TenantId
from cachemgr.manager import CacheManager
from common.errors import FailedPrecondition, InvalidArgument, NotFound
from tessera.admin.v1 import admin_pb2

MAX_REQUEST_ID_CHARACTERS: Final = 128
DRAIN_SECONDS: Final = 30.0
MAX_DRAIN_SECONDS: Final = 86_400.0
DRAIN_POLL_SECONDS: Final = 0.02
_COUNT_PAGE: Final = 1000

# Method names are those of the RPCs.
# ruff: noqa: N802


class PoolAdmin(AdminBase):
    """Counters, lists and what is done to the whole pool."""

    async def GetSnapshot(self, _request: admin_pb2.GetSnapshotRequest, _context: Any) -> admin_pb2.GetSnapshotResponse:
        """All counters; zeros but for the epoch before the first decoder has attached."""
        manager, layout = self._owner.manager, self._owner.layout
        if manager is None or layout is None:
            return admin_pb2.GetSnapshotResponse(epoch=self._owner.epoch)
        view = manager.snapshot()
        window_bytes = layout.window_group.block_bytes if layout.grouped else 0
        shown = [usage for usage in view.tenants if usage.used_blocks or self._tenants.owns_blocks(usage.tenant)]
        return snapshot_message(replace(view, tenants=shown), layout.block_bytes, window_bytes, self._tenants.quotas())

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
        now = self._clocks.steady_ns()
        return admin_pb2.ListPrefixesResponse(
            prefixes=[prefix_message(view, now) for view in found.items], next_page_token=next_token(found.next_after)
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
        tenant, manager = self._tenant_asked(request.tenant), self._manager_now()
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
            raise NotFound("no decoder knows this request", reason="REQUEST_NOT_FOUND")
        self._log.info("request_aborted", request_id=request.request_id)
        return admin_pb2.AbortRequestResponse()

    async def DrainPool(self, request: admin_pb2.DrainPoolRequest, _context: Any) -> admin_pb2.DrainPoolResponse:
        """Refuse new leases and wait until none is held, or end that. A caller that goes away leaves it as it is."""
        seconds = DRAIN_SECONDS
        if request.timeout_seconds != 0:
            seconds = seconds_asked("timeout_seconds", request.timeout_seconds, most=MAX_DRAIN_SECONDS)
        if request.resume:
            if self._owner.drained:
                self._note("drain_ended")
            self._owner.drained = False
            return admin_pb2.DrainPoolResponse(drained=not self._leases(), leases=self._leases())
        if not self._owner.drained:
            self._note("drain_begun")
        self._owner.drained = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self._leases() and self._owner.drained and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        return admin_pb2.DrainPoolResponse(drained=not self._leases(), leases=self._leases())

    def _leases(self) -> int:
        return 0 if self._owner.manager is None else self._owner.manager.num_leases


def _indexed_blocks(manager: CacheManager, tenant: TenantId | None) -> int:
    """Published blocks, held or not, of a tenant or of all."""
    if tenant is None:
        return manager.snapshot().indexed_blocks
    count, after = 0, 0
    while True:
        page = manager.list_prefixes(after, _COUNT_PAGE, tenant)
        count += sum(len(view.blocks) - view.blocks.count(0) for view in page.items)
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
