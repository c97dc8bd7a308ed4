"""The part of the cache manager's door that a daemon passes once, at its start: the adoption of the cache of another.

Invariant: between `adopt` and `finish_adoption` the core is frozen. Pure; part of `CacheManager`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np

from cachemgr import adoption
from cachemgr.claim_plans import Claim
from cachemgr.claims import claim
from cachemgr.ids import BlockArray, BlockRun, SessionId, TenantId
from cachemgr.manager_state import ManagerState
from cachemgr.recovery import Recovered
from cachemgr.resuming import Resumed
from common.errors import FailedPrecondition

NO_PAIRS: Final[BlockArray] = np.zeros((0, 2), np.int32)


class ManagerAdoption(ManagerState):
    """Taking over what a daemon before this one had."""

    def adopt(self, found: Recovered, now_ns: int, accept: Callable[[TenantId], bool] = bool) -> BlockRun:
        """Lists what a journal has, of the owners that `accept` knows, in this manager, which must be empty. It is then
        frozen until `finish_adoption`: nothing is allocated or evicted. Returns the listed blocks."""
        self._state.now_ns = now_ns
        return adoption.adopt(self._state, found, accept)

    @property
    def adopting(self) -> bool:
        """Whether it is frozen."""
        return self._state.frozen

    def claim(
        self,
        session: SessionId,
        claims: Sequence[Claim],
        credit: BlockArray,
        now_ns: int,
        window_blocks: BlockArray = NO_PAIRS,
    ) -> Resumed:
        """What a decoder of the daemon before this one holds is leased to its new session, each sequence whole or not
        at all; a block that may be written is claimed once. The answer is acknowledged as that of a report.
        `window_blocks`, int32 [n, 2], is which window blocks it says that they have, where there are layer groups.

        Raises FailedPrecondition where nothing is adopted now, InvalidArgument where the credit cannot be theirs.
        """
        self._state.now_ns = now_ns
        self._state.book.renew(session, now_ns)
        if not self._state.frozen:
            raise FailedPrecondition("there is nothing to claim any more", reason="ADOPTION_OVER")
        return claim(self._state, session, claims, credit, now_ns, window_blocks)

    def finish_adoption(self, *, writers: Collection[int] = (), now_ns: int) -> int:
        """Everybody has claimed, or lost the right to: from now on it serves. What nobody claimed is freed, but for
        what was last given to one of the sessions `writers` of the daemon before: that stays quarantined until
        `process_gone(LIMBO)`. Returns how many blocks were freed."""
        self._state.now_ns = now_ns
        return adoption.finish(self._state, writers)
