"""Which layout this daemon has, and the arena and the cache manager that go with it.

Invariant: the first attach fixes the layout for the daemon's life; from then on there is exactly one arena and one
manager, and an attach with any other number is refused by name. They are fresh, or those of the daemon before this
one, whose memory a decoder hands back (`succession.py`). Called by the session and admin services. It moves no
block: only the manager does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cachemgr.arena.base import Arena
from cachemgr.arena.handoff import Handoff
from cachemgr.arena.maker import HOST_MEMORY, ArenaPlace
from cachemgr.events import EventLog
from cachemgr.ids import TenantId
from cachemgr.journal import IndexJournal
from cachemgr.journal_file import boot_id
from cachemgr.journal_format import JournalIdentity
from cachemgr.manager import CacheManager
from cachemgr.pool_heir import PoolHeir
from cachemgr.pool_parts import PoolSize, apply_quota, draining_error, layout_mismatch, make_manager
from cachemgr.succession import Succession
from cachemgr.tenant_quotas import TenantQuota
from common.arena_frames import PROTOCOL_VERSION, ArenaKind
from common.config import DEFAULT_GRACE_SECONDS, DEFAULT_LEASE_SECONDS, DEFAULT_MAX_KEPT
from common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from common.faults import Faults
from common.layout import KvLayout
from common.logs import get_logger

__all__ = ["PoolOwner", "PoolSize", "draining_error"]


class PoolOwner(PoolHeir):
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
        max_kept: int = DEFAULT_MAX_KEPT,
        succession: Succession,
        may_adopt: Callable[[TenantId], bool] = bool,
        all_purged: Callable[[], None] = lambda: None,
        place: ArenaPlace = HOST_MEMORY,
        make_room: Callable[[], bool] = lambda: False,
        steady_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.succession = succession
        self._may_adopt = may_adopt
        self._all_purged = all_purged
        self._place = place
        self._make_room = make_room  # whether memory that nobody uses was let go for the arena
        self._steady_ns = steady_ns
        self.lease_seconds = lease_seconds
        self.grace_seconds = grace_seconds
        self._max_kept = max_kept
        self._size = size
        self._faults = faults
        self._handoff = handoff
        self._arena: Arena | None = None
        self._journal: IndexJournal | None = None
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

    def release_memory(self) -> None:
        """Gives back what the mapping of the journal took lately; called as time passes."""
        if self._journal is not None:
            self._journal.release()

    @property
    def num_blocks(self) -> int:
        """Usable blocks; 0 before the first attach."""
        return 0 if self._arena is None else self._arena.num_blocks

    @property
    def reserved_bytes(self) -> int:
        """What the arena takes, or will: before the first attach what was promised, where that is in bytes."""
        if self._arena is not None:
            return self._arena.memory_bytes
        return self._size.num_bytes if self._size.num_blocks is None else 0

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
            apply_quota(self.manager, tenant, self._quotas[tenant])
        if quota is None:
            del self._quotas[tenant]

    def require(self) -> CacheManager:
        """The manager. Raises FailedPrecondition before the first attach."""
        if self.manager is None:
            raise FailedPrecondition("no decoder has attached yet", reason="NO_LAYOUT")
        return self.manager

    def check_protocol(self, protocol_version: int) -> None:
        """Raises FailedPrecondition where a decoder speaks another version."""
        if protocol_version != PROTOCOL_VERSION:
            raise FailedPrecondition(
                f"protocol_version: the decoder speaks {protocol_version}, the cache manager {PROTOCOL_VERSION}",
                reason="PROTOCOL_MISMATCH",
                metadata={"want": str(protocol_version), "have": str(PROTOCOL_VERSION)},
            )

    def settle(self, protocol_version: int, layout: KvLayout) -> CacheManager:
        """The manager for a decoder of `layout`: made now if it is the first, compared otherwise.

        Raises FailedPrecondition, with the numbers that differ, on a mismatch; ResourceExhausted where the system
        refuses the memory.
        """
        self.check_protocol(protocol_version)
        if self.manager is None or self.layout is None:
            return self._create(layout)
        if layout.fingerprint() != self.layout.fingerprint():
            raise layout_mismatch(want=layout, have=self.layout)
        return self.manager

    def close(self) -> None:
        """Let the daemon's hold on the memory go. Harmless when repeated."""
        if self._arena is not None:
            self._arena.close()
        self.succession.close()

    def _create(self, layout: KvLayout) -> CacheManager:
        sizes = layout.sizes(self._size.blocks_for(layout))
        try:
            arena = self._place.make(sizes)
        except ResourceExhausted:
            if not self._make_room():
                raise
            arena = self._place.make(sizes)
        if arena.kind is ArenaKind.CUDA_IPC:
            self.succession.forgo()
            self._all_purged()
            return self._install(arena, layout, None)
        identity = JournalIdentity(
            sizes.num_blocks,
            layout.block_tokens,
            sizes.block_bytes,
            layout.fingerprint(),
            arena.nonce,
            boot_id(),
            arena.device_uuid,
            sizes.num_window_blocks,
            sizes.window_block_bytes,
        )
        journal = self.succession.create(identity)
        self._all_purged()
        return self._install(arena, layout, journal)

    def _install(self, arena: Arena, layout: KvLayout, journal: IndexJournal | None) -> CacheManager:
        manager = make_manager(
            arena.num_blocks,
            layout.block_tokens,
            window_tokens=layout.window_tokens,
            num_window_blocks=arena.sizes.num_window_blocks,
            epoch=self.epoch,
            faults=self._faults,
            on_free=arena.poison if self._faults.poison_on_free else None,
            on_window_free=arena.poison_windows if self._faults.poison_on_free else None,
            events=self.events,
            lease_seconds=self.lease_seconds,
            grace_seconds=self.grace_seconds,
            journal=journal,
            quotas=self._quotas,
        )
        manager.limit_kept(self._max_kept)
        self._arena, self.layout, self.manager, self._journal = arena, layout, manager, journal
        self._handoff.serve_arena(arena, layout.fingerprint())
        get_logger().info(
            "layout_fixed",
            num_blocks=arena.num_blocks,
            block_bytes=layout.block_bytes,
            block_tokens=layout.block_tokens,
            window_blocks=arena.sizes.num_window_blocks,
        )
        return manager
