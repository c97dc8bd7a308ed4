"""What others see of tenants and keys: frozen values without any secret. Built by `tenants.py`; times are nanoseconds
since 1970, None means never.
"""

from __future__ import annotations

from dataclasses import dataclass

from cachemgr.ids import TenantId
from cachemgr.tenant_quotas import TenantQuota


@dataclass(frozen=True, slots=True)
class Identity:
    """Who authenticated, by which key, and the weight where tenants compete."""

    tenant: TenantId
    key_id: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class KeyView:
    """A key for operators."""

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
    quota: TenantQuota
    groups: tuple[str, ...]
