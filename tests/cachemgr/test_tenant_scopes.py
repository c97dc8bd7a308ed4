"""Quotas, groups, approvals, rotation and deletion: what the database promises, in memory and after a restart."""

from __future__ import annotations

import pytest

from cachemgr.keys import Scope
from cachemgr.scopes import PUBLIC_OWNER, check_owner, group_owner
from cachemgr.tenant_quotas import QuotaChange
from cachemgr.tenant_store import TenantStore
from cachemgr.tenants import Tenants
from common.errors import AlreadyExists, InvalidArgument, NotFound, PermissionDenied, ResourceExhausted, Unauthenticated
from common.tokens import pack_tokens

SYSTEM_PROMPT = pack_tokens([11, 22, 33, 44])


class Book:
    """The tenants of one file, which can be opened anew."""

    def __init__(self, folder):
        self.path = folder / "tenants.db"
        self.open()

    def open(self):
        self.store = TenantStore(self.path)
        self.tenants = Tenants(self.store)

    def reopen(self):
        self.store.close()
        self.open()
        return self.tenants


@pytest.fixture
def book(tmp_path):
    made = Book(tmp_path)
    for name in ("acme", "blue", "cyan"):
        made.tenants.create_tenant(name, 1)
    yield made
    made.store.close()


def on_disk(book):
    return b"".join(path.read_bytes() for path in book.path.parent.iterdir())


def test_quota_changes_only_what_is_set_and_outlives_a_restart(book):
    """Unset numbers stay; the whole quota is read back by a later start."""
    book.tenants.update_quota("acme", QuotaChange(floor_blocks=4, ceiling_blocks=9, weight=2.5), 100)
    book.tenants.update_quota("acme", QuotaChange(pin_blocks=3), 100)
    quota = book.reopen().quotas()["acme"]
    assert (quota.floor_blocks, quota.ceiling_blocks, quota.weight, quota.pin_blocks) == (4, 9, 2.5, 3)
    assert book.tenants.quotas()["blue"].ceiling_blocks == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (QuotaChange(floor_blocks=2**31), "floor_blocks"),
        (QuotaChange(ceiling_blocks=2**40), "ceiling_blocks"),
        (QuotaChange(pin_blocks=2**31), "pin_blocks"),
        (QuotaChange(weight=0.0), "weight"),
        (QuotaChange(weight=float("nan")), "weight"),
        (QuotaChange(weight=float("inf")), "weight"),
        (QuotaChange(weight=-1.0), "weight"),
        (QuotaChange(floor_blocks=6), "floor_blocks"),
        (QuotaChange(ceiling_blocks=1), "ceiling_blocks"),
    ],
)
def test_bad_quota_is_refused_by_field_and_changes_nothing(book, change, field):
    """Each number has its bounds, and a floor is never above the ceiling."""
    before = book.tenants.update_quota("acme", QuotaChange(floor_blocks=2, ceiling_blocks=5), 100)
    with pytest.raises(InvalidArgument) as caught:
        book.tenants.update_quota("acme", change, 100)
    assert caught.value.field == field
    assert book.tenants.quotas()["acme"] == before
    assert book.reopen().quotas()["acme"] == before


def test_floors_never_exceed_the_pool(book):
    """A floor beyond what the others leave is refused with numbers; one that fits, and any smaller one, is taken."""
    book.tenants.update_quota("acme", QuotaChange(floor_blocks=60), 100)
    with pytest.raises(ResourceExhausted) as caught:
        book.tenants.update_quota("blue", QuotaChange(floor_blocks=41), 100)
    assert (caught.value.needed, caught.value.usable) == (41, 40)
    book.tenants.update_quota("blue", QuotaChange(floor_blocks=40), 100)
    book.tenants.update_quota("acme", QuotaChange(floor_blocks=55), 50)  # the pool has shrunk: less is always allowed
    with pytest.raises(ResourceExhausted):
        book.tenants.update_quota("acme", QuotaChange(floor_blocks=56), 50)


def test_members_alone_belong_to_a_group(book):
    """Membership begins and ends at once, outlives a restart, and a group that is not there has no members."""
    groups = book.tenants.groups
    groups.create("team", ["acme", "blue"], 5)
    assert [book.tenants.is_member("team", name) for name in ("acme", "blue", "cyan")] == [True, True, False]
    groups.update("team", ["cyan"], ["acme"])
    assert not book.tenants.is_member("none", "cyan")
    again = book.reopen()
    assert [again.is_member("team", name) for name in ("acme", "blue", "cyan")] == [False, True, True]
    (view,) = again.groups.list_groups("", 5)
    assert (view.group, view.tenants, view.created_ns) == ("team", ("blue", "cyan"), 5)
    assert again.list_tenants("b", 1)[0].groups == ("team",)


