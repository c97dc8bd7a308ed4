"""The tenant database: an old file becomes a new one whole, or stays as it was; a later one is refused."""

from __future__ import annotations

import os
import sqlite3

import pytest

from cachemgr.tenant_quotas import QuotaChange, TenantQuota
from cachemgr.tenant_schema import _VERSION_1, _VERSION_2, _VERSION_3, SCHEMA_VERSION
from cachemgr.tenant_store import TenantStore
from cachemgr.tenants import Tenants
from common.errors import FailedPrecondition


def old_file(path):
    """A file as schema 1 left it, with one tenant and one key; the key text that opens it."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    database = sqlite3.connect(path)
    database.executescript(f"{_VERSION_1}PRAGMA user_version=1;")
    database.execute("INSERT INTO tenants VALUES ('acme', 7, ?)", (b"s" * 32,))
    database.execute("INSERT INTO keys VALUES ('k1', 'acme', x'00', x'00', 'first', 8, NULL, 9, 0)")
    database.execute("INSERT INTO meta VALUES ('epoch', x'0500000000000000')")
    database.commit()
    database.close()


def version(path):
    database = sqlite3.connect(path)
    (number,) = database.execute("PRAGMA user_version").fetchone()
    database.close()
    return number


def test_schema_1_is_migrated_with_everything_in_it(tmp_path):
    """Tenants, keys, secrets and the epoch are kept; quotas begin at their defaults and can be changed."""
    path = tmp_path / "tenants.db"
    old_file(path)
    store = TenantStore(path)
    tenants = Tenants(store)
    (view,) = tenants.list_tenants("", 10)
    assert (view.tenant, view.created_ns, [key.key_id for key in view.keys]) == ("acme", 7, ["k1"])
    assert view.quota == TenantQuota(0, 0, 1.0, 0)
    assert tenants.secret("acme") == b"s" * 32
    assert store.next_epoch() == 6
    tenants.update_quota("acme", QuotaChange(floor_blocks=3), 0)
    store.close()
    assert version(path) == SCHEMA_VERSION
    again = TenantStore(path)
    assert Tenants(again).quotas()["acme"].floor_blocks == 3
    again.close()


def test_groups_of_schema_3_get_ids_of_their_own(tmp_path):
    """Each group is given an id that no other has and that stays; its secret and members are kept."""
    path = tmp_path / "tenants.db"
    old_file(path)
    database = sqlite3.connect(path)
    database.executescript(f"{_VERSION_2}{_VERSION_3}PRAGMA user_version=3;")
    for name in ("team", "other"):
        database.execute("INSERT INTO groups VALUES (?, 7, ?)", (name, b"g" * 32))
        database.execute("INSERT INTO members VALUES (?, 'acme')", (name,))
    database.commit()
    database.close()
    store = TenantStore(path)
    tenants = Tenants(store)
    ids = tenants.groups.ids_of("acme")
    assert len(set(ids)) == 2
    assert all(len(group_id) == 16 for group_id in ids)
    assert tenants.groups.secret("team") == b"g" * 32
    store.close()
    assert version(path) == SCHEMA_VERSION
    again = TenantStore(path)
    assert Tenants(again).groups.ids_of("acme") == ids
    again.close()


def test_migration_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    """A script that breaks off in the middle changes nothing; the next start of a good build migrates."""
    path = tmp_path / "tenants.db"
    old_file(path)
    with monkeypatch.context() as patch:
        patch.setattr(
            "cachemgr.tenant_schema._STEPS",
            (_VERSION_1, "ALTER TABLE tenants ADD COLUMN floor_blocks INTEGER NOT NULL DEFAULT 0; CREATE nonsense;"),
        )
        with pytest.raises(FailedPrecondition, match="cannot be used"):
            TenantStore(path)
    assert version(path) == 1
    store = TenantStore(path)
    assert Tenants(store).has_tenant("acme")
    store.close()


def test_file_of_a_later_version_is_refused(tmp_path):
    """A schema that this build does not know is not touched."""
    path = tmp_path / "tenants.db"
    TenantStore(path).close()
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    database.close()
    with pytest.raises(FailedPrecondition, match=f"schema {SCHEMA_VERSION + 1}"):
        TenantStore(path)
    assert version(path) == SCHEMA_VERSION + 1
