"""Which layout this daemon has, and the arena and the cache manager that go with it.

Invariant: the first attach fixes the layout for the daemon's life; from then on there is exactly one arena and one
manager, and an attach with any other number is refused by name. Called by the session and admin services. It moves no
block: only the manager does.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields, replace
from typing import Final

from cachemgr.arena.base import Arena
from cachemgr.arena.handoff import Handoff
from cachemgr.arena.host import HostArena
from cachemgr.events import EventLog
from cachemgr.ids import TenantId
from cachemgr.manager import CacheManager
from cachemgr.quotas import Quota
from cachemgr.tenant_quotas import TenantQuota
from common.arena_wire import PROTOCOL_VERSION
from common.config import DEFAULT_GRACE_SECONDS, DEFAULT_LEASE_SECONDS
from common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from common.faults import Faults
from common.layout import NONCE_BYTES, KvLayout
from common.logs import get_logger

MIN_BLOCKS: Final = 2
MAX_BLOCKS: Final = 2**31 - 2
ALL_NAME_BITS: Final = 128


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How large the pool shall be: a number of usable blocks, or else bytes."""

    num_blocks: int | None
    num_bytes: int

    def blocks_for(self, layout: KvLayout) -> int:
        """Usable blocks under `layout`. Raises FailedPrecondition where they are too few or too many."""
        count = self.num_blocks if self.num_blocks is not None else self.num_bytes // layout.block_bytes
        if not MIN_BLOCKS <= count <= MAX_BLOCKS:
            raise FailedPrecondition(
                f"the pool would have {count} blocks of {layout.block_bytes} bytes; "
                f"allowed are {MIN_BLOCKS}..{MAX_BLOCKS} blocks",
                reason="POOL_SIZE",
                metadata={"num_blocks": str(count), "block_bytes": str(layout.block_bytes)},
            )
        return count


