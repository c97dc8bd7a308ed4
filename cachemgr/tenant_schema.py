"""The schema of the tenant database, how an older file becomes a new one, and its transactions.

Invariant: a file has either the old schema or the new one, never half of it: a migration is one transaction, and so is
every write. A file of a later version is refused, not guessed at. Called by the stores alone.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from common.errors import FailedPrecondition

SCHEMA_VERSION: Final = 4

_VERSION_1: Final = """
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
_VERSION_2: Final = """
ALTER TABLE tenants ADD COLUMN floor_blocks INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tenants ADD COLUMN ceiling_blocks INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tenants ADD COLUMN weight REAL NOT NULL DEFAULT 1.0;
ALTER TABLE tenants ADD COLUMN pin_blocks INTEGER NOT NULL DEFAULT 0;
CREATE TABLE groups (
  group_name TEXT PRIMARY KEY, created_ns INTEGER NOT NULL, secret BLOB NOT NULL
) STRICT;
CREATE TABLE members (
  group_name TEXT NOT NULL REFERENCES groups(group_name) ON DELETE CASCADE,
  tenant TEXT NOT NULL REFERENCES tenants(tenant) ON DELETE CASCADE,
  PRIMARY KEY (group_name, tenant)
) STRICT;
CREATE TABLE approvals (
  name TEXT PRIMARY KEY, num_tokens INTEGER NOT NULL, digest BLOB NOT NULL, created_ns INTEGER NOT NULL
) STRICT;
"""
_VERSION_3: Final = """
ALTER TABLE approvals ADD COLUMN steps BLOB NOT NULL DEFAULT x'';
"""
_VERSION_4: Final = """
ALTER TABLE groups ADD COLUMN group_id TEXT NOT NULL DEFAULT '';
UPDATE groups SET group_id = lower(hex(randomblob(8)));
"""
_STEPS: Final = (_VERSION_1, _VERSION_2, _VERSION_3, _VERSION_4)
"""The script that leads from version n to version n + 1."""


def prepare_schema(db: sqlite3.Connection) -> None:
    """Bring the file to SCHEMA_VERSION. Raises FailedPrecondition where a later build wrote it."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise FailedPrecondition(
            f"the tenant database has schema {version}; this build reads {SCHEMA_VERSION}", reason="TENANTS_DB"
        )
    if version < SCHEMA_VERSION:
        steps = "".join(_STEPS[version:])
        try:
            db.executescript(f"BEGIN IMMEDIATE;{steps}PRAGMA user_version={SCHEMA_VERSION};COMMIT;")
        except sqlite3.Error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


class Transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK where the body or the commit fails; none is ever left open.

    Raises FailedPrecondition (STATE_DISK_FULL) where the disk has no room for it.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, cause: BaseException | None, _trace: object) -> None:
        try:
            if kind is None:
                self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            cause = error
            raise
        finally:
            if self._db.in_transaction:  # SQLite has rolled back by itself after some errors
                self._db.execute("ROLLBACK")
            if isinstance(cause, sqlite3.OperationalError) and cause.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise FailedPrecondition(
                    "the disk of the state directory is full; nothing was changed", reason="STATE_DISK_FULL"
                ) from cause
