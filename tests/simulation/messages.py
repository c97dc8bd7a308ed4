"""What decoders say to the daemon and what comes back: the operations of `tessera.cache.v1` without protobuf.

Frozen values, no behaviour. A request carries the number that its answer repeats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cachemgr.claim_plans import Claim
from cachemgr.ids import LeaseId, SessionId
from cachemgr.results import SequenceReport
from cachemgr.resuming import Resumed
from tests.simulation.workload import Request


@dataclass(frozen=True, slots=True)
class Attach:
    """First on a stream; `resume` goes on with the session of an earlier one. `sent_ns` by the decoder's clock."""

    decoder: str
    process_id: int
    sent_ns: int
    resume: Resume | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """What a decoder holds."""

    session: SessionId
    epoch: int
    held: tuple[Claim, ...]
    credit: tuple[int, ...]
    window_blocks: tuple[tuple[int, int], ...] = ()  # (block, its window block) of what is still read or written


@dataclass(frozen=True, slots=True)
class Acquire:
    """Lease the blocks of a sequence."""

    request: Request
    sample: int
    tokens: tuple[int, ...]
    resumed: bool
    may_wait: bool = False
    base: bytes = b""


@dataclass(frozen=True, slots=True)
class Report:
    """One step's news."""

    sequences: tuple[SequenceReport, ...]
    returned: tuple[int, ...]
    wanted: int
    applied_revision: int
    lacking: tuple[LeaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class Fork:
    """Branches of a lease."""

    lease: LeaseId
    samples: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Rollback:
    """Cut a lease back."""

    lease: LeaseId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Publish a lease's first tokens now."""

    lease: LeaseId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class MakeWritable:
    """A block of its own for the next token."""

    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Alive, and nothing to say."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on a stream."""

    sequence: int
    operation: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to request `sequence`: what the manager returned, or the error it raised."""

    sequence: int
    result: Any
    revision: int
    scrub: tuple[int, ...] = ()
    window_blocks: tuple[tuple[int, int], ...] = ()  # (block, its window block) of all blocks that it names
    window_scrub: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Attached:
    """The answer to an attach."""

    session: SessionId
    epoch: int
    resumed: Resumed | None = None


@dataclass(frozen=True, slots=True)
class PrefixReady:
    """A push: a wait is over."""

    wait_id: int


@dataclass(frozen=True, slots=True)
class Reclaim:
    """A push: give unused credit back."""

    num_blocks: int
