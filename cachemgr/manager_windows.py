"""What the cache manager tells of window blocks, where there are layer groups (`window_blocks.py`).

Invariant: nothing here changes blocks, index or leases; what is to be zeroed is named once. `CacheManager` inherits it.
"""

from __future__ import annotations

import numpy as np

from cachemgr.ids import BlockArray, BlockRun, SessionId
from cachemgr.leases import to_wire
from cachemgr.manager_state import ManagerState


class ManagerWindows(ManagerState):
    """Which block has which window block."""

    @property
    def num_window_blocks(self) -> int:
        """Usable window blocks; 0 where there are no layer groups."""
        windows = self._core.window_blocks
        return 0 if windows is None else windows.num_window_blocks

    def window_pairs(self, blocks: BlockArray) -> BlockArray:
        """int32 [n, 2], (block, its window block), of those of `blocks` that have one; there must be layer groups."""
        windows = self._state.window_blocks
        if windows is None:
            raise ValueError("there are no window blocks")
        return windows.pairs_of(blocks[blocks > 0].astype(np.intp))

    def take_window_scrub(self) -> BlockRun:
        """As `take_scrub`, of window blocks."""
        windows = self._state.window_blocks
        return np.zeros(0, np.intp) if windows is None else windows.take_scrub()

    def held_blocks(self, session: SessionId) -> BlockArray:
        """int32 [n], each once: the blocks of a session's tables and copies, and its credit. Raises FailedPrecondition
        where the session is over."""
        found = self._state.book.session(session)
        runs = [lease.held for lease in found.leases.values()]
        sources = [lease.copy.source for lease in found.leases.values() if lease.copy is not None]
        runs.append(np.array([*sources, *found.credit], np.intp))
        return to_wire(np.unique(np.concatenate(runs)))