class PoolOwner:
    """Holds the one manager and arena of the daemon; both are absent until the first attach."""

    def __init__(
        self,
        *,
        size: PoolSize,
        epoch: int,
        faults: Faults,
        handoff: Handoff,
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
    ) -> None:
        self.lease_seconds = lease_seconds
        self.grace_seconds = grace_seconds
        self._size = size
        self._faults = faults
        self._handoff = handoff
        self._arena: Arena | None = None
        self.epoch = epoch
        self.draining = False
        self.drained = False
        self.events = EventLog()
        self._quotas: dict[TenantId, TenantQuota] = {}
        self.drifted = False
        self.manager: CacheManager | None = None
        self.layout: KvLayout | None = None

    @property
    def revision(self) -> int:
        """The manager's revision; 0 before the first attach."""
        return 0 if self.manager is None else self.manager.revision

    @property
    def num_blocks(self) -> int:
        """Usable blocks; 0 before the first attach."""
        return 0 if self._arena is None else self._arena.num_blocks

    @property
    def arena_nonce(self) -> bytes:
        """What stands at the start of the arena; empty before the first attach."""
        return b"" if self._arena is None else self._arena.nonce

    @property
    def serving(self) -> bool:
        """Whether new work is taken."""
        return not (self.draining or self.drifted)

    def refuse_new_work(self) -> None:
        """Raises Unavailable while the daemon is on its way out, or its books do not add up."""
        if self.draining:
            raise draining_error()
        if self.drifted:
            raise Unavailable(
                "the cache manager takes no new work: an integrity check failed, see its log", reason="INTEGRITY"
            )

    def refuse_new_leases(self) -> None:
        """Raises Unavailable as `refuse_new_work` does, and while an operator has drained the pool."""
        self.refuse_new_work()
        if self.drained:
            raise Unavailable(
                "the pool is drained: its operator lets nothing new begin for now",
                reason="DRAINING",
                retry_after_seconds=1.0,
            )

    def set_quota(self, tenant: TenantId, quota: TenantQuota | None) -> None:
        """The tenant's quota from now on, also in a manager that is made later; None ends it."""
        self._quotas[tenant] = quota or TenantQuota()
        if self.manager is not None:
            _apply_quota(self.manager, tenant, self._quotas[tenant])
        if quota is None:
            del self._quotas[tenant]

    def require(self) -> CacheManager:
        """The manager. Raises FailedPrecondition before the first attach."""
        if self.manager is None:
            raise FailedPrecondition("no decoder has attached yet", reason="NO_LAYOUT")
        return self.manager

    def settle(self, protocol_version: int, layout: KvLayout) -> CacheManager:
        """The manager for a decoder of `layout`: made now if it is the first, compared otherwise.

        Raises FailedPrecondition, with the numbers that differ, on a mismatch; ResourceExhausted where the system
        refuses the memory.
        """
        if protocol_version != PROTOCOL_VERSION:
            raise FailedPrecondition(
                f"protocol_version: the decoder speaks {protocol_version}, the cache manager {PROTOCOL_VERSION}",
                reason="PROTOCOL_MISMATCH",
                metadata={"want": str(protocol_version), "have": str(PROTOCOL_VERSION)},
            )
        if self.manager is None or self.layout is None:
            return self._create(layout)
        if layout.fingerprint() != self.layout.fingerprint():
            raise _layout_mismatch(want=layout, have=self.layout)
        return self.manager

    def close(self) -> None:
        """Let the daemon's hold on the memory go. Harmless when repeated."""
        if self._arena is not None:
            self._arena.close()

    def _create(self, layout: KvLayout) -> CacheManager:
        num_blocks = self._size.blocks_for(layout)
        arena = _make_arena(num_blocks, layout.block_bytes)
        manager = CacheManager(
            num_blocks=num_blocks,
            block_tokens=layout.block_tokens,
            epoch=self.epoch,
            name_bits=self._faults.weak_hash_bits or ALL_NAME_BITS,
            fail_allocation=self._faults.fail_allocation,
            on_free=arena.poison if self._faults.poison_on_free else None,
            events=self.events,
            lease_ns=int(self.lease_seconds * 1e9),
            grace_ns=int(self.grace_seconds * 1e9),
        )
        for tenant, quota in self._quotas.items():
            _apply_quota(manager, tenant, quota)
        self._arena, self.layout, self.manager = arena, layout, manager
        self._handoff.serve_arena(arena, layout.fingerprint())
        get_logger().info(
            "layout_fixed", num_blocks=num_blocks, block_bytes=layout.block_bytes, block_tokens=layout.block_tokens
        )
        return manager


def _apply_quota(manager: CacheManager, tenant: TenantId, quota: TenantQuota) -> None:
    """A floor that the pool is too small for counts for nothing: the daemon must come up all the same."""
    wanted = Quota(quota.floor_blocks, quota.ceiling_blocks, quota.weight, quota.pin_blocks)
    try:
        manager.set_quota(tenant, wanted)
    except ResourceExhausted as error:
        get_logger().warning("floor_does_not_fit", tenant=tenant, floor_blocks=error.needed, usable_blocks=error.usable)
        manager.set_quota(tenant, replace(wanted, floor_blocks=0))


def draining_error() -> Unavailable:
    """The answer to new work while the daemon is on its way out."""
    return Unavailable("the cache manager is shutting down", reason="DRAINING", retry_after_seconds=1.0)


def _make_arena(num_blocks: int, block_bytes: int) -> Arena:
    try:
        return HostArena(num_blocks=num_blocks, block_bytes=block_bytes, nonce=secrets.token_bytes(NONCE_BYTES))
    except OSError as error:
        needed = (num_blocks + 1) * block_bytes
        raise ResourceExhausted(
            f"the system refuses an arena of {needed} bytes: {error.strerror}",
            subject="arena_bytes",
            needed=needed,
            usable=0,
            reason="NO_MEMORY",
        ) from error


def _layout_mismatch(*, want: KvLayout, have: KvLayout) -> FailedPrecondition:
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
