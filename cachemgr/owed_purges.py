"""Whose blocks have to go, because what gave them their names is over: kept on disk until they have gone.

Invariant: an owner is noted in the very transaction that ends a secret or an approval, and settled when none of its
blocks of before is listed, in memory or in the journal; so a daemon that dies in between leaves word to the next one,
which lists nothing of such an owner. One that was settled and is still noted loses a warm cache, and nothing else.
Called by the stores (note) and by `tenants.py`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from typing import Final

from cachemgr.ids import TenantId
from cachemgr.tenant_schema import Transaction
from common.errors import FailedPrecondition

_PREFIX: Final = "owed_purge:"  # of names in the table `meta`; the rest is the owner's


def note(db: sqlite3.Connection, owner: TenantId) -> None:
    """Note an owner, within the caller's transaction."""
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, x'01')", (_PREFIX + owner,))


def load(db: sqlite3.Connection) -> frozenset[TenantId]:
    """Every owner that is noted."""
    rows = db.execute("SELECT name FROM meta WHERE substr(name, 1, ?) = ?", (len(_PREFIX), _PREFIX)).fetchall()
    return frozenset(TenantId(name.removeprefix(_PREFIX)) for (name,) in rows)


def settle(db: sqlite3.Connection, owners: Iterable[TenantId]) -> None:
    """Their blocks have gone. On a full disk they stay noted."""
    names = [(_PREFIX + owner,) for owner in owners]
    if names:
        with contextlib.suppress(FailedPrecondition), Transaction(db):
            db.executemany("DELETE FROM meta WHERE name = ?", names)
