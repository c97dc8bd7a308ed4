"""The SQLite file of tenants: schema, rows and counters, and nothing of their meaning.

Invariant: the file is never readable by others (mode 0600 from its first byte), holds no key in clear, and every
write is one transaction. Called by `tenants.py` (rows) and at start (`next_epoch`, `signing_secret`). The daemon
that holds the state directory's lock is its only user.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachemgr.grants import SIGNING_SECRET_BYTES
from cachemgr.ids import TenantId
from common.errors import FailedPrecondition

SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE tenants (
  tenant TEXT PRIMARY KEY, created_ns INTEGER NOT NULL, secret BLOB NOT NULL
) STRICT;
CREATE TABLE keys (
  key_id TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants(tenant), salt BLOB NOT NULL, hash BLOB NOT NULL,
  name TEXT NOT NULL, created_ns INTEGER NOT NULL, expires_ns INTEGER, last_used_ns INTEGER,
  revoked INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
"""


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant; times are nanoseconds since 1970."""

    tenant: TenantId
    created_ns: int
    secret: bytes


@dataclass(slots=True)
class KeyRow:
    """One key, without its secret; `expires_ns` and `last_used_ns` None means never."""

    key_id: str
    tenant: TenantId
    salt: bytes
    hash: bytes
    name: str
    created_ns: int
    expires_ns: int | None
    last_used_ns: int | None
    revoked: int  # 0 or 1, as SQLite keeps it


class TenantStore:
    """Rows on disk. Raises FailedPrecondition where the file is unsafe, damaged or of another version."""

    def __init__(self, path: Path) -> None:
        _make_private(path)
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA foreign_keys=ON")
            self._prepare_schema()
        except sqlite3.DatabaseError as error:
            raise FailedPrecondition(f"{path.name} cannot be used: {error}", reason="TENANTS_DB") from None

    def _prepare_schema(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")
        elif version != SCHEMA_VERSION:
            raise FailedPrecondition(
                f"the tenant database has schema {version}; this build reads {SCHEMA_VERSION}", reason="TENANTS_DB"
            )

    def load(self) -> tuple[list[TenantRow], list[KeyRow]]:
        """All rows."""
        tenants = self._db.execute("SELECT tenant, created_ns, secret FROM tenants").fetchall()
        keys = self._db.execute(
            "SELECT key_id, tenant, salt, hash, name, created_ns, expires_ns, last_used_ns, revoked FROM keys"
        ).fetchall()
        return (
            [TenantRow(TenantId(row[0]), row[1], row[2]) for row in tenants],
            [KeyRow(*row) for row in keys],
        )

    def add(self, tenant: TenantRow | None, key: KeyRow | None) -> None:
        """Insert a tenant, a key, or both in one transaction."""
        with self._transaction():
            if tenant is not None:
                self._db.execute(
                    "INSERT INTO tenants VALUES (?, ?, ?)", (tenant.tenant, tenant.created_ns, tenant.secret)
                )
            if key is not None:
                self._db.execute(
                    "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
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

    def revoke(self, key_id: str) -> None:
        """Mark a key as over; on disk when this returns."""
        with self._transaction():
            self._db.execute("UPDATE keys SET revoked = 1 WHERE key_id = ?", (key_id,))

    def save_last_used(self, rows: Iterable[KeyRow]) -> None:
        """Write the last use of keys."""
        with self._transaction():
            self._db.executemany(
                "UPDATE keys SET last_used_ns = ? WHERE key_id = ?", [(row.last_used_ns, row.key_id) for row in rows]
            )

    def next_epoch(self) -> int:
        """A number that no earlier start of a daemon on this file was given; from 1."""
        with self._transaction():
            row = self._db.execute("SELECT value FROM meta WHERE name = 'epoch'").fetchone()
            epoch = 1 + (int.from_bytes(row[0], "little") if row else 0)
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (epoch.to_bytes(8, "little"),))
        return epoch

    def signing_secret(self) -> bytes:
        """The secret behind grants; made once, so that grants outlive a restart of the daemon."""
        fresh = secrets.token_bytes(SIGNING_SECRET_BYTES)
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('signing_secret', ?)", (fresh,))
            row = self._db.execute("SELECT value FROM meta WHERE name = 'signing_secret'").fetchone()
        return bytes(row[0])

    def close(self) -> None:
        """Close the file. Harmless when repeated."""
        self._db.close()

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


class _Transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK where the body or the commit fails; none is ever left open."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        try:
            if kind is None:
                self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:  # SQLite has rolled back by itself after some errors
                self._db.execute("ROLLBACK")


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
