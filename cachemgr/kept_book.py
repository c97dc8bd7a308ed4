"""The register of kept branches: who holds which blocks with no decoder at work on them, by name, oldest first.

Invariant: `holds` counts, for each block, the kept branches that hold it; `counts` the branches of each owner. A branch
is found by a *name*, a keyed digest that the service makes of the handle: the handle itself never comes here, and how
long a lookup takes says nothing about it. Changed by `kept.py` alone; the views and the checks read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachemgr.ids import SessionId
from cachemgr.leases import Lease
from common.config import DEFAULT_MAX_KEPT

NO_SESSION: Final = SessionId(0)


@dataclass(slots=True, eq=False)
class KeptBranch:
    """One kept branch. `hold` is the lease that it was, with session 0: its table covers `hold.sealed` tokens; what its
    token record has beyond them is computed again by whoever continues it."""

    branch_id: int
    name: bytes
    hold: Lease
    expires_ns: int


class KeptBook:
    """All kept branches of a pool of `num_blocks` blocks; a tenant has at most `limit`.

    holds: int32 [num_blocks + 1], holds of kept branches on each block
    """

    def __init__(self, num_blocks: int, limit: int = DEFAULT_MAX_KEPT) -> None:
        self.limit = limit
        self.branches: dict[bytes, KeptBranch] = {}
        self.counts: dict[int, int] = {}
        self.holds: NDArray[np.int32] = np.zeros(num_blocks + 1, np.int32)
        self._last_branch = 0

    def __len__(self) -> int:
        return len(self.branches)

    def count_of(self, owner: int) -> int:
        """Kept branches of an owner."""
        return self.counts.get(owner, 0)

    def numbered(self, branch_id: int) -> KeptBranch | None:
        """The branch of that number; O(branches), for operators."""
        return next((branch for branch in self.branches.values() if branch.branch_id == branch_id), None)

    def add(self, name: bytes, hold: Lease, expires_ns: int) -> KeptBranch:
        """Enters a branch whose holds are in place."""
        self._last_branch += 1
        branch = KeptBranch(self._last_branch, name, hold, expires_ns)
        self.branches[name] = branch
        self.counts[hold.owner] = self.count_of(hold.owner) + 1
        self.holds[hold.held] += 1
        hold.tree.users += 1
        if hold.prefix_tree is not None:
            hold.prefix_tree.users += 1
        return branch

    def remove(self, branch: KeptBranch) -> None:
        """Forgets a branch that holds nothing any more."""
        hold = branch.hold
        del self.branches[branch.name]
        left = self.counts[hold.owner] - 1
        if left:
            self.counts[hold.owner] = left
        else:
            del self.counts[hold.owner]
        hold.tree.users -= 1
        if hold.prefix_tree is not None:
            hold.prefix_tree.users -= 1
