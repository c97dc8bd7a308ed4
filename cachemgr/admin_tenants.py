"""The admin service's part for tenants and their keys: made, changed, ended.

Invariant: the database is changed first, so that from then on nothing new begins under what was ended; only then are
requests aborted and blocks dropped. A key's text is in one answer and nowhere else.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from cachemgr.admin_base import AdminBase
from cachemgr.admin_messages import tenant_message
from cachemgr.admin_pages import named_page
from cachemgr.ids import TenantId
from cachemgr.tenant_keys import split_key
from cachemgr.tenant_quotas import QuotaChange
from common.errors import InvalidArgument
from tessera.admin.v1 import admin_pb2

MAX_KEY_ID_CHARACTERS: Final = 64
_LEASE_PAGE: Final = 1000

# Method names are those of the RPCs.
# ruff: noqa: N802


class TenantAdmin(AdminBase):
    """Tenants, keys and quotas."""

    async def CreateTenant(
        self, request: admin_pb2.CreateTenantRequest, _context: Any
    ) -> admin_pb2.CreateTenantResponse:
        """A new tenant with a secret of its own."""
        tenant = self._tenants.create_tenant(request.tenant, self._clocks.wall_ns())
        self._note("tenant_created", tenant=tenant)
        return admin_pb2.CreateTenantResponse(tenant=tenant)

    async def UpdateTenant(
        self, request: admin_pb2.UpdateTenantRequest, _context: Any
    ) -> admin_pb2.UpdateTenantResponse:
        """Change quotas, on disk and in the core."""
        change = QuotaChange(
            **{
                name: getattr(request, name)
                for name in ("floor_blocks", "ceiling_blocks", "weight", "pin_blocks")
                if request.HasField(name)
            }
        )
        quota = self._tenants.update_quota(request.tenant, change, self._owner.num_blocks)
        tenant = TenantId(request.tenant)
        self._owner.set_quota(tenant, quota)
        self._note(
            "tenant_updated",
            tenant=tenant,
            floor_blocks=quota.floor_blocks,
            ceiling_blocks=quota.ceiling_blocks,
            weight=quota.weight,
            pin_blocks=quota.pin_blocks,
        )
        return admin_pb2.UpdateTenantResponse()

    async def DeleteTenant(
        self, request: admin_pb2.DeleteTenantRequest, _context: Any
    ) -> admin_pb2.DeleteTenantResponse:
        """End a tenant: its keys and its grants at once, then its requests, then all that the index lists of it."""
        self._owner.succession.refuse_others()
        tenant = self._tenants.delete_tenant(request.tenant)
        evicted = self._purge(tenant)
        requests = self._requests_of(tenant)
        self._owner.set_quota(tenant, None)
        self._note("tenant_deleted", tenant=tenant, blocks_purged=evicted, requests=len(requests))
        # Last, since a tenant of this name may be made meanwhile, and the caller may go.
        await asyncio.gather(*(self._sessions.abort(request_id) for request_id in requests))
        return admin_pb2.DeleteTenantResponse(evicted_blocks=evicted)

    async def ListTenants(self, request: admin_pb2.ListTenantsRequest, _context: Any) -> admin_pb2.ListTenantsResponse:
        """A page of tenants by name."""
        found, more = named_page(request, self._tenants.list_tenants, lambda view: view.tenant)
        return admin_pb2.ListTenantsResponse(tenants=map(tenant_message, found), next_page_token=more)

    async def CreateKey(self, request: admin_pb2.CreateKeyRequest, _context: Any) -> admin_pb2.CreateKeyResponse:
        """A new key; this answer is the only place where it is shown."""
        ttl = request.ttl_seconds if request.HasField("ttl_seconds") else None
        key_id, text = self._tenants.create_key(request.tenant, request.name, ttl, self._clocks.wall_ns())
        self._note("key_created", tenant=request.tenant, key_id=key_id)
        return admin_pb2.CreateKeyResponse(key_id=key_id, key=text)

    async def RevokeKey(self, request: admin_pb2.RevokeKeyRequest, _context: Any) -> admin_pb2.RevokeKeyResponse:
        """End a key at once: for new requests, and for grants that it was given before."""
        if not 1 <= len(request.key_id) <= MAX_KEY_ID_CHARACTERS:
            raise InvalidArgument("key_id", f"allowed are 1..{MAX_KEY_ID_CHARACTERS} characters")
        if (parts := split_key(request.key_id)) is not None:
            raise InvalidArgument("key_id", f"is a whole key; its id is {parts[0]}")
        tenant = self._tenants.revoke_key(request.key_id)
        self._note("key_revoked", tenant=tenant, key_id=request.key_id)
        return admin_pb2.RevokeKeyResponse()

    async def RotateTenantSecret(
        self, request: admin_pb2.RotateTenantSecretRequest, _context: Any
    ) -> admin_pb2.RotateTenantSecretResponse:
        """A new secret, so that no root of before is ever derived again, and the old tree dropped."""
        self._owner.succession.refuse_others()
        tenant = self._tenants.rotate_secret(request.tenant)
        evicted = self._purge(tenant)
        self._tenants.purged(tenant)
        self._note("secret_rotated", tenant=tenant, blocks_purged=evicted)
        return admin_pb2.RotateTenantSecretResponse(evicted_blocks=evicted)

    def _purge(self, tenant: TenantId) -> int:
        manager = self._manager_now()
        return 0 if manager is None else manager.purge(tenant)

    def _requests_of(self, tenant: TenantId) -> list[str]:
        """The requests that hold leases for a tenant."""
        manager = self._owner.manager
        found: set[str] = set()
        after = 0
        while manager is not None:
            page = manager.list_leases(after, _LEASE_PAGE)
            found.update(view.request_id for view in page.items if view.tenant == tenant)
            after = page.next_after
            if not after:
                break
        return sorted(found)
