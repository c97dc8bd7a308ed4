"""Quotas: how many blocks an owner may have, and from whom blocks are taken when room is needed.

Charged to an owner are its active and cached blocks: what is published in its trees, held or not, and what its leases
hold beside that. A session's credit counts for nobody. Invariants: nobody takes more than its ceiling, and what others
need never takes an owner below its floor. Room that owners leave of their shares is lent to those who need it, and
taken back from those above their share first. Pure; part of `state.py`. It moves no block.

The share of an owner is its floor, and its part by weight of what the floors of all owners that have or want blocks
leave of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cachemgr.blocks import NO_OWNER, BlockPool
from common.errors import InvalidArgument, ResourceExhausted

OVER_CEILING: Final = "QUOTA_EXCEEDED"


@dataclass(frozen=True, slots=True)
class Quota:
    """floor_blocks: blocks that others cannot take    ceiling_blocks: most that it may have; 0 means the whole pool
    weight: its part of idle room, finite and above 0    pin_blocks: most that its pins may keep
    """

    floor_blocks: int = 0
    ceiling_blocks: int = 0
    weight: float = 1.0
    pin_blocks: int = 0

    def check(self) -> None:
        """Raises InvalidArgument for numbers that no pool could keep."""
        for name in ("floor_blocks", "ceiling_blocks", "pin_blocks"):
            if getattr(self, name) < 0:
                raise InvalidArgument(name, f"is {getattr(self, name)}; allowed is 0 and more")
        if 0 < self.ceiling_blocks < self.floor_blocks:
            raise InvalidArgument("floor_blocks", f"is {self.floor_blocks}; the ceiling is {self.ceiling_blocks}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InvalidArgument("weight", f"is {self.weight:g}; allowed is a finite number above 0")


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """An owner's quota and what it has: `used_blocks` are charged, `idle_blocks` of them held by nobody."""

    quota: Quota
    used_blocks: int
    idle_blocks: int
    share_blocks: int


_DEFAULT = Quota()


def blocks_are(count: int) -> str:
    """`1 block is`, `2 blocks are`."""
    return "1 block is" if count == 1 else f"{count} blocks are"