def test_groups_refuse_bad_and_taken_names(book):
    """Names are checked like tenants'; a taken one is ALREADY_EXISTS, an unknown one NOT_FOUND."""
    groups = book.tenants.groups
    groups.create("team", [], 5)
    for name in ("", "Team", "-a", "x" * 65, "a b"):
        with pytest.raises(InvalidArgument) as caught:
            groups.create(name, [], 5)
        assert caught.value.field == "group"
    with pytest.raises(AlreadyExists):
        groups.create("team", [], 6)
    for call in (lambda: groups.update("other", [], []), lambda: groups.delete("other")):
        with pytest.raises(NotFound):
            call()


def test_scope_secrets_differ_and_stay(book):
    """Each group, the public scope and each tenant has a secret of its own that a restart keeps."""
    book.tenants.groups.create("team", ["acme"], 5)
    book.tenants.groups.create("other", ["acme"], 5)

    def secrets(tenants):
        return [
            tenants.scope_secret(Scope.PUBLIC),
            tenants.scope_secret(Scope.GROUP, "team"),
            tenants.scope_secret(Scope.GROUP, "other"),
            tenants.secret("acme"),
        ]

    first = secrets(book.tenants)
    assert len(set(first)) == 4
    assert all(len(secret) == 32 for secret in first)
    assert secrets(book.reopen()) == first
    with pytest.raises(NotFound):
        book.tenants.scope_secret(Scope.GROUP, "none")


def test_group_made_again_has_another_secret(book):
    """What lay in a deleted group cannot be reached by one of the same name; the old secret is not on disk."""
    book.tenants.groups.create("team", ["acme"], 5)
    old = book.tenants.scope_secret(Scope.GROUP, "team")
    book.tenants.groups.delete("team")
    assert not book.tenants.is_member("team", "acme")
    assert old not in on_disk(book)
    book.tenants.groups.create("team", ["acme"], 6)
    fresh = book.tenants.scope_secret(Scope.GROUP, "team")
    assert fresh != old
    assert fresh in on_disk(book)  # positive control


def test_group_made_again_is_another_owner_of_blocks(book):
    """Its id is random and kept; who owned blocks under the old one is nobody, also under the same name."""
    tenants = book.tenants
    tenants.groups.create("team", ["acme"], 5)
    old, mark = group_owner(tenants, "team"), tenants.mark("acme")
    assert tenants.owns_blocks(old)
    assert group_owner(book.reopen(), "team") == old
    assert book.tenants.mark("acme") == mark
    book.tenants.groups.delete("team")
    assert not book.tenants.owns_blocks(old)
    book.tenants.groups.create("team", ["acme"], 6)
    assert not book.tenants.owns_blocks(old)
    assert book.tenants.owns_blocks(group_owner(book.tenants, "team"))
    assert book.tenants.mark("acme") != mark
    assert not book.tenants.owns_blocks("@group:team:") and not book.tenants.owns_blocks("@group:team")
    with pytest.raises(PermissionDenied):
        check_owner(book.tenants, "acme", old)
    check_owner(book.tenants, "acme", group_owner(book.tenants, "team"))


def test_what_a_change_owes_is_on_disk_until_it_is_purged(book):
    """A rotation's tenant and, after a withdrawal, the public scope are not adopted by a later start, others are; what
    was purged is, and so is everything once all is."""
    book.tenants.create_tenant("other", 5)
    book.tenants.approvals.approve("system", SYSTEM_PROMPT, 5)
    owners = ("acme", "other", PUBLIC_OWNER)
    assert all(map(book.reopen().may_be_adopted, owners))
    book.tenants.rotate_secret("acme")
    book.tenants.approvals.withdraw("system")
    for _ in range(2):  # also after a second death
        assert [book.reopen().may_be_adopted(owner) for owner in owners] == [False, True, False]
    book.tenants.purged("acme")
    assert [book.reopen().may_be_adopted(owner) for owner in owners] == [True, True, False]
    book.tenants.all_purged()
    assert all(map(book.tenants.may_be_adopted, owners)) and all(map(book.reopen().may_be_adopted, owners))
    assert not book.tenants.may_be_adopted("nobody")


