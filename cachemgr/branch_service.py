"""`BranchService`: what a tenant does to kept conversations through its gateway: fork, cut back, drop.

Invariant: the tenant is that of the verified grant; a branch of another tenant is NOT_FOUND in the words of one that
never was; one that was begun in a group that its tenant left can only be dropped. Thin: it checks fields and converts;
the manager decides. On the daemon's one event loop; it logs no handle.
"""

from __future__ import annotations

from typing import Any, Final

from cachemgr.clocks import Clocks
from cachemgr.grants import GrantSigner
from cachemgr.handles import Handles, keep_ns
from cachemgr.ids import TenantId
from cachemgr.manager import CacheManager
from cachemgr.pool_owner import PoolOwner
from cachemgr.scopes import check_owner
from cachemgr.tenants import Tenants
from common.errors import InvalidArgument, NotFound
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc

BRANCH_SERVICE: Final = cache_pb2.DESCRIPTOR.services_by_name["BranchService"].full_name
MAX_FORKS: Final = 16


class BranchService(cache_pb2_grpc.BranchServiceServicer):
    """Kept branches by handle."""

    def __init__(
        self, *, owner: PoolOwner, tenants: Tenants, signer: GrantSigner, handles: Handles, clocks: Clocks
    ) -> None:
        self._owner = owner
        self._tenants = tenants
        self._signer = signer
        self._handles = handles
        self._clocks = clocks

    async def ForkBranch(  # noqa: N802 - the name of the RPC
        self, request: cache_pb2.ForkBranchRequest, _context: Any
    ) -> cache_pb2.ForkBranchResponse:
        """More handles of one branch."""
        tenant = self._tenant(request.grant)
        if not 1 <= request.count <= MAX_FORKS:
            raise InvalidArgument("count", f"is {request.count}; allowed are 1..{MAX_FORKS}")
        ttl_ns = keep_ns("ttl_seconds", request.ttl_seconds)
        name = self._handles.name_of(request.handle)
        self._check_scope(tenant, name)
        drawn = [self._handles.draw() for _ in range(request.count)]
        num_tokens = self._manager().fork_kept(
            tenant, name, [new for _, new in drawn], ttl_ns=ttl_ns, now_ns=self._clocks.steady_ns()
        )
        return cache_pb2.ForkBranchResponse(handles=[handle for handle, _ in drawn], num_tokens=num_tokens)

    async def RollbackBranch(  # noqa: N802 - the name of the RPC
        self, request: cache_pb2.RollbackBranchRequest, _context: Any
    ) -> cache_pb2.RollbackBranchResponse:
        """Cut a branch back to its first tokens."""
        tenant = self._tenant(request.grant)
        name = self._handles.name_of(request.handle)
        self._check_scope(tenant, name)
        self._manager().rollback_kept(tenant, name, request.num_tokens, now_ns=self._clocks.steady_ns())
        return cache_pb2.RollbackBranchResponse()

    async def DropBranch(  # noqa: N802 - the name of the RPC
        self, request: cache_pb2.DropBranchRequest, _context: Any
    ) -> cache_pb2.DropBranchResponse:
        """End a branch."""
        tenant = self._tenant(request.grant)
        name = self._handles.name_of(request.handle)
        self._manager().drop_kept(tenant, name, now_ns=self._clocks.steady_ns())
        return cache_pb2.DropBranchResponse()

    def _check_scope(self, tenant: TenantId, name: bytes) -> None:
        """Whether a branch's scope is still the tenant's to use. Raises NotFound, PermissionDenied."""
        owner = self._manager().kept_scope(tenant, name, now_ns=self._clocks.steady_ns())
        check_owner(self._tenants, tenant, owner)

    def _tenant(self, grant: bytes) -> TenantId:
        """Whose grant it is. Raises Unauthenticated; also where its key is over."""
        found = self._signer.verify(grant, self._clocks.steady_ns())
        self._tenants.check_key(found.tenant, found.key_id, self._clocks.wall_ns())
        return found.tenant

    def _manager(self) -> CacheManager:
        if self._owner.manager is None:  # no decoder has attached: nothing is kept
            raise NotFound("there is no such kept conversation; it may have expired", reason="BRANCH_NOT_FOUND")
        return self._owner.manager
