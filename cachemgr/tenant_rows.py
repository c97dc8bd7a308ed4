"""The rows of the tenant database: plain values, times in nanoseconds since 1970. Read and written by the stores alone
(`tenant_store.py`, `scope_store.py`), held by `tenants.py`, `tenant_groups.py` and `tenant_approvals.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cachemgr.ids import TenantId

DEFAULT_WEIGHT = 1.0


@dataclass(slots=True)
class TenantRow:
    """One tenant and its quota; `ceiling_blocks` 0 means the whole pool. `secret` makes key roots and goes nowhere."""

    tenant: TenantId
    created_ns: int
    secret: bytes = field(repr=False)
    floor_blocks: int = 0
    ceiling_blocks: int = 0
    weight: float = DEFAULT_WEIGHT
    pin_blocks: int = 0


@dataclass(slots=True)
class KeyRow:
    """One key, without its secret; `expires_ns` and `last_used_ns` None means never."""

    key_id: str
    tenant: TenantId
    salt: bytes = field(repr=False)
    hash: bytes = field(repr=False)
    name: str
    created_ns: int
    expires_ns: int | None
    last_used_ns: int | None
    revoked: int  # 0 or 1, as SQLite keeps it


@dataclass(slots=True)
class GroupRow:
    """One group of tenants that may share a scope. `group_id` is random: no other group, also of this name, has it."""

    group: str
    group_id: str
    created_ns: int
    secret: bytes = field(repr=False)
    members: set[TenantId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class ApprovalRow:
    """One prefix that every tenant may share: its length and a digest under the node's secret, never its tokens.
    `steps` are shorter digests of its first 16, 32, ... tokens; empty where an older build approved it."""

    name: str
    num_tokens: int
    digest: bytes = field(repr=False)
    created_ns: int
    steps: bytes = field(default=b"", repr=False)
