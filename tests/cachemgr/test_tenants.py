"""Tenants: keys live, expire and end as told; nothing secret is stored in clear; the file is private."""

from __future__ import annotations

import os
import stat

import pytest

from cachemgr.tenant_keys import new_key, split_key
from cachemgr.tenant_store import TenantStore
from cachemgr.tenants import Tenants
from common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, Unauthenticated

SECOND = 1_000_000_000


@pytest.fixture
def store(tmp_path):
    made = TenantStore(tmp_path / "tenants.db")
    yield made
    made.close()


@pytest.fixture
def tenants(store):
    made = Tenants(store)
    made.create_tenant("acme", 1)
    return made


def test_key_authenticates_its_tenant_and_a_changed_key_nobody(tenants):
    """The exact key works; any other secret, id or form does not."""
    key_id, key = tenants.create_key("acme", "first", None, 5)
    found = tenants.authenticate(key, 6)
    assert (found.tenant, found.key_id) == ("acme", key_id)
    other_id, other = new_key()
    wrong = [
        key[:-1] + ("A" if key[-1] != "A" else "B"),
        key.replace(key_id, other_id),
        other,
        "",
        "tsr__",
        key + "\n",
        " " + key,
        key.upper(),
        "x" * 1_000_000,
        "tsr_\x00_é",
        "\U0001f600",
    ]
    for text in wrong:
        with pytest.raises(Unauthenticated):
            tenants.authenticate(text, 6)


def test_revoked_key_is_refused_at_once_and_for_ever(tenants, store):
    """Revocation holds in memory, at the check of a grant, and after a restart; another key of the tenant goes on."""
    key_id, key = tenants.create_key("acme", "", None, 5)
    _, other = tenants.create_key("acme", "", None, 5)
    tenants.check_key("acme", key_id, 6)
    tenants.revoke_key(key_id)
    tenants.revoke_key(key_id)
    for view in (tenants, Tenants(store)):
        with pytest.raises(Unauthenticated, match="revoked"):
            view.authenticate(key, 7)
        with pytest.raises(Unauthenticated, match="revoked"):
            view.check_key("acme", key_id, 7)
        assert view.authenticate(other, 7).tenant == "acme"


def test_key_expires_on_time(tenants):
    """A key with a ttl works before its end and not at it."""
    key_id, key = tenants.create_key("acme", "", 2.0, 10 * SECOND)
    assert tenants.authenticate(key, 12 * SECOND - 1).key_id == key_id
    with pytest.raises(Unauthenticated, match="expired"):
        tenants.authenticate(key, 12 * SECOND)


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_impossible_ttl_is_refused(tenants, ttl):
    """A ttl that is no positive, bounded number names its field."""
    with pytest.raises(InvalidArgument) as caught:
        tenants.create_key("acme", "", ttl, 5)
    assert caught.value.field == "ttl_seconds"


@pytest.mark.parametrize(
    "name", ["", "-a", "_a", "A", "a b", "a" * 65, "..", "a/b", "a\n", "é", "\x00", "a" * 1_000_000, "\ud800"]
)
def test_bad_tenant_name_is_refused_without_being_repeated(tenants, name):
    """Only short, plain names become tenants."""
    with pytest.raises(InvalidArgument) as caught:
        tenants.create_tenant(name, 5)
    assert caught.value.field == "tenant"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("name", ["a", "0", "a-b_c", "a" * 64])
def test_good_tenant_name_is_taken_once(tenants, name):
    """A name can be given to one tenant only."""
    tenants.create_tenant(name, 5)
    with pytest.raises(AlreadyExists):
        tenants.create_tenant(name, 6)


@pytest.mark.parametrize("name", ["x" * 65, "é" * 33, "a\nb", "\ud800"])
def test_bad_key_name_is_refused(tenants, name):
    """Key names are short printable text."""
    with pytest.raises(InvalidArgument):
        tenants.create_key("acme", name, None, 5)


def test_unknown_objects_are_not_found(tenants):
    """Nothing is made or ended for names that do not exist."""
    with pytest.raises(NotFound):
        tenants.create_key("nobody", "", None, 5)
    with pytest.raises(NotFound):
        tenants.revoke_key("0" * 16)
    with pytest.raises(NotFound):
        tenants.secret("nobody")