class Quotas:
    """The quotas of one pool, by owner number."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._charged = pool.ownership.charged
        self._idle = pool.ownership.idle
        self._quotas: dict[int, Quota] = {}
        self._floors: dict[int, int] = {}
        self._active: list[int] = []
        self._shares: dict[int, int] = {}

    def set(self, owner: int, quota: Quota) -> None:
        """Sets a quota. What an owner has above a new ceiling stays until it needs room or others do.

        Raises InvalidArgument; ResourceExhausted where the floors would not fit the pool.
        """
        quota.check()
        others = sum(self._floors.values()) - self._floors.get(owner, 0)
        left = self._pool.num_blocks - others
        if quota.floor_blocks > left:
            raise ResourceExhausted(
                f"a floor of {quota.floor_blocks} blocks is asked for; the other floors leave {left}",
                subject="floor_blocks",
                needed=quota.floor_blocks,
                usable=left,
                reason="FLOORS_EXCEED_POOL",
            )
        self._quotas[owner] = quota
        self._floors.pop(owner, None)
        if quota.floor_blocks:
            self._floors[owner] = quota.floor_blocks
        self._active = []

    def of(self, owner: int) -> Quota:
        """The quota of an owner; by default no floor, no ceiling, weight 1 and no pins."""
        return self._quotas.get(owner, _DEFAULT)

    def has_ceiling(self, owner: int) -> bool:
        """Whether an owner has one."""
        quota = self._quotas.get(owner)
        return quota is not None and quota.ceiling_blocks > 0

    def usage(self, owner: int) -> QuotaUsage:
        """What an owner may have and has."""
        used, idle = (0, 0) if owner == NO_OWNER else (self._charged.get(owner, 0), self._idle.get(owner, 0))
        return QuotaUsage(self.of(owner), used, idle, self._shares_with(owner).get(owner, 0))

    @property
    def any_floor(self) -> bool:
        """Whether anybody has a floor."""
        return bool(self._floors)

    def shielded(self, owner: int) -> int:
        """Cached blocks that `owner` cannot have: what keeps others at their floors."""
        total = 0
        for other, floor in self._floors.items():
            if other != owner:
                idle = self._idle.get(other, 0)
                total += idle - self._spare(other, floor)
        return total

    def floors_besides(self, owner: int) -> dict[int, int]:
        """The floors of all others that have one."""
        return {other: floor for other, floor in self._floors.items() if other != owner}

    def above_floor(self, owner: int) -> int:
        """How many blocks an owner has above its floor; all of them without one."""
        return max(0, self._charged.get(owner, 0) - self._floors.get(owner, 0))

    def spare(self, owner: int) -> int:
        """Cached blocks of an owner that the others can have."""
        return self._spare(owner, self._floors.get(owner, 0))

    def _spare(self, other: int, floor: int) -> int:
        """Cached blocks of an owner that the others can have."""
        return max(0, min(self._idle.get(other, 0), self._charged.get(other, 0) - floor))

    def left(self, owner: int, reserved: int = 0) -> int:
        """How many blocks more an owner may get below its ceiling, its own cached ones dropped for it, of which
        `reserved` are about to be held. Without a ceiling, the size of the pool."""
        ceiling = self.of(owner).ceiling_blocks
        if not ceiling:
            return self._pool.num_blocks
        return max(0, ceiling - self._charged.get(owner, 0) + self._idle.get(owner, 0) - reserved)

    def check(self, owner: int, count: int, reserved: int = 0) -> None:
        """Raises ResourceExhausted where `count` blocks more would pass an owner's ceiling; see `left`."""
        left = self.left(owner, reserved)
        if count > left:
            raise ResourceExhausted(
                f"{blocks_are(count)} needed and the tenant's ceiling leaves {left}",
                subject="tenant_blocks",
                needed=count,
                usable=left,
                reason=OVER_CEILING,
            )

    def excess(self, owner: int, count: int) -> int:
        """How many of its own cached blocks an owner must drop to get `count` blocks more below its ceiling."""
        quota = self._quotas.get(owner)
        if quota is None or not quota.ceiling_blocks:
            return 0
        return max(0, min(self._charged.get(owner, 0) + count - quota.ceiling_blocks, self._idle.get(owner, 0)))

    def budgets(self, owner: int, wanted: int, missing: int) -> Iterator[dict[int, int]]:
        """From whom the `missing` ones of `wanted` blocks for `owner` may be taken, and how many from each: first those
        above their share, as it itself may be with them; then all, down to their floors. What was taken meanwhile is
        seen."""
        active = [number for number in self._charged if number != NO_OWNER and self._charged[number]]
        if len(active) > 1:
            shares = self._shares_with(owner)
            over = {number: self._charged[number] - shares[number] for number in active}
            if owner in over:
                over[owner] += wanted
            yield {number: most for number, most in over.items() if most > 0}
        yield {
            number: missing if number == owner else min(missing, self._spare(number, self._floors.get(number, 0)))
            for number in active
        }

    def _shares_with(self, owner: int) -> dict[int, int]:
        """The shares of all owners that have blocks, and of this one."""
        active = [number for number, count in self._charged.items() if count and number != NO_OWNER]
        if owner != NO_OWNER and not self._charged.get(owner, 0):
            active.append(owner)
        if active != self._active:
            floors = sum(self._floors.get(number, 0) for number in active)
            weights = sum(self.of(number).weight for number in active)
            room = max(0, self._pool.num_blocks - floors)
            self._shares = {
                number: self._floors.get(number, 0) + int(room * self.of(number).weight / weights) for number in active
            }
            self._active = active
        return self._shares
