"""Looks for drift: when nothing runs, the books of the cache manager must add up.

Invariant: a violated invariant is never passed over and never ends the process: it is logged as an error, new work is
refused and health says NOT_SERVING, until a later look finds everything right. Called by the daemon about once a
second; it looks only at idle moments after a change, because a full check takes tens of milliseconds.
"""

from __future__ import annotations

from cachemgr.manager import CacheManager
from cachemgr.pool_owner import PoolOwner
from common.logs import get_logger


class Watchdog:
    """Checks the manager of `owner` and keeps `owner.drifted` true to what it finds."""

    def __init__(self, owner: PoolOwner) -> None:
        self._owner = owner
        self._last_revision = -1
        self._checked_revision = -1
        self._log = get_logger()

    def look(self) -> None:
        """Check if nothing has changed since the last look, no lease is held, and this state was not checked yet."""
        manager = self._owner.manager
        if manager is None:
            return
        revision, before = manager.revision, self._last_revision
        self._last_revision = revision
        settled = revision == before and (revision != self._checked_revision or self._owner.drifted)
        if settled and not manager.snapshot().leases:
            self._checked_revision = revision
            self._check(manager)

    def _check(self, manager: CacheManager) -> None:
        violations = manager.check_integrity()
        if violations and not self._owner.drifted:
            self._log.error("integrity_violated", violations=len(violations), first=violations[0])
        elif self._owner.drifted and not violations:
            self._log.info("integrity_restored")
        self._owner.drifted = bool(violations)