def test_secrets_differ_and_survive_a_restart(tenants, store):
    """Each tenant has 32 random bytes of its own, the same after a restart."""
    tenants.create_tenant("beta", 5)
    assert tenants.secret("acme") != tenants.secret("beta")
    assert len(tenants.secret("acme")) == 32
    assert Tenants(store).secret("acme") == tenants.secret("acme")


def test_last_use_reaches_the_disk_with_flush(tenants, store):
    """The last use is kept in memory until it is flushed."""
    _, key = tenants.create_key("acme", "", None, 5)
    tenants.authenticate(key, 77)
    assert Tenants(store).list_tenants("", 10)[0].keys[0].last_used_ns is None
    tenants.flush()
    assert Tenants(store).list_tenants("", 10)[0].keys[0].last_used_ns == 77


def test_tenants_are_listed_in_pages_by_name(tenants):
    """Pages follow each other without gap or repetition, with the keys of each tenant."""
    for name in ("beta", "ceta", "delta"):
        tenants.create_tenant(name, 5)
    key_id, _ = tenants.create_key("beta", "n", None, 9)
    first = tenants.list_tenants("", 2)
    rest = tenants.list_tenants(first[-1].tenant, 10)
    assert [view.tenant for view in (*first, *rest)] == ["acme", "beta", "ceta", "delta"]
    assert [key.key_id for key in first[1].keys] == [key_id]
    assert first[0].keys == ()


def test_file_is_private_and_holds_no_key_in_clear(tmp_path, tenants, store):
    """All files are 0600 and the key's secret occurs in none of them."""
    _, key = tenants.create_key("acme", "", None, 5)
    secret = split_key(key)[1]
    files = list(tmp_path.iterdir())
    assert files
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert secret not in path.read_bytes()
    assert any(b"acme" in path.read_bytes() for path in files)  # positive control


def test_file_that_others_can_read_is_refused(tmp_path, store):
    """A database with a wider mode is not used; narrowed again it is."""
    store.close()
    path = tmp_path / "tenants.db"
    os.chmod(path, 0o640)
    with pytest.raises(FailedPrecondition, match=r"0640.*0600"):
        TenantStore(path)
    os.chmod(path, 0o600)
    TenantStore(path).close()


def test_damaged_or_foreign_file_is_refused_clearly(tmp_path):
    """A file that is no database of ours ends the start with a clear error."""
    path = tmp_path / "other.db"
    path.write_bytes(b"no database" * 1000)
    path.chmod(0o600)
    with pytest.raises(FailedPrecondition, match=r"other\.db cannot be used"):
        TenantStore(path)


def test_epoch_grows_and_signing_secret_stays(tmp_path, store):
    """Every start gets a higher epoch; grants signed before a restart stay valid."""
    assert [store.next_epoch(), store.next_epoch()] == [1, 2]
    secret = store.signing_secret()
    store.close()
    again = TenantStore(tmp_path / "tenants.db")
    assert (again.next_epoch(), again.signing_secret()) == (3, secret)
    again.close()


def test_full_disk_fails_one_write_and_harms_nothing(tenants, store):
    """A write that the disk refuses makes no key, in memory or on disk; once there is room, writing works again."""
    database = store._db
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    made = []
    with pytest.raises(FailedPrecondition, match="disk of the state directory is full"):
        for _ in range(1000):
            made.append(tenants.create_key("acme", "x" * 64, None, 5)[1])
    database.execute("PRAGMA max_page_count = 100000")
    made.append(tenants.create_key("acme", "", None, 5)[1])
    for view in (tenants, Tenants(store)):
        assert len(view.list_tenants("", 1)[0].keys) == len(made)
        assert all(view.authenticate(key, 6).tenant == "acme" for key in made)


def test_tenant_with_given_key_is_made_whole_or_not_at_all(store):
    """A key file that holds no key makes no tenant; a good one makes both."""
    tenants = Tenants(store)
    with pytest.raises(FailedPrecondition):
        tenants.create_tenant_with_key("default", "garbage", "", 5)
    assert tenants.empty
    key_id, key = new_key()
    tenants.create_tenant_with_key("default", key, "default", 5)
    assert tenants.authenticate(key, 6).key_id == key_id
