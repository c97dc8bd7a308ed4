"""The admin service's part for prefixes: pins, priorities, kept branches, and how well the cache does.

Invariant: looking changes nothing, recency neither. A replay of admissions runs beside the event loop, one at a time.
The tree to look in is derived here from the tenant's secret and a cache key, as for a request of the tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Final

from cachemgr.admin_base import AdminBase, seconds_asked, tokens_asked
from cachemgr.admin_messages import branch_message, pin_message
from cachemgr.admin_pages import next_token, page_asked
from cachemgr.hit_limits import HitLimits, hit_limits
from cachemgr.ids import TenantId
from cachemgr.key_book import NO_KEY
from cachemgr.keys import CacheKey, derive_root
from cachemgr.manager import CacheManager
from cachemgr.operations import MAX_PRIORITY, cache_key_of
from cachemgr.results import ScopeSpan
from cachemgr.scopes import resolve_prefix
from common.errors import InvalidArgument, NotFound
from tessera.admin.v1 import admin_pb2

MAX_NUMBER: Final = 2**63 - 1
SHORT_TURN_SECONDS: Final = 0.0002

# Method names are those of the RPCs.
# ruff: noqa: N802


class PrefixAdmin(AdminBase):
    """Pins, kept branches and limits of the hit rate."""

    _replaying: asyncio.Lock | None = None

    async def PinPrefix(self, request: admin_pb2.PinPrefixRequest, _context: Any) -> admin_pb2.PinPrefixResponse:
        """Keep what is resident of a prefix from eviction."""
        tokens = tokens_asked(request.token_ids)
        ttl_ns: int | None = None
        if request.HasField("ttl_seconds"):
            ttl_ns = int(seconds_asked("ttl_seconds", request.ttl_seconds) * 1e9) or 1
        tenant, root, prefix, manager = self._tree(request, tokens)
        view = manager.pin(
            tenant, root=root, tokens=tokens, now_ns=self._clocks.steady_ns(), ttl_ns=ttl_ns, prefix=prefix
        )
        self._log.info("prefix_pinned", tenant=tenant, pin=view.pin, num_blocks=view.num_blocks)
        return admin_pb2.PinPrefixResponse(pin=view.pin, pinned_tokens=view.num_tokens, pinned_blocks=view.num_blocks)

    async def UnpinPrefix(self, request: admin_pb2.UnpinPrefixRequest, _context: Any) -> admin_pb2.UnpinPrefixResponse:
        """End a pin."""
        if not 1 <= request.pin <= MAX_NUMBER:
            raise InvalidArgument("pin", f"is {request.pin}; allowed is 1..{MAX_NUMBER}")
        manager = self._manager_now()
        if manager is None:
            raise NotFound("there is no such pin", reason="PIN_NOT_FOUND")
        manager.unpin(request.pin)
        self._log.info("prefix_unpinned", pin=request.pin)
        return admin_pb2.UnpinPrefixResponse()

    async def ListPins(self, request: admin_pb2.ListPinsRequest, _context: Any) -> admin_pb2.ListPinsResponse:
        """A page of pins by id."""
        page, manager, now = page_asked(request), self._owner.manager, self._clocks.steady_ns()
        if manager is None:
            return admin_pb2.ListPinsResponse()
        found = manager.list_pins(page.after, page.limit)
        return admin_pb2.ListPinsResponse(
            pins=[pin_message(view, now) for view in found.items], next_page_token=next_token(found.next_after)
        )

    async def SetPriority(self, request: admin_pb2.SetPriorityRequest, _context: Any) -> admin_pb2.SetPriorityResponse:
        """Change the priority of what is resident of a prefix."""
        tokens = tokens_asked(request.token_ids)
        if request.priority > MAX_PRIORITY:
            raise InvalidArgument("priority", f"is {request.priority}; allowed is 0..{MAX_PRIORITY}")
        tenant, root, prefix, manager = self._tree(request, tokens)
        changed = manager.set_priority(tenant, root=root, tokens=tokens, priority=request.priority, prefix=prefix)
        self._note("priority_set", tenant=tenant, priority=request.priority, num_tokens=changed)
        return admin_pb2.SetPriorityResponse(changed_tokens=changed)

    async def ListBranches(
        self, request: admin_pb2.ListBranchesRequest, _context: Any
    ) -> admin_pb2.ListBranchesResponse:
        """A page of kept branches by number; their handles are never shown."""
        page, manager, now = page_asked(request), self._owner.manager, self._clocks.steady_ns()
        if manager is None:
            return admin_pb2.ListBranchesResponse()
        found = manager.list_branches(page.after, page.limit)
        return admin_pb2.ListBranchesResponse(
            branches=[branch_message(view, now) for view in found.items], next_page_token=next_token(found.next_after)
        )

    async def DropBranch(self, request: admin_pb2.DropBranchRequest, _context: Any) -> admin_pb2.DropBranchResponse:
        """End a kept branch by its number."""
        if not 1 <= request.branch <= MAX_NUMBER:
            raise InvalidArgument("branch", f"is {request.branch}; allowed is 1..{MAX_NUMBER}")
        manager = self._manager_now()
        if manager is None:
            raise NotFound("there is no kept conversation of this number", reason="BRANCH_NOT_FOUND")
        tenant = manager.drop_numbered_kept(request.branch)
        self._log.info("branch_dropped", tenant=tenant, branch=request.branch)
        return admin_pb2.DropBranchResponse()

    async def GetHitRateLimits(
        self, _request: admin_pb2.GetHitRateLimitsRequest, _context: Any
    ) -> admin_pb2.GetHitRateLimitsResponse:
        """Replay the recent admissions."""
        limits = HitLimits()
        manager, layout = self._owner.manager, self._owner.layout
        if manager is not None and layout is not None:
            if self._replaying is None:
                self._replaying = asyncio.Lock()
            async with self._replaying:
                admissions = manager.recent.copy()
                with _short_turns():  # a replay of a second shall delay no decoder by more than its turn
                    limits = await asyncio.to_thread(
                        hit_limits, admissions, self._owner.num_blocks, layout.block_tokens
                    )
        return admin_pb2.GetHitRateLimitsResponse(
            admissions=limits.admissions,
            hit_rate=limits.hit,
            best_hit_rate=limits.best,
            infinite_hit_rate=limits.infinite,
        )

    def _tree(
        self, request: admin_pb2.PinPrefixRequest | admin_pb2.SetPriorityRequest, tokens: bytes
    ) -> tuple[TenantId, bytes, ScopeSpan | None, CacheManager]:
        """Tenant, root, wider scope and manager of a request. Raises InvalidArgument; NotFound where nothing can be
        resident; PermissionDenied for a scope that the tenant may not name."""
        tenant = self._known_tenant(request.tenant)
        key = self._key(tenant, request)
        manager = self._manager_now()
        if manager is None:
            raise NotFound("nothing of this prefix is resident: no decoder has attached yet")
        prefix = None
        if request.HasField("prefix"):
            prefix = resolve_prefix(self._tenants, tenant, key, request.prefix, tokens, "prefix")
        return tenant, derive_root(self._tenants.secret(tenant), key), prefix, manager

    def _key(self, tenant: TenantId, request: admin_pb2.PinPrefixRequest | admin_pb2.SetPriorityRequest) -> CacheKey:
        """The key that is meant. Raises InvalidArgument; NotFound where none is given and the tenant used none yet."""
        if request.HasField("key"):
            return cache_key_of(request.key, "key")
        last = self._tenants.seen_keys.last(tenant)
        if last is None:
            raise NotFound(f"key: not given, and {NO_KEY}")
        return last


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Meanwhile a thread gives the interpreter up after so long when another one asks for it."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, SHORT_TURN_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
