"""What the pool owner is made of: how large a pool is, its quotas, and how two layouts differ. No state.

Called by `pool_owner.py` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from cachemgr.events import EventLog
from cachemgr.ids import BlockRun, TenantId
from cachemgr.journal import IndexJournal
from cachemgr.manager import CacheManager
from cachemgr.quotas import Quota
from cachemgr.tenant_quotas import TenantQuota
from common.config import MIN_POOL_BLOCKS
from common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from common.faults import Faults
from common.layout import KvLayout
from common.logs import get_logger

MAX_BLOCKS: Final = 2**31 - 2
ALL_NAME_BITS: Final = 128


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How large the pool shall be: a number of usable blocks, or else bytes."""

    num_blocks: int | None
    num_bytes: int

    def blocks_for(self, layout: KvLayout) -> int:
        """Usable blocks under `layout`. Raises FailedPrecondition where they are too few or too many."""
        count = self.num_blocks if self.num_blocks is not None else layout.blocks_in(self.num_bytes)
        if not MIN_POOL_BLOCKS <= count <= MAX_BLOCKS:
            raise FailedPrecondition(
                f"the pool would have {count} blocks of {_block_text(layout)}; "
                f"allowed are {MIN_POOL_BLOCKS}..{MAX_BLOCKS} blocks",
                reason="POOL_SIZE",
                metadata={"num_blocks": str(count), "block_bytes": str(round(layout.bytes_per_block))},
            )
        return count


def _block_text(layout: KvLayout) -> str:
    if not layout.grouped:
        return f"{layout.block_bytes} bytes"
    share = "each" if layout.window_share == 1 else f"{layout.window_share} of them"
    return f"{layout.block_bytes} bytes, with a window block of {layout.window_group.block_bytes} bytes for {share}"


def apply_quota(manager: CacheManager, tenant: TenantId, quota: TenantQuota) -> None:
    """A floor that the pool is too small for counts for nothing: the daemon must come up all the same."""
    wanted = Quota(quota.floor_blocks, quota.ceiling_blocks, quota.weight, quota.pin_blocks)
    try:
        manager.set_quota(tenant, wanted)
    except ResourceExhausted as error:
        get_logger().warning("floor_does_not_fit", tenant=tenant, floor_blocks=error.needed, usable_blocks=error.usable)
        manager.set_quota(tenant, replace(wanted, floor_blocks=0))


def make_manager(
    num_blocks: int,
    block_tokens: int,
    *,
    window_tokens: int,
    num_window_blocks: int,
    epoch: int,
    faults: Faults,
    on_free: Callable[[BlockRun], None] | None,
    on_window_free: Callable[[BlockRun], None] | None,
    events: EventLog,
    lease_seconds: float,
    grace_seconds: float,
    journal: IndexJournal | None,
    quotas: Mapping[TenantId, TenantQuota],
) -> CacheManager:
    """An empty cache manager with the quotas that are known."""
    manager = CacheManager(
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        window_tokens=window_tokens,
        num_window_blocks=num_window_blocks,
        epoch=epoch,
        name_bits=faults.weak_hash_bits or ALL_NAME_BITS,
        fail_allocation=faults.fail_allocation,
        on_free=on_free,
        on_window_free=on_window_free,
        events=events,
        lease_ns=int(lease_seconds * 1e9),
        grace_ns=int(grace_seconds * 1e9),
        journal=journal,
    )
    for tenant, quota in quotas.items():
        apply_quota(manager, tenant, quota)
    return manager


def layout_mismatch(*, want: KvLayout, have: KvLayout) -> FailedPrecondition:
    """The refusal of a decoder with layout `want`."""
    differing = [
        (field.name, str(getattr(want, field.name)), str(getattr(have, field.name)))
        for field in fields(KvLayout)
        if getattr(want, field.name) != getattr(have, field.name)
    ]
    text = ", ".join(f"{name}: want {wanted}, have {present}" for name, wanted, present in differing)
    return FailedPrecondition(
        f"the decoder's KV layout is not the arena's ({text})",
        reason="LAYOUT_MISMATCH",
        metadata={name: f"want {wanted}, have {present}" for name, wanted, present in differing},
    )


def draining_error() -> Unavailable:
    """The answer to new work while the daemon is on its way out."""
    return Unavailable("the cache manager is shutting down", reason="DRAINING", retry_after_seconds=1.0)
