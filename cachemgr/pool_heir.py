"""The part of the pool owner that takes over from the daemon before this one: its memory first, then its decoders.

Invariant: memory is taken back at most once, and only if it is the journal's; the adoption ends as soon as nobody is
waited for, and its quarantine as soon as nobody is late. `PoolOwner` inherits it. Called by the hand-off, the session
registry and the daemon's clock.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from typing import Final

from cachemgr.adoption import LIMBO
from cachemgr.arena.base import Arena
from cachemgr.arena.handoff import Handoff
from cachemgr.arena.maker import ArenaPlace
from cachemgr.ids import TenantId
from cachemgr.journal import IndexJournal
from cachemgr.manager import CacheManager
from cachemgr.recovery import recover
from cachemgr.succession import Succession
from common.layout import KvLayout
from common.logs import get_logger

ORPHAN_POLL_SECONDS: Final = 0.05


class PoolHeir:
    """What a pool owner does with an orphaned arena. `_may_adopt` says whether what an owner of blocks had may be
    listed still; `_all_purged` hears when all else is gone, from the journal too."""

    succession: Succession
    manager: CacheManager | None
    _handoff: Handoff
    _place: ArenaPlace
    _may_adopt: Callable[[TenantId], bool]
    _all_purged: Callable[[], None]
    _steady_ns: Callable[[], int]

    def _install(self, arena: Arena, layout: KvLayout, journal: IndexJournal | None) -> CacheManager:
        raise NotImplementedError

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

    async def watch_orphan(self) -> None:
        """The wait for the decoders of an older daemon is bounded."""
        while self.succession.orphan is not None:
            await asyncio.sleep(ORPHAN_POLL_SECONDS)
            self.look()

    def _take_arena(self, fd: int) -> bool:
        """Memory that a decoder hands back; whether it is the orphan's."""
        orphan = self.succession.orphan
        if orphan is None or orphan.adopted or orphan.layout is None:
            os.close(fd)
            return orphan is not None and orphan.adopted
        identity, started = orphan.journal.identity, self._steady_ns()
        try:
            arena = self._place.adopt(fd, identity)
        except ValueError as error:
            get_logger().warning("arena_return_refused", cause=str(error))
            return False
        manager = self._install(arena, orphan.layout, orphan.journal)
        gc.disable()  # a hundred thousand nodes at once: collections in between would cost as much as they do
        try:
            listed = manager.adopt(recover(orphan.journal), started, self._may_adopt)
        finally:
            gc.freeze()
            gc.enable()
        orphan.journal.keep_only(listed)
        self._all_purged()
        self.succession.adopt(orphan)
        get_logger().info("arena_adopted", blocks=len(listed), seconds=round((self._steady_ns() - started) / 1e9, 3))
        return True
