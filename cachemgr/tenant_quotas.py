"""What a tenant may have of the pool, as the operator sets it: the numbers, and which of them go together. Pure.

Invariant: floor <= ceiling (where there is one), the weight is a finite number above 0, and all floors together fit
into a pool whose size is known. What the numbers do is the core's business. Called by `tenants.py` and the admin
service.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from cachemgr.tenant_rows import DEFAULT_WEIGHT, TenantRow
from common.errors import InvalidArgument, ResourceExhausted

MAX_BLOCKS: Final = 2**31 - 2
MIN_WEIGHT: Final = 1e-3
MAX_WEIGHT: Final = 1e6


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """`floor_blocks` that others cannot take; `ceiling_blocks` that it cannot pass, 0 for the whole pool; `weight` in
    sharing idle room; `pin_blocks` that pins may keep."""

    floor_blocks: int = 0
    ceiling_blocks: int = 0
    weight: float = DEFAULT_WEIGHT
    pin_blocks: int = 0


@dataclass(frozen=True, slots=True)
class QuotaChange:
    """What shall be changed; None leaves a number as it is."""

    floor_blocks: int | None = None
    ceiling_blocks: int | None = None
    weight: float | None = None
    pin_blocks: int | None = None


def quota_of(row: TenantRow) -> TenantQuota:
    """The quota of a tenant's row."""
    return TenantQuota(row.floor_blocks, row.ceiling_blocks, row.weight, row.pin_blocks)


def change_quota(quota: TenantQuota, change: QuotaChange, other_floors: int, num_blocks: int) -> TenantQuota:
    """The quota after `change`. `other_floors` of all other tenants; `num_blocks` of the pool, 0 for not known.

    Raises InvalidArgument; ResourceExhausted where the floors would not fit into the pool.
    """
    values = {
        name: getattr(quota, name) if getattr(change, name) is None else getattr(change, name)
        for name in ("floor_blocks", "ceiling_blocks", "weight", "pin_blocks")
    }
    for name in ("floor_blocks", "ceiling_blocks", "pin_blocks"):
        if not 0 <= values[name] <= MAX_BLOCKS:
            raise InvalidArgument(name, f"is {values[name]}; allowed is 0..{MAX_BLOCKS}")
    if not (math.isfinite(values["weight"]) and MIN_WEIGHT <= values["weight"] <= MAX_WEIGHT):
        raise InvalidArgument("weight", f"is {values['weight']:g}; allowed is {MIN_WEIGHT:g}..{MAX_WEIGHT:g}")
    changed = TenantQuota(**values)
    if 0 < changed.ceiling_blocks < changed.floor_blocks:
        raise InvalidArgument(
            "ceiling_blocks" if change.floor_blocks is None else "floor_blocks",
            f"floor {changed.floor_blocks} is above ceiling {changed.ceiling_blocks}",
        )
    left = max(num_blocks - other_floors, 0)
    if num_blocks and changed.floor_blocks > max(left, quota.floor_blocks):
        raise ResourceExhausted(
            f"floor_blocks: {changed.floor_blocks} are asked for; the pool has {num_blocks} blocks, and the floors of "
            f"other tenants leave {left}",
            subject="floor_blocks",
            needed=changed.floor_blocks,
            usable=left,
            reason="FLOORS_EXCEED_POOL",
        )
    return changed
