"""Tenants, their keys and quotas: who a key belongs to, whether it still counts, and which secret makes whose roots.

Invariant: a key is known only by its salted hash; a revoked or expired key, and every key of a deleted tenant,
authenticates nobody from that moment on; a secret never leaves the daemon. All rows are held in memory and written
through, so that a look-up costs no disk. Called by the credential and admin services and, for each acquire, by the
session service. Groups and approvals have modules of their own. The clock (nanoseconds since 1970) is passed in.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import replace
from typing import Final

from cachemgr.grants import mark_of
from cachemgr.ids import TenantId
from cachemgr.key_book import KeyBook
from cachemgr.keys import Scope
from cachemgr.scopes import PUBLIC_OWNER, is_group_of
from cachemgr.tenant_approvals import Approvals
from cachemgr.tenant_groups import Groups
from cachemgr.tenant_keys import SALT_BYTES, check_key_name, check_tenant_name, hash_secret, new_key, split_key
from cachemgr.tenant_quotas import QuotaChange, TenantQuota, change_quota, quota_of
from cachemgr.tenant_rows import KeyRow, TenantRow
from cachemgr.tenant_store import TenantStore
from cachemgr.tenant_views import Identity, KeyView, TenantView
from common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, Unauthenticated

DEFAULT_TENANT: Final = TenantId("default")
TENANT_SECRET_BYTES: Final = 32
MAX_TTL_SECONDS: Final = 100 * 366 * 86_400.0
_NOBODY_SALT: Final = bytes(SALT_BYTES)


class Tenants:
    """All tenants of a node, over one store, with the groups and approvals that their scopes need."""

    def __init__(self, store: TenantStore) -> None:
        self._store = store
        tenants, keys = store.load()
        self._tenants = {row.tenant: row for row in tenants}
        self._keys = {row.key_id: row for row in keys}
        self._used: set[str] = set()
        self._owed = store.owed_purges()
        self._public_secret = store.secret_named("public_secret", TENANT_SECRET_BYTES)
        self.groups = Groups(store.scopes)
        self.seen_keys = KeyBook()
        self.approvals = Approvals(store.scopes, store.secret_named("approval_secret", TENANT_SECRET_BYTES))

    @property
    def empty(self) -> bool:
        """True before the first tenant was made; never again, even if every tenant is deleted."""
        return not self._tenants and not self._store.had_tenants()

    def authenticate(self, key: str, now_ns: int) -> Identity:
        """Who `key` belongs to. Raises Unauthenticated where it is malformed, unknown, expired or revoked."""
        parts = split_key(key)
        if parts is None:
            raise _unknown_key()
        key_id, secret = parts
        row = self._keys.get(key_id)
        actual = hash_secret(secret, _NOBODY_SALT if row is None else row.salt)
        if row is None or not hmac.compare_digest(actual, row.hash):
            raise _unknown_key()
        _check_alive(row, now_ns)
        row.last_used_ns = now_ns
        self._used.add(key_id)
        return Identity(row.tenant, key_id, self._tenants[row.tenant].weight)

    def check_key(self, tenant: TenantId, key_id: str, now_ns: int, *, admitted: bool = False) -> None:
        """See that a granted key still counts: for a request that was `admitted` before, that it was not deleted with
        its tenant, and else that it was not revoked and has not expired. Raises Unauthenticated.
        """
        row = self._keys.get(key_id)
        if row is None or row.tenant != tenant:
            raise _unknown_key()
        if not admitted:
            _check_alive(row, now_ns)

    def secret(self, tenant: TenantId) -> bytes:
        """The tenant's 32-byte secret, for key roots alone. NotFound where there is no such tenant."""
        return self._row(tenant).secret

    def scope_secret(self, scope: Scope, group: str = "") -> bytes:
        """The secret of a scope that is wider than a tenant. NotFound where there is no such group."""
        if scope is Scope.PUBLIC:
            return self._public_secret
        if scope is Scope.GROUP:
            return self.groups.secret(group)
        raise ValueError("a private scope has its tenant's secret")

    def is_member(self, group: str, tenant: TenantId) -> bool:
        """Whether the tenant is a member of the group; False too where there is no such group."""
        return self.groups.is_member(group, tenant)

    def group_id(self, group: str) -> str:
        """The id of the group that has this name now; "" where there is none."""
        return self.groups.group_id(group)

    def mark(self, tenant: TenantId) -> bytes:
        """Tells the tenant's secret and the groups that it is in from those of another time, and nothing else of them.
        NotFound where there is no such tenant."""
        return mark_of(self._row(tenant).secret, self.groups.ids_of(tenant))

    def owns_blocks(self, owner: TenantId) -> bool:
        """Whether an owner of blocks, a tenant or a wider scope, is still there."""
        return owner == PUBLIC_OWNER or owner in self._tenants or is_group_of(self, owner)

    def may_be_adopted(self, owner: TenantId) -> bool:
        """Whether what a daemon before this one listed for an owner of blocks may be listed still: it is there, and no
        rotation or withdrawal was cut short between its commit and its purge."""
        return self.owns_blocks(owner) and owner not in self._owed

    def purged(self, owner: TenantId) -> None:
        """Nothing is listed for `owner` that was before its newest rotation or withdrawal."""
        self._store.settle_purges([owner])

    def all_purged(self) -> None:
        """Nothing is listed, here or in the journal, that may not be adopted."""
        self._store.settle_purges(self._owed)
        self._owed = frozenset()

    def approved_lengths(self) -> tuple[int, ...]:
        """How many tokens approved prefixes have, each number once, the longest first."""
        return self.approvals.lengths()

    def is_approved(self, tokens: bytes) -> bool:
        """Whether exactly these tokens (packed int32) are an approved prefix."""
        return self.approvals.is_approved(tokens)

    def create_tenant(self, name: str, now_ns: int) -> TenantId:
        """A new tenant with a secret of its own. Raises InvalidArgument or AlreadyExists."""
        tenant = check_tenant_name(name)
        self._refuse_taken(tenant)
        row = TenantRow(tenant, now_ns, secrets.token_bytes(TENANT_SECRET_BYTES))
        self._store.add(row, None)
        self._tenants[tenant] = row
        return tenant

    def create_tenant_with_key(self, name: str, key: str, key_name: str, now_ns: int) -> Identity:
        """A new tenant and one given key, both or neither, for the first start, whose key file is written before.
        Raises FailedPrecondition where `key` is no key of our form."""
        tenant = check_tenant_name(name)
        self._refuse_taken(tenant)
        parts = split_key(key)
        if parts is None:
            raise FailedPrecondition("the default key's file holds no tenant key; move it away", reason="BAD_KEY_FILE")
        row = TenantRow(tenant, now_ns, secrets.token_bytes(TENANT_SECRET_BYTES))
        key_row = _key_row(parts[0], tenant, parts[1], key_name, now_ns, None)
        self._store.add(row, key_row)
        self._tenants[tenant] = row
        self._keys[key_row.key_id] = key_row
        return Identity(tenant, key_row.key_id)

    def create_key(self, tenant: str, name: str, ttl_seconds: float | None, now_ns: int) -> tuple[str, str]:
        """(key id, key text); the text exists nowhere else. Raises InvalidArgument or NotFound."""
        owner = self._row(check_tenant_name(tenant)).tenant
        check_key_name(name)
        expires: int | None = None
        if ttl_seconds is not None:
            if not 0 < ttl_seconds <= MAX_TTL_SECONDS:  # also refuses NaN
                raise InvalidArgument(
                    "ttl_seconds", f"is {ttl_seconds:g}; allowed is more than 0, at most {MAX_TTL_SECONDS:.0f} seconds"
                )
            expires = now_ns + max(1, int(ttl_seconds * 1e9))
        key_id, text = new_key()
        parts = split_key(text)
        if parts is None:
            raise ValueError("a fresh key does not have the form of a key")
        row = _key_row(key_id, owner, parts[1], name, now_ns, expires)
        self._store.add(None, row)
        self._keys[key_id] = row
        return key_id, text

    def revoke_key(self, key_id: str) -> TenantId:
        """End a key at once; its tenant. Harmless when repeated. NotFound where there is no such key."""
        row = self._keys.get(key_id)
        if row is None:
            raise NotFound("there is no such key", reason="KEY_NOT_FOUND")
        if not row.revoked:
            self._store.revoke(key_id)
            row.revoked = 1
        return row.tenant

    def update_quota(self, name: str, change: QuotaChange, num_blocks: int) -> TenantQuota:
        """Change what is set in `change`; the whole quota. `num_blocks` of the pool, 0 where that is not known yet.
        Raises InvalidArgument or NotFound; ResourceExhausted where the floors would not fit into the pool."""
        row = self._row(check_tenant_name(name))
        other_floors = sum(other.floor_blocks for other in self._tenants.values() if other is not row)
        quota = change_quota(quota_of(row), change, other_floors, num_blocks)
        changed = replace(
            row,
            floor_blocks=quota.floor_blocks,
            ceiling_blocks=quota.ceiling_blocks,
            weight=quota.weight,
            pin_blocks=quota.pin_blocks,
        )
        self._store.save_quota(changed)
        self._tenants[row.tenant] = changed
        return quota

    def quotas(self) -> dict[TenantId, TenantQuota]:
        """The quota of every tenant."""
        return {tenant: quota_of(row) for tenant, row in self._tenants.items()}

    def rotate_secret(self, name: str) -> TenantId:
        """Give a tenant a new secret: no root of before is ever derived again. Raises InvalidArgument or NotFound."""
        row = self._row(check_tenant_name(name))
        fresh = secrets.token_bytes(TENANT_SECRET_BYTES)
        self._store.save_secret(row.tenant, fresh)
        row.secret = fresh
        return row.tenant

    def delete_tenant(self, name: str) -> TenantId:
        """End a tenant, its keys and its memberships, and forget its secret. Raises InvalidArgument or NotFound."""
        tenant = self._row(check_tenant_name(name)).tenant
        self._store.delete(tenant)
        del self._tenants[tenant]
        self._keys = {key_id: row for key_id, row in self._keys.items() if row.tenant != tenant}
        self._used &= set(self._keys)
        self.groups.forget_tenant(tenant)
        self.seen_keys.forget(tenant)
        return tenant

    def list_tenants(self, after: str, limit: int) -> list[TenantView]:
        """At most `limit` tenants by name, those after `after` ("" = from the first)."""
        keys: dict[TenantId, list[KeyView]] = {}
        names = sorted(name for name in self._tenants if name > after)[:limit]
        wanted = set(names)
        for row in sorted(self._keys.values(), key=lambda key: (key.created_ns, key.key_id)):
            if row.tenant in wanted:
                keys.setdefault(row.tenant, []).append(
                    KeyView(row.key_id, row.name, row.created_ns, row.expires_ns, row.last_used_ns, bool(row.revoked))
                )
        return [
            TenantView(
                name,
                self._tenants[name].created_ns,
                tuple(keys.get(name, ())),
                quota_of(self._tenants[name]),
                self.groups.groups_of(name),
            )
            for name in names
        ]

    def has_tenant(self, tenant: str) -> bool:
        """Whether there is a tenant of that name."""
        return tenant in self._tenants

    def flush(self) -> None:
        """Write the last uses of keys that are not on disk yet."""
        if self._used:
            self._store.save_last_used([self._keys[key_id] for key_id in sorted(self._used)])
            self._used.clear()

    def _row(self, tenant: TenantId) -> TenantRow:
        row = self._tenants.get(tenant)
        if row is None:
            raise NotFound("there is no such tenant", reason="TENANT_NOT_FOUND")
        return row

    def _refuse_taken(self, tenant: TenantId) -> None:
        if tenant in self._tenants:
            raise AlreadyExists(f"tenant {tenant} exists")


def _key_row(key_id: str, tenant: TenantId, secret: bytes, name: str, now_ns: int, expires_ns: int | None) -> KeyRow:
    salt = secrets.token_bytes(SALT_BYTES)
    return KeyRow(key_id, tenant, salt, hash_secret(secret, salt), name, now_ns, expires_ns, None, 0)


def _check_alive(row: KeyRow, now_ns: int) -> None:
    if row.revoked:
        raise Unauthenticated("the key has been revoked", reason="KEY_REVOKED")
    if row.expires_ns is not None and now_ns >= row.expires_ns:
        raise Unauthenticated("the key has expired", reason="KEY_EXPIRED")


def _unknown_key() -> Unauthenticated:
    return Unauthenticated("the key is not known", reason="UNKNOWN_KEY")
