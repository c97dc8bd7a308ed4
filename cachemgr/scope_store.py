"""Groups and approved prefixes on disk: rows of the tenant database, and nothing of their meaning.

Invariant: every write is one transaction; an approval is a length and digests, so that no token is ever on disk. Made
by `TenantStore` over its connection; called by `tenant_groups.py` and `tenant_approvals.py`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from cachemgr import owed_purges
from cachemgr.ids import TenantId
from cachemgr.scopes import PUBLIC_OWNER
from cachemgr.tenant_rows import ApprovalRow, GroupRow
from cachemgr.tenant_schema import Transaction


class ScopeStore:
    """The tables `groups`, `members` and `approvals`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def load_groups(self) -> list[GroupRow]:
        """All groups with their members."""
        groups = self._db.execute("SELECT group_name, group_id, created_ns, secret FROM groups").fetchall()
        rows = {group[0]: GroupRow(*group) for group in groups}
        for name, tenant in self._db.execute("SELECT group_name, tenant FROM members"):
            rows[name].members.add(TenantId(tenant))
        return list(rows.values())

    def add_group(self, row: GroupRow) -> None:
        """Insert a group and its members."""
        with Transaction(self._db):
            self._db.execute(
                "INSERT INTO groups (group_name, group_id, created_ns, secret) VALUES (?, ?, ?, ?)",
                (row.group, row.group_id, row.created_ns, row.secret),
            )
            self._insert_members(row.group, row.members)

    def change_members(self, group: str, added: Iterable[TenantId], removed: Iterable[TenantId]) -> None:
        """Add and remove members, in one transaction."""
        with Transaction(self._db):
            self._insert_members(group, added)
            self._db.executemany(
                "DELETE FROM members WHERE group_name = ? AND tenant = ?", [(group, tenant) for tenant in removed]
            )

    def delete_group(self, group: str) -> None:
        """Drop a group with its members; its secret is gone from the disk when this returns."""
        with Transaction(self._db):
            self._db.execute("DELETE FROM groups WHERE group_name = ?", (group,))
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def load_approvals(self) -> list[ApprovalRow]:
        """All approvals."""
        rows = self._db.execute("SELECT name, num_tokens, digest, created_ns, steps FROM approvals").fetchall()
        return [ApprovalRow(*row) for row in rows]

    def add_approval(self, row: ApprovalRow) -> None:
        """Insert an approval, in place of one of that name."""
        with Transaction(self._db):
            self._db.execute(
                "INSERT OR REPLACE INTO approvals (name, num_tokens, digest, created_ns, steps) VALUES (?, ?, ?, ?, ?)",
                (row.name, row.num_tokens, row.digest, row.created_ns, row.steps),
            )

    def delete_approval(self, name: str) -> None:
        """Drop an approval, and write that the public scope owes a purge."""
        with Transaction(self._db):
            owed_purges.note(self._db, PUBLIC_OWNER)
            self._db.execute("DELETE FROM approvals WHERE name = ?", (name,))

    def _insert_members(self, group: str, tenants: Iterable[TenantId]) -> None:
        self._db.executemany(
            "INSERT OR IGNORE INTO members (group_name, tenant) VALUES (?, ?)", [(group, tenant) for tenant in tenants]
        )
