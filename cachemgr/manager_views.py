"""The cache manager's reads that the admin service and its subscribers need: events, recent admissions, counts.

Invariant: nothing here changes blocks, index or leases. `CacheManager` inherits it, so that it stays the one door; the
values are in `views.py`, `events.py` and `recent.py`.
"""

from __future__ import annotations

from cachemgr.event_blocks import PublishedBlocks, published_blocks
from cachemgr.events import Event, EventLog
from cachemgr.recent import RecentAdmissions
from cachemgr.state import CacheState


class ManagerViews:
    """What can be read of a `CacheState`."""

    _state: CacheState

    @property
    def events(self) -> EventLog:
        """What changed, in order."""
        return self._state.events

    @property
    def recent(self) -> RecentAdmissions:
        """The newest admissions, for a replay."""
        return self._state.recent

    def note_time(self, now_ns: int) -> None:
        """The time of what follows, for its events. Nothing ends by it."""
        self._state.now_ns = now_ns

    @property
    def num_leases(self) -> int:
        """Leases that are held now."""
        return len(self._state.book.leases)

    def owner_name(self, owner: int) -> str:
        """The tenant or scope of an owner number; empty for none."""
        return self._state.tenant_names[owner]

    def published_blocks(self, event: Event) -> PublishedBlocks | None:
        """Name and tokens of the blocks that an event published; None where they are published no more."""
        return published_blocks(self._state, event)
