"""Which layout this daemon has, and the arena and the cache manager that go with it.

Invariant: the first attach fixes the layout for the daemon's life; from then on there is exactly one arena and one
manager, and an attach with any other number is refused by name. They are fresh, or those of the daemon before this
one, whose memory a decoder hands back (`succession.py`). Called by the session and admin services. It moves no
block: only the manager does.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Final

from cachemgr.adoption import LIMBO
from cachemgr.arena.base import Arena
from cachemgr.arena.handoff import Handoff
from cachemgr.arena.host import HostArena
from cachemgr.events import EventLog
from cachemgr.ids import TenantId
from cachemgr.journal import IndexJournal
from cachemgr.journal_file import boot_id
from cachemgr.journal_format import JournalIdentity
from cachemgr.manager import CacheManager
from cachemgr.pool_parts import PoolSize, apply_quota, layout_mismatch, make_arena
from cachemgr.recovery import recover
from cachemgr.succession import Succession
from cachemgr.tenant_quotas import TenantQuota
from common.arena_wire import PROTOCOL_VERSION
from common.config import DEFAULT_GRACE_SECONDS, DEFAULT_LEASE_SECONDS, DEFAULT_MAX_KEPT
from common.errors import FailedPrecondition, Unavailable
from common.faults import Faults
from common.layout import KvLayout
from common.logs import get_logger

__all__ = ["PoolOwner", "PoolSize", "draining_error"]

ALL_NAME_BITS: Final = 128


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
        max_kept: int = DEFAULT_MAX_KEPT,
        succession: Succession,
        knows: Callable[[TenantId], bool] = bool,
        steady_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.succession = succession
        self._knows = knows
        self._steady_ns = steady_ns
        self.lease_seconds = lease_seconds
        self.grace_seconds = grace_seconds
        self._max_kept = max_kept
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
        num_blocks = self._size.blocks_for(layout)
        arena = make_arena(num_blocks, layout.block_bytes)
        identity = JournalIdentity(
            num_blocks, layout.block_tokens, layout.block_bytes, layout.fingerprint(), arena.nonce, boot_id()
        )
        return self._install(arena, layout, self.succession.create(identity))

    def _install(self, arena: Arena, layout: KvLayout, journal: IndexJournal | None) -> CacheManager:
        manager = CacheManager(
            num_blocks=arena.num_blocks,
            block_tokens=layout.block_tokens,
            epoch=self.epoch,
            name_bits=self._faults.weak_hash_bits or ALL_NAME_BITS,
            fail_allocation=self._faults.fail_allocation,
            on_free=arena.poison if self._faults.poison_on_free else None,
            events=self.events,
            lease_ns=int(self.lease_seconds * 1e9),
            grace_ns=int(self.grace_seconds * 1e9),
            journal=journal,
        )
        manager.limit_kept(self._max_kept)
        for tenant, quota in self._quotas.items():
            apply_quota(manager, tenant, quota)
        self._arena, self.layout, self.manager = arena, layout, manager
        self._handoff.serve_arena(arena, layout.fingerprint())
        get_logger().info(
            "layout_fixed",
            num_blocks=arena.num_blocks,
            block_bytes=layout.block_bytes,
            block_tokens=layout.block_tokens,
        )
        return manager

    # ---- taking over from the daemon before this one

    def look_for_orphan(self) -> list[tuple[int, int]]:
        """(process id, pidfd) of each process that has an older daemon's arena; then its memory is wanted."""
        survivors = self.succession.find(self._steady_ns())
        if survivors:
            self._handoff.want_arena(self._take_arena)
        return survivors

    def refuse_while_adopting(self, process_id: int, decoder_name: str) -> None:
        """A decoder that begins anew is heard. Raises Unavailable while others may still come back."""
        self.heard(process_id, decoder_name)
        self.succession.refuse_others()

    def heard(self, process_id: int, decoder_name: str) -> None:
        """A decoder has claimed what it held of the orphan, or let go of it."""
        self.succession.heard(process_id, decoder_name)
        self.look()

    def process_dead(self, process_id: int) -> None:
        """A process that had an arena has ended."""
        self.succession.dead(process_id)
        self.look()

    def look(self) -> None:
        """Ends the adoption if nobody is waited for, and its quarantine if nobody is late any more."""
        succession, manager = self.succession, self.manager
        if succession.is_over(self._steady_ns()):
            self._handoff.want_arena(None)
            late = succession.conclude()
            if manager is not None:
                freed = manager.finish_adoption(writers=late, now_ns=self._steady_ns())
                get_logger().info("adoption_finished", freed_blocks=freed, late_sessions=len(late))
            else:
                get_logger().warning("adoption_given_up", cause="no decoder has handed the memory back")
        elif manager is not None and not manager.adopting and not succession.has_late:
            manager.process_gone(LIMBO)

    def _take_arena(self, fd: int) -> bool:
        """Memory that a decoder hands back; whether it is the orphan's."""
        orphan = self.succession.orphan
        if orphan is None or orphan.adopted or orphan.layout is None:
            os.close(fd)
            return orphan is not None and orphan.adopted
        identity, started = orphan.journal.identity, self._steady_ns()
        try:
            arena = HostArena.adopt(
                fd, num_blocks=identity.num_blocks, block_bytes=identity.block_bytes, nonce=identity.nonce
            )
        except ValueError as error:
            get_logger().warning("arena_return_refused", cause=str(error))
            return False
        manager = self._install(arena, orphan.layout, orphan.journal)
        gc.disable()  # a hundred thousand nodes at once: collections in between would cost as much as they do
        try:
            listed = manager.adopt(recover(orphan.journal), started, self._knows)
        finally:
            gc.freeze()
            gc.enable()
        orphan.journal.keep_only(listed)
        self.succession.adopt(orphan)
        get_logger().info("arena_adopted", blocks=len(listed), seconds=round((self._steady_ns() - started) / 1e9, 3))
        return True


def draining_error() -> Unavailable:
    """The answer to new work while the daemon is on its way out."""
    return Unavailable("the cache manager is shutting down", reason="DRAINING", retry_after_seconds=1.0)
