"""Tenants and their keys: who a key belongs to, and whether it still counts.

Invariant: a key is known only by its salted hash; a revoked or expired key authenticates nobody from that moment on;
a tenant's secret never leaves the daemon. All rows are held in memory and written through, so that a look-up costs no
disk. Called by the credential and admin services and, for each acquire, by the session service. The clock (nanoseconds
since 1970) is passed in.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Final

from cachemgr.ids import TenantId
from cachemgr.tenant_keys import SALT_BYTES, check_key_name, check_tenant_name, hash_secret, new_key, split_key
from cachemgr.tenant_store import KeyRow, TenantRow, TenantStore
from common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, Unauthenticated

DEFAULT_TENANT: Final = TenantId("default")
TENANT_SECRET_BYTES: Final = 32
MAX_TTL_SECONDS: Final = 100 * 366 * 86_400.0
_NOBODY_SALT: Final = bytes(SALT_BYTES)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who authenticated, by which key."""

    tenant: TenantId
    key_id: str


@dataclass(frozen=True, slots=True)
class KeyView:
    """A key for operators; times are nanoseconds since 1970, None means never."""

    key_id: str
    name: str
    created_ns: int
    expires_ns: int | None
    last_used_ns: int | None
    revoked: bool


@dataclass(frozen=True, slots=True)
class TenantView:
    """A tenant for operators."""

    tenant: TenantId
    created_ns: int
    keys: tuple[KeyView, ...]


class Tenants:
    """All tenants of a node, over one store."""

    def __init__(self, store: TenantStore) -> None:
        self._store = store
        tenants, keys = store.load()
        self._tenants = {row.tenant: row for row in tenants}
        self._keys = {row.key_id: row for row in keys}
        self._used: set[str] = set()

    @property
    def empty(self) -> bool:
        """True before the first tenant was made."""
        return not self._tenants

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
        return Identity(row.tenant, key_id)

    def check_key(self, tenant: TenantId, key_id: str, now_ns: int) -> None:
        """See that a granted key still counts. Raises Unauthenticated where it was revoked or has expired."""
        row = self._keys.get(key_id)
        if row is None or row.tenant != tenant:
            raise _unknown_key()
        _check_alive(row, now_ns)

    def secret(self, tenant: TenantId) -> bytes:
        """The tenant's 32-byte secret, for key roots alone. NotFound where there is no such tenant."""
        return self._row(tenant).secret

    def create_tenant(self, name: str, now_ns: int) -> TenantId:
        """A new tenant with a secret of its own. Raises InvalidArgument or AlreadyExists."""
        tenant = check_tenant_name(name)
        self._refuse_taken(tenant)
        row = TenantRow(tenant, now_ns, secrets.token_bytes(TENANT_SECRET_BYTES))
        self._store.add(row, None)
        self._tenants[tenant] = row
        return tenant

    def create_tenant_with_key(self, name: str, key: str, key_name: str, now_ns: int) -> Identity:
        """A new tenant and one given key, both or neither: for the first start, whose key file is written before.

        Raises FailedPrecondition where `key` is no key of our form.
        """
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
                raise InvalidArgument("ttl_seconds", f"allowed is more than 0, at most {MAX_TTL_SECONDS:.0f}")
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
            raise NotFound("there is no such key")
        if not row.revoked:
            self._store.revoke(key_id)
            row.revoked = 1
        return row.tenant

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
        return [TenantView(name, self._tenants[name].created_ns, tuple(keys.get(name, ()))) for name in names]

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
            raise NotFound("there is no such tenant")
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
