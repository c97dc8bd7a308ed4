"""Names for the numbers of the cache manager, so that one kind of id is never passed for another.

Block ids are 1..num_blocks; block 0 is the null block and never leaves the manager. Session, lease and node ids grow
from 1 and are never used twice in one life of the daemon. Used by every module of the core; holds no logic.
"""

from __future__ import annotations

from typing import NewType

import numpy as np
from numpy.typing import NDArray

SessionId = NewType("SessionId", int)
LeaseId = NewType("LeaseId", int)
NodeId = NewType("NodeId", int)
BlockId = NewType("BlockId", int)
TenantId = NewType("TenantId", str)

BlockArray = NDArray[np.int32]  # block ids as they cross the manager's interface
BlockRun = NDArray[np.intp]  # block ids inside the core: numpy indexes with intp at half the price of int32
