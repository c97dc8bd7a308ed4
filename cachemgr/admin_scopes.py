"""The admin service's part for scopes that are wider than a tenant: groups, and approved prefixes of the public scope.

Invariant: the database is changed first, so that from then on nobody is served from what was ended; then its blocks are
dropped. Of an approval only a name, a length and a digest are kept, and nothing else is ever shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from cachemgr.admin_base import AdminBase, tokens_asked
from cachemgr.admin_pages import named_page
from cachemgr.ids import TenantId
from cachemgr.scopes import PUBLIC_OWNER, group_owner
from cachemgr.tenant_groups import GroupView
from cachemgr.tenant_keys import check_tenant_name
from cachemgr.tenant_rows import ApprovalRow
from common.errors import InvalidArgument, NotFound
from tessera.admin.v1 import admin_pb2

MAX_MEMBERS: Final = 10_000

# Method names are those of the RPCs.
# ruff: noqa: N802


class ScopeAdmin(AdminBase):
    """Groups and approvals."""

    async def CreateGroup(self, request: admin_pb2.CreateGroupRequest, _context: Any) -> admin_pb2.CreateGroupResponse:
        """A new group with a secret of its own."""
        members = self._members("tenants", request.tenants)
        self._tenants.groups.create(request.group, members, self._clocks.wall_ns())
        self._note("group_created", group=request.group, members=len(members))
        return admin_pb2.CreateGroupResponse()

    async def UpdateGroup(self, request: admin_pb2.UpdateGroupRequest, _context: Any) -> admin_pb2.UpdateGroupResponse:
        """Other members; who is removed reaches nothing of the group from now on."""
        if not (request.add_tenants or request.remove_tenants):
            raise InvalidArgument("add_tenants", "or remove_tenants must name a tenant")
        added = self._members("add_tenants", request.add_tenants)
        removed = [check_tenant_name(name, "remove_tenants") for name in request.remove_tenants]
        if set(added) & set(removed):
            raise InvalidArgument("remove_tenants", "names a tenant that add_tenants names too")
        self._tenants.groups.update(request.group, added, removed)
        self._note("group_updated", group=request.group, added=len(added), removed=len(removed))
        return admin_pb2.UpdateGroupResponse()

    async def DeleteGroup(self, request: admin_pb2.DeleteGroupRequest, _context: Any) -> admin_pb2.DeleteGroupResponse:
        """End a group and drop what lies in its scope, with the private tails below it."""
        self._owner.succession.refuse_others()
        owner = group_owner(self._tenants, request.group)
        self._tenants.groups.delete(request.group)
        evicted = self._purge_scope(owner)
        self._note("group_deleted", group=request.group, blocks_purged=evicted)
        return admin_pb2.DeleteGroupResponse(evicted_blocks=evicted)

    async def ListGroups(self, request: admin_pb2.ListGroupsRequest, _context: Any) -> admin_pb2.ListGroupsResponse:
        """A page of groups by name."""
        found, more = named_page(request, self._tenants.groups.list_groups, lambda view: view.group)
        return admin_pb2.ListGroupsResponse(groups=map(_group_message, found), next_page_token=more)

    async def ApprovePrefix(
        self, request: admin_pb2.ApprovePrefixRequest, _context: Any
    ) -> admin_pb2.ApprovePrefixResponse:
        """Let every tenant share exactly these tokens."""
        tokens = tokens_asked(request.token_ids)
        count = self._tenants.approvals.approve(request.name, tokens, self._clocks.wall_ns())
        self._note("prefix_approved", approval=request.name, num_tokens=count)
        return admin_pb2.ApprovePrefixResponse(num_tokens=count)

    async def WithdrawPrefix(
        self, request: admin_pb2.WithdrawPrefixRequest, _context: Any
    ) -> admin_pb2.WithdrawPrefixResponse:
        """End an approval and drop what no other one covers."""
        self._owner.succession.refuse_others()
        withdrawn = self._tenants.approvals.withdraw(request.name)
        manager, evicted = self._manager_now(), 0
        if manager is not None:
            remaining = self._tenants.approvals.remaining(withdrawn, manager.block_tokens)
            evicted = manager.prune(PUBLIC_OWNER, remaining)
        self._tenants.purged(PUBLIC_OWNER)
        self._note("prefix_withdrawn", approval=request.name, blocks_purged=evicted)
        return admin_pb2.WithdrawPrefixResponse(evicted_blocks=evicted)

    async def ListApprovedPrefixes(
        self, request: admin_pb2.ListApprovedPrefixesRequest, _context: Any
    ) -> admin_pb2.ListApprovedPrefixesResponse:
        """A page of approvals by name."""
        found, more = named_page(request, self._tenants.approvals.list_approvals, lambda row: row.name)
        return admin_pb2.ListApprovedPrefixesResponse(prefixes=map(_approval_message, found), next_page_token=more)

    def _members(self, field: str, names: Sequence[str]) -> list[TenantId]:
        """Tenants that exist. Raises InvalidArgument or NotFound."""
        if len(names) > MAX_MEMBERS:
            raise InvalidArgument(field, f"has {len(names)} entries; allowed are {MAX_MEMBERS}")
        members = [check_tenant_name(name, field) for name in names]
        missing = [tenant for tenant in members if not self._tenants.has_tenant(tenant)]
        if missing:
            raise NotFound(f"{field}: there is no tenant {missing[0]}", reason="TENANT_NOT_FOUND")
        return members

    def _purge_scope(self, owner: TenantId) -> int:
        manager = self._manager_now()
        return 0 if manager is None else manager.purge(owner)


def _group_message(view: GroupView) -> admin_pb2.Group:
    return admin_pb2.Group(group=view.group, tenants=view.tenants, created_unix_seconds=view.created_ns / 1e9)


def _approval_message(row: ApprovalRow) -> admin_pb2.ApprovedPrefix:
    return admin_pb2.ApprovedPrefix(name=row.name, num_tokens=row.num_tokens, created_unix_seconds=row.created_ns / 1e9)