def test_exactly_the_approved_tokens_are_approved(book):
    """One token more, less or other is not approved; a restart and a repetition change nothing; withdrawal ends it."""
    approvals = book.tenants.approvals
    assert approvals.approve("system", SYSTEM_PROMPT, 5) == 4
    assert approvals.approve("system", SYSTEM_PROMPT, 6) == 4
    approvals.approve("short", pack_tokens([11]), 7)
    for tenants in (book.tenants, book.reopen()):
        assert tenants.approved_lengths() == (4, 1)
        assert tenants.is_approved(SYSTEM_PROMPT)
        assert tenants.is_approved(pack_tokens([11]))
        for other in ([11, 22, 33], [11, 22, 33, 45], [11, 22, 33, 44, 55], [12], []):
            assert not tenants.is_approved(pack_tokens(other))
    assert [(row.name, row.num_tokens, row.created_ns) for row in book.tenants.approvals.list_approvals("", 9)] == [
        ("short", 1, 7),
        ("system", 4, 5),
    ]
    book.tenants.approvals.withdraw("system")
    for tenants in (book.tenants, book.reopen()):
        assert tenants.approved_lengths() == (1,)
        assert not tenants.is_approved(SYSTEM_PROMPT)


def test_approval_names_one_prefix(book):
    """A name that is taken for other tokens is ALREADY_EXISTS; bad names and no tokens are named; none is NOT_FOUND."""
    approvals = book.tenants.approvals
    approvals.approve("system", SYSTEM_PROMPT, 5)
    with pytest.raises(AlreadyExists):
        approvals.approve("system", pack_tokens([1]), 5)
    for name, tokens, field in (("", SYSTEM_PROMPT, "name"), ("A", SYSTEM_PROMPT, "name"), ("a", b"", "token_ids")):
        with pytest.raises(InvalidArgument) as caught:
            approvals.approve(name, tokens, 5)
        assert caught.value.field == field
    with pytest.raises(NotFound):
        approvals.withdraw("none")
    assert book.tenants.is_approved(SYSTEM_PROMPT)


def test_tokens_of_an_approval_are_nowhere_on_disk(book):
    """The database tells the name and the length of an approval, not what it says."""
    book.tenants.approvals.approve("systemprompt", SYSTEM_PROMPT, 5)
    assert SYSTEM_PROMPT not in on_disk(book)
    assert b"systemprompt" in on_disk(book)  # positive control


def test_rotated_secret_is_new_and_the_old_one_gone(book):
    """A rotation changes one tenant's secret for good and leaves its keys as they are."""
    _, key = book.tenants.create_key("acme", "", None, 5)
    old, other = book.tenants.secret("acme"), book.tenants.secret("blue")
    assert old in on_disk(book)  # positive control
    book.tenants.rotate_secret("acme")
    fresh = book.tenants.secret("acme")
    assert fresh != old
    assert old not in on_disk(book)
    tenants = book.reopen()
    assert (tenants.secret("acme"), tenants.secret("blue")) == (fresh, other)
    assert tenants.authenticate(key, 6).tenant == "acme"
    with pytest.raises(NotFound):
        tenants.rotate_secret("none")


def test_deleted_tenant_is_gone_with_its_keys_memberships_and_secret(book):
    """Nothing of it authenticates, also not under the same name made again; others are untouched."""
    tenants = book.tenants
    key_id, key = tenants.create_key("acme", "", None, 5)
    _, other = tenants.create_key("blue", "", None, 5)
    tenants.groups.create("team", ["acme", "blue"], 5)
    tenants.authenticate(key, 6)
    secret = tenants.secret("acme")
    assert tenants.delete_tenant("acme") == "acme"
    tenants.flush()
    assert secret not in on_disk(book)
    for view in (tenants, book.reopen()):
        with pytest.raises(Unauthenticated):
            view.authenticate(key, 7)
        for admitted in (False, True):
            with pytest.raises(Unauthenticated):
                view.check_key("acme", key_id, 7, admitted=admitted)
        with pytest.raises(NotFound):
            view.secret("acme")
        assert not view.is_member("team", "acme")
        assert view.is_member("team", "blue")
        assert view.authenticate(other, 7).tenant == "blue"
    book.tenants.create_tenant("acme", 8)
    assert not book.tenants.is_member("team", "acme")
    with pytest.raises(Unauthenticated):
        book.tenants.check_key("acme", key_id, 9, admitted=True)


def test_request_that_was_admitted_outlives_its_key_but_not_its_tenant(book):
    """A revoked key still counts for what it was admitted for; a deleted tenant's does not."""
    key_id, _ = book.tenants.create_key("acme", "", None, 5)
    book.tenants.revoke_key(key_id)
    book.tenants.check_key("acme", key_id, 6, admitted=True)
    with pytest.raises(Unauthenticated):
        book.tenants.check_key("acme", key_id, 6)


def test_node_without_tenants_is_not_a_new_node(book):
    """Whoever deletes every tenant is not given the default tenant, and its old key, back at the next start."""
    assert not book.tenants.empty
    for name in ("acme", "blue", "cyan"):
        book.tenants.delete_tenant(name)
    assert not book.reopen().empty
