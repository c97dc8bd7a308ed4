"""What goes into and comes out of the cache manager: frozen values, no behaviour.

The service converts them from and to protobuf, one conversion each way. Block arrays in them are copies: they are the
receiver's own and never alias the manager's tables. What every step makes is a named tuple: a frozen dataclass costs
three times as much to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from cachemgr.ids import BlockArray, LeaseId, TenantId
from common.errors import TesseraError

NOTHING_TAKEN: Final[BlockArray] = np.zeros(0, np.int32)
NOTHING_TAKEN.setflags(write=False)


class CopyPlan(NamedTuple):
    """One copy-on-write: the first `num_tokens` (1..block_tokens-1) tokens of `source` go to `target`.

    The lease holds `source` until the copy is reported; `target` is in the lease's table already.
    """

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ScopeSpan:
    """The first `num_tokens` tokens of a request lie in a wider scope: its owner's name and the root (32 bytes) of its
    tree. The core cuts it down to whole blocks."""

    owner: TenantId
    root: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """No lease was made: another sequence computes more of this prompt now, up to `coming_tokens` of it."""

    wait_id: int
    resident_tokens: int
    coming_tokens: int


class Acquired(NamedTuple):
    """A granted lease. `blocks` is int32 [ceil(tokens / block_tokens)], or fewer where those are more than the pool has
    (`windows.begins_with`), null where a window has passed them; `cached_tokens` <= tokens - 1.

    `base_tokens` (packed) are those of the kept branch that it continues: they come before the tokens asked for, and
    whole blocks of them lie in the wider scope of `base_span`, if any.
    """

    lease_id: LeaseId
    blocks: BlockArray
    cached_tokens: int
    copy: CopyPlan | None
    base_tokens: bytes = b""
    base_span: ScopeSpan | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """What a released sequence shall become: a kept branch of that name (see `kept_book.py`) for `ttl_ns`."""

    name: bytes
    ttl_ns: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept branch that a released sequence has become; `num_tokens` is all of its token record. An empty `name`:
    there is none, since what it lay in ended while it ran (a purge, a withdrawal)."""

    lease_id: LeaseId
    name: bytes
    num_tokens: int


class SequenceReport(NamedTuple):
    """What one sequence did since its last report.

    taken_blocks:  int32 [n], from the session's credit, appended to the table in this order
    tokens:        packed little-endian int32, appended to the token record
    sealed_tokens: leading tokens that are computed and fenced; never shrinks; 0 means no news
    copied:        the lease's copy plan has run
    release:       the lease ends: what is sealed may be published, the rest is freed
    keep:          with `release`: the sequence becomes a kept branch
    """

    lease_id: LeaseId
    taken_blocks: BlockArray = NOTHING_TAKEN
    tokens: bytes = b""
    sealed_tokens: int = 0
    copied: bool = False
    release: bool = False
    keep: Keep | None = None


SequenceFields = tuple[LeaseId, BlockArray, bytes, int, bool, bool, Keep | None]  # what a `SequenceReport` is made of


class Replacement(NamedTuple):
    """Entries `first_index`.. of the lease's table are now `blocks` (int32): the same tokens, published earlier."""

    lease_id: LeaseId
    first_index: int
    blocks: BlockArray


class Growth(NamedTuple):
    """Credit (int32) for the table of one lease, and of no other."""

    lease_id: LeaseId
    blocks: BlockArray


@dataclass(frozen=True, slots=True)
class Refusal:
    """The report of one sequence was refused; its lease is over."""

    lease_id: LeaseId
    error: TesseraError


class Reported(NamedTuple):
    """The answer to a report; `credit` is int32 [granted], perhaps fewer than wanted; `grown` is credit for sequences
    that stood still, each for its own.

    Duplicates behind `replacements` stay held until a report with `applied_revision` >= `revision`.
    """

    replacements: list[Replacement]
    refusals: list[Refusal]
    credit: BlockArray
    revision: int
    kept: Sequence[Kept] = ()
    grown: Sequence[Growth] = ()


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
