"""Groups: named sets of tenants that may share a scope, made by operators.

Invariant: who is not a member reaches nothing of a group from that moment on, and a group's secret never leaves the
daemon; a group that is made again under an old name has another id and another secret. All rows are held in memory and
written through. Called by `tenants.py` (look-ups, deletion) and by the admin service.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cachemgr.ids import TenantId
from cachemgr.scope_store import ScopeStore
from cachemgr.tenant_keys import check_name
from cachemgr.tenant_rows import GroupRow
from common.errors import AlreadyExists, NotFound

GROUP_SECRET_BYTES: Final = 32
GROUP_ID_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group for operators."""

    group: str
    tenants: tuple[TenantId, ...]
    created_ns: int


class Groups:
    """All groups of a node."""

    def __init__(self, store: ScopeStore) -> None:
        self._store = store
        self._groups = {row.group: row for row in store.load_groups()}

    def create(self, name: str, members: Sequence[TenantId], now_ns: int) -> None:
        """A new group with a secret of its own. The members exist. Raises InvalidArgument or AlreadyExists."""
        check_name(name, "group")
        if name in self._groups:
            raise AlreadyExists(f"group {name} exists")
        secret = secrets.token_bytes(GROUP_SECRET_BYTES)
        row = GroupRow(name, secrets.token_hex(GROUP_ID_BYTES), now_ns, secret, set(members))
        self._store.add_group(row)
        self._groups[name] = row

    def update(self, name: str, added: Sequence[TenantId], removed: Sequence[TenantId]) -> None:
        """Change the members; harmless when repeated. Raises InvalidArgument or NotFound."""
        row = self._row(name)
        self._store.change_members(name, added, removed)
        row.members |= set(added)
        row.members -= set(removed)

    def delete(self, name: str) -> None:
        """End a group and forget its secret. Raises InvalidArgument or NotFound."""
        self._row(name)
        self._store.delete_group(name)
        del self._groups[name]

    def forget_tenant(self, tenant: TenantId) -> None:
        """The tenant is gone from the database, and so are its memberships."""
        for row in self._groups.values():
            row.members.discard(tenant)

    def secret(self, name: str) -> bytes:
        """The group's secret, for key roots alone. NotFound where there is no such group."""
        return self._row(name).secret

    def group_id(self, name: str) -> str:
        """The id of the group that has this name now; "" where there is none."""
        row = self._groups.get(name)
        return "" if row is None else row.group_id

    def ids_of(self, tenant: TenantId) -> tuple[str, ...]:
        """The ids of the groups that the tenant is a member of, in order."""
        return tuple(sorted(row.group_id for row in self._groups.values() if tenant in row.members))

    def is_member(self, name: str, tenant: TenantId) -> bool:
        """Whether the tenant is a member; False too where there is no such group."""
        row = self._groups.get(name)
        return row is not None and tenant in row.members

    def groups_of(self, tenant: TenantId) -> tuple[str, ...]:
        """The groups that the tenant is a member of, by name."""
        return tuple(sorted(name for name, row in self._groups.items() if tenant in row.members))

    def list_groups(self, after: str, limit: int) -> list[GroupView]:
        """At most `limit` groups by name, those after `after` ("" = from the first)."""
        names = sorted(name for name in self._groups if name > after)[:limit]
        rows = (self._groups[name] for name in names)
        return [GroupView(row.group, tuple(sorted(row.members)), row.created_ns) for row in rows]

    def _row(self, name: str) -> GroupRow:
        row = self._groups.get(check_name(name, "group"))
        if row is None:
            raise NotFound("there is no such group", reason="GROUP_NOT_FOUND")
        return row
