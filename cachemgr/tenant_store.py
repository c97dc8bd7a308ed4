"""The SQLite file of tenants: rows and counters, and nothing of their meaning.

Invariant: the file is never readable by others (mode 0600 from its first byte), holds no key in clear, every write is
one transaction, and a secret that is dropped is overwritten. Called by `tenants.py` (rows) and at start (`next_epoch`,
`signing_secret`); groups and approvals are in `scopes`. The daemon that holds the state directory's lock is its only
user.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterable
from pathlib import Path

from cachemgr import owed_purges
from cachemgr.grants import SIGNING_SECRET_BYTES
from cachemgr.ids import TenantId
from cachemgr.scope_store import ScopeStore
from cachemgr.tenant_rows import KeyRow, TenantRow
from cachemgr.tenant_schema import Transaction, prepare_schema
from common.errors import FailedPrecondition

_TENANT_COLUMNS = "tenant, created_ns, secret, floor_blocks, ceiling_blocks, weight, pin_blocks"
_KEY_COLUMNS = "key_id, tenant, salt, hash, name, created_ns, expires_ns, last_used_ns, revoked"


class TenantStore:
    """Rows on disk. Raises FailedPrecondition where the file is unsafe, damaged or of a later version."""

    def __init__(self, path: Path) -> None:
        _make_private(path)
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA foreign_keys=ON")
            self._db.execute("PRAGMA secure_delete=ON")
            prepare_schema(self._db)
        except sqlite3.DatabaseError as error:
            raise FailedPrecondition(f"{path.name} cannot be used: {error}", reason="TENANTS_DB") from None
        self.scopes = ScopeStore(self._db)

    def load(self) -> tuple[list[TenantRow], list[KeyRow]]:
        """All tenants and keys."""
        tenants = self._db.execute(f"SELECT {_TENANT_COLUMNS} FROM tenants").fetchall()
        keys = self._db.execute(f"SELECT {_KEY_COLUMNS} FROM keys").fetchall()
        return [TenantRow(TenantId(row[0]), *row[1:]) for row in tenants], [KeyRow(*row) for row in keys]

    def add(self, tenant: TenantRow | None, key: KeyRow | None) -> None:
        """Insert a tenant, a key, or both in one transaction."""
        with Transaction(self._db):
            if tenant is not None:
                self._db.execute(
                    f"INSERT INTO tenants ({_TENANT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (
                        tenant.tenant,
                        tenant.created_ns,
                        tenant.secret,
                        tenant.floor_blocks,
                        tenant.ceiling_blocks,
                        tenant.weight,
                        tenant.pin_blocks,
                    ),
                )
            if key is not None:
                self._db.execute(
                    f"INSERT INTO keys ({_KEY_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        key.key_id,
                        key.tenant,
                        key.salt,
                        key.hash,
                        key.name,
                        key.created_ns,
                        key.expires_ns,
                        key.last_used_ns,
                        key.revoked,
                    ),
                )

    def save_quota(self, row: TenantRow) -> None:
        """Write a tenant's quota."""
        with Transaction(self._db):
            self._db.execute(
                "UPDATE tenants SET floor_blocks = ?, ceiling_blocks = ?, weight = ?, pin_blocks = ? WHERE tenant = ?",
                (row.floor_blocks, row.ceiling_blocks, row.weight, row.pin_blocks, row.tenant),
            )

    def save_secret(self, tenant: TenantId, secret: bytes) -> None:
        """Write a tenant's new secret, and that it owes a purge; the old one is off the disk when this returns."""
        with Transaction(self._db):
            owed_purges.note(self._db, tenant)
            self._db.execute("UPDATE tenants SET secret = ? WHERE tenant = ?", (secret, tenant))
        self._checkpoint()

    def delete(self, tenant: TenantId) -> None:
        """Drop a tenant, its keys and memberships; its secret is gone from the disk when this returns."""
        with Transaction(self._db):
            self._db.execute("DELETE FROM keys WHERE tenant = ?", (tenant,))
            self._db.execute("DELETE FROM tenants WHERE tenant = ?", (tenant,))
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('tenant_deleted', x'01')")
        self._checkpoint()

    def revoke(self, key_id: str) -> None:
        """Mark a key as over; on disk when this returns."""
        with Transaction(self._db):
            self._db.execute("UPDATE keys SET revoked = 1 WHERE key_id = ?", (key_id,))

    def save_last_used(self, rows: Iterable[KeyRow]) -> None:
        """Write the last use of keys."""
        with Transaction(self._db):
            self._db.executemany(
                "UPDATE keys SET last_used_ns = ? WHERE key_id = ?", [(row.last_used_ns, row.key_id) for row in rows]
            )

    def owed_purges(self) -> frozenset[TenantId]:
        """Owners of blocks that have to go; see `owed_purges.py`."""
        return owed_purges.load(self._db)

    def settle_purges(self, owners: Iterable[TenantId]) -> None:
        """Their blocks have gone."""
        owed_purges.settle(self._db, owners)

    def had_tenants(self) -> bool:
        """Whether a tenant has ever been deleted: then a file without tenants is not a new one."""
        return self._db.execute("SELECT 1 FROM meta WHERE name = 'tenant_deleted'").fetchone() is not None

    def next_epoch(self) -> int:
        """A number that no earlier start of a daemon on this file was given; from 1."""
        with Transaction(self._db):
            row = self._db.execute("SELECT value FROM meta WHERE name = 'epoch'").fetchone()
            epoch = 1 + (int.from_bytes(row[0], "little") if row else 0)
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (epoch.to_bytes(8, "little"),))
        return epoch

    def signing_secret(self) -> bytes:
        """The secret behind grants, so that grants outlive a restart of the daemon."""
        return self.secret_named("signing_secret", SIGNING_SECRET_BYTES)

    def secret_named(self, name: str, num_bytes: int) -> bytes:
        """A secret of the node, made once."""
        fresh = secrets.token_bytes(num_bytes)
        with Transaction(self._db):
            self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (name, fresh))
            row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return bytes(row[0])

    def close(self) -> None:
        """Close the file. Harmless when repeated."""
        self._db.close()

    def _checkpoint(self) -> None:
        """Move the log's pages into the file, where `secure_delete` has overwritten what was dropped."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _make_private(path: Path) -> None:
    """Create the file with mode 0600, or see that an existing one is as private."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise FailedPrecondition(f"{path.name} cannot be opened: {error.strerror}", reason="TENANTS_DB") from None
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
    finally:
        os.close(fd)
    if mode & 0o077:
        raise FailedPrecondition(f"{path.name} has mode {mode:04o}; allowed is 0600", reason="UNSAFE_MODE")
