"""Under which cache keys each tenant has acquired: what an operator means by "the" key of a tenant, and what a prompt
may be resident under instead.

Invariant: bounded, the newest keys of each tenant, each once; of a tenant that is deleted nothing is kept. It holds
digests of models and names, no secret and no token. Written by the session service's operations, read by the admin
service.
"""

from __future__ import annotations

from typing import Final

from cachemgr.ids import TenantId
from cachemgr.keys import CacheKey

MAX_KEYS: Final = 64
NO_KEY: Final = (
    "the tenant has acquired nothing since the cache manager began; what was cached before needs its cache key"
)
"""Why nothing can be said of a prompt whose key was not given: adopted blocks do not tell the parts of their keys."""


class KeyBook:
    """The newest cache keys of every tenant."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: dict[TenantId, dict[CacheKey, None]] = {}
        self._last: dict[TenantId, CacheKey] = {}

    def note(self, tenant: TenantId, key: CacheKey) -> None:
        """The tenant acquires under `key` now."""
        if self._last.get(tenant) == key:
            return
        self._last[tenant] = key
        keys = self._keys.setdefault(tenant, {})
        keys.pop(key, None)
        keys[key] = None
        if len(keys) > self._max_keys:
            del keys[next(iter(keys))]

    def last(self, tenant: TenantId) -> CacheKey | None:
        """The key that the tenant acquired with last; None where it never did in this life of the daemon."""
        return self._last.get(tenant)

    def keys(self, tenant: TenantId) -> list[CacheKey]:
        """The keys that the tenant acquired with, the newest first."""
        return list(reversed(self._keys.get(tenant, {})))

    def forget(self, tenant: TenantId) -> None:
        """The tenant is gone. Harmless when repeated."""
        self._keys.pop(tenant, None)
        self._last.pop(tenant, None)
