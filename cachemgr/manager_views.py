"""The cache manager's reads: lists, counters, checks, explanations, events, recent admissions.

Invariant: nothing here changes blocks, index or leases. `CacheManager` inherits it, so that it stays the one door; the
values are in `views.py`, `events.py` and `recent.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachemgr import integrity, listing
from cachemgr.blocks import BlockState
from cachemgr.event_blocks import PublishedBlocks, published_blocks
from cachemgr.events import Event, EventLog
from cachemgr.explain import Elsewhere, Explanation, explain
from cachemgr.ids import TenantId
from cachemgr.manager_state import ManagerState
from cachemgr.recent import RecentAdmissions
from cachemgr.results import ScopeSpan
from cachemgr.views import BlockView, BranchView, LeaseView, Page, PrefixView, SessionView, Snapshot


class ManagerViews(ManagerState):
    """What can be read of a `CacheState`."""

    @property
    def revision(self) -> int:
        """Grows with each change."""
        return self._core.revision

    @property
    def epoch(self) -> int:
        """Of this life of the daemon."""
        return self._core.epoch

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self._core.block_tokens

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

    def explain(
        self,
        tenant: TenantId,
        *,
        root: bytes,
        tokens: bytes,
        prefix: ScopeSpan | None = None,
        others: Sequence[Elsewhere] = (),
    ) -> Explanation:
        """How far a prompt (packed int32) of a tenant is resident, and why it stops there. Changes nothing, recency
        neither. `others` are places to look in where it is not: under other keys, and in other scopes."""
        return explain(self._state, tenant, root, tokens, prefix, others)

    def snapshot(self) -> Snapshot:
        """All counters at one moment."""
        return listing.snapshot(self._state)

    def check_integrity(self) -> list[str]:
        """Recounts everything from the tables up; one line for each violation, none where all is well."""
        return integrity.check_integrity(self._state)

    def list_blocks(self, after: int = 0, limit: int = 100, state: BlockState | None = None) -> Page[BlockView]:
        """Blocks by number, after block `after`."""
        return listing.list_blocks(self._state, after, limit, state)

    def list_prefixes(self, after: int = 0, limit: int = 100, tenant: TenantId | None = None) -> Page[PrefixView]:
        """Index nodes, parents before children. `after` is the `next_after` of the page before, not a node id."""
        return listing.list_prefixes(self._state, after, limit, tenant)

    def list_leases(self, after: int = 0, limit: int = 100) -> Page[LeaseView]:
        """Leases by id."""
        return listing.list_leases(self._state, after, limit)

    def list_branches(self, after: int = 0, limit: int = 100) -> Page[BranchView]:
        """Kept branches by number."""
        return listing.list_branches(self._state, after, limit)

    def list_sessions(self, after: int = 0, limit: int = 100) -> Page[SessionView]:
        """Attached sessions by id."""
        return listing.list_sessions(self._state, after, limit)
