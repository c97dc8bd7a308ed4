"""What goes into and comes out of the cache manager: frozen values, no behaviour.

The service converts them from and to protobuf, one conversion each way. Block arrays in them are copies: they are the
receiver's own and never alias the manager's tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cachemgr.ids import BlockArray, LeaseId
from common.errors import TesseraError


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One copy-on-write: the first `num_tokens` (1..block_tokens-1) tokens of `source` go to `target`.

    The lease holds `source` until the copy is reported; `target` is in the lease's table already.
    """

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Acquired:
    """A granted lease. `blocks` is int32 [ceil(tokens / block_tokens)]; `cached_tokens` <= tokens - 1."""

    lease_id: LeaseId
    blocks: BlockArray
    cached_tokens: int
    copy: CopyPlan | None


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """What one sequence did since its last report.

    taken_blocks:  int32 [n], from the session's credit, appended to the table in this order
    tokens:        packed little-endian int32, appended to the token record
    sealed_tokens: leading tokens that are computed and fenced; never shrinks; 0 means no news
    copied:        the lease's copy plan has run
    release:       the lease ends: what is sealed may be published, the rest is freed
    """

    lease_id: LeaseId
    taken_blocks: BlockArray = field(default_factory=lambda: np.zeros(0, np.int32))
    tokens: bytes = b""
    sealed_tokens: int = 0
    copied: bool = False
    release: bool = False


@dataclass(frozen=True, slots=True)
class Replacement:
    """Entries `first_index`.. of the lease's table are now `blocks` (int32): the same tokens, published earlier."""

    lease_id: LeaseId
    first_index: int
    blocks: BlockArray


@dataclass(frozen=True, slots=True)
class Refusal:
    """The report of one sequence was refused; its lease is over."""

    lease_id: LeaseId
    error: TesseraError


@dataclass(frozen=True, slots=True)
class Reported:
    """The answer to a report; `credit` is int32 [granted], perhaps fewer than wanted.

    Duplicates behind `replacements` stay held until a report with `applied_revision` >= `revision`.
    """

    replacements: list[Replacement]
    refusals: list[Refusal]
    credit: BlockArray
    revision: int


@dataclass(frozen=True, slots=True)
class Branch:
    """One forked lease: shares the parent's whole blocks; `copy` fills its own tail. `blocks` is int32."""

    lease_id: LeaseId
    blocks: BlockArray
    copy: CopyPlan | None


@dataclass(frozen=True, slots=True)
class DetachOutcome:
    """What a detach ended: leases, and the blocks that were freed at once or quarantined."""

    leases: int
    freed_blocks: int
    quarantined_blocks: int
