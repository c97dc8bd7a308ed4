"""The door to a manager's state: whatever looks at it finds what the last report left for after its answer done.

Invariant: between a report's answer and the next look at the state nothing is there but what a report that came that
much later would have left. Base of the parts of `CacheManager`.
"""

from __future__ import annotations

from cachemgr.state import CacheState
from cachemgr.steady_reports import list_late


class ManagerState:
    """The state of a manager. `_core` is the same, for what does not depend on what is listed."""

    _core: CacheState

    @property
    def _state(self) -> CacheState:
        core = self._core
        if core.late:
            list_late(core)
            if core.journal is not None:
                core.journal.flush()
        return core
