"""What the engine says to a cache manager and what comes back: typed values and the `CacheClient` protocol.

Commands go out through `CacheClient.send` and never wait; answers and pushes come back as events through the `post`
callable given to `start`, in the order of the session. Invariant: a command carries the session it was made for, and a
client drops commands of any other session, so that nothing said to a lost session reaches a new one. No protobuf here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from common.errors import TesseraError
from decoder.holdings import Holdings
from decoder.sequence import CopyPlan, IntArray, LeaseId, ScopePrefix, SequenceId

Arena = Any  # [num_blocks + 1, ...] as `KvLayout.array_shape` says, an array or a tensor; with groups a GroupedArena
POOL_FULL = "POOL_FULL"
OVER_CEILING = "QUOTA_EXCEEDED"


def _no_blocks() -> IntArray:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Acquire:
    """Lease the blocks of all `tokens` (packed little-endian int32) for a sequence."""

    sequence_id: SequenceId
    grant: bytes = field(repr=False)
    tokens: bytes = field(repr=False)
    request_id: str
    sample: int
    no_read: bool
    no_store: bool
    resumed: bool
    priority: int
    ttl_seconds: float = 0.0
    scope: ScopePrefix | None = None
    may_wait: bool = False
    base_handle: bytes = field(default=b"", repr=False)
    base_tokens: int = 0
    will_keep: bool = False
    adapter_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class SequenceReport:
    """What one sequence did since its last report. `sealed_tokens` 0 means no news; `tokens` are packed. With
    `keep_seconds` a released sequence becomes a kept branch."""

    lease_id: LeaseId
    taken_blocks: IntArray = field(default_factory=_no_blocks)
    tokens: bytes = field(default=b"", repr=False)
    sealed_tokens: int = 0
    copied: bool = False
    release: bool = False
    keep_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What steps did, in one message. `lacking` are leases that stand still, best ranked first, each as often as it
    lacks a block."""

    sequences: tuple[SequenceReport, ...]
    returned: IntArray
    wanted: int
    generated_tokens: int
    preemptions: int
    queued: int
    applied_revision: int
    lacking: tuple[LeaseId, ...] = ()


@dataclass(frozen=True, slots=True)
class Fork:
    """Make one branch for each of `samples`, sharing the first `num_tokens` tokens of `lease`."""

    sequence_id: SequenceId
    lease: LeaseId
    samples: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AbortDone:
    """Answers an abort."""

    abort_id: int
    found: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Says that the decoder lives; the client sends it by itself when it has been silent for a while."""


Command = Acquire | Report | Fork | AbortDone | Heartbeat


@dataclass(frozen=True, slots=True)
class Attached:
    """A session is there and its arena is mapped."""

    session: int
    num_blocks: int
    arena: Arena


@dataclass(frozen=True, slots=True)
class Lost:
    """The session is over, with every lease and all credit. Nothing is written any more once `resume` is called."""

    session: int
    error: TesseraError


@dataclass(frozen=True, slots=True)
class Away:
    """The stream broke: `present` what is held now. The engine goes on with that, and sends nothing before `Resumed`;
    what was sent last may not have arrived. Comes again, with a `number` above 0, when there is a new stream: what is
    presented then, and no other, is what `Resumed` goes on from."""

    session: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """The session goes on with what was presented last. `leases` has the new lease of each old one that could be kept;
    `replacements` name new leases and count as those of a report's answer of `revision`."""

    session: int
    leases: dict[LeaseId, LeaseId]
    replacements: tuple[Replacement, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Acquired:
    """Answers Acquire: a lease. `base_tokens` are those of the kept branch that it continues; they begin in
    `base_scope`, in which the sequence is asked for from now on."""

    sequence_id: SequenceId
    lease: LeaseId
    blocks: IntArray
    cached_tokens: int
    copy: CopyPlan | None
    base_tokens: IntArray = field(default_factory=_no_blocks, repr=False)
    base_scope: ScopePrefix | None = None


@dataclass(frozen=True, slots=True)
class AcquireWaiting:
    """Answers Acquire without a lease: another sequence computes more than the `resident_tokens` of this one's."""

    sequence_id: SequenceId
    wait_id: int
    resident_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixReady:
    """What was waited for is there, or nobody computes it any more."""

    wait_id: int


@dataclass(frozen=True, slots=True)
class AcquireRefused:
    """Answers Acquire with an error; the daemon changed nothing."""

    sequence_id: SequenceId
    error: TesseraError


@dataclass(frozen=True, slots=True)
class Replacement:
    """Use `blocks` from `first_index` of the lease's table on."""

    lease: LeaseId
    first_index: int
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class Kept:
    """A released lease has become a kept branch of `num_tokens` tokens; an empty handle: what it lay in has ended, and
    nothing is kept."""

    lease: LeaseId
    handle: bytes = field(repr=False)
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Credit (int32) for the table of one lease alone."""

    lease: LeaseId
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class Reported:
    """Answers Report. `wanted` repeats the report's; `refused` leases are over; `grown` ones need not stand still."""

    wanted: int
    granted: IntArray
    replacements: tuple[Replacement, ...]
    refused: tuple[tuple[LeaseId, TesseraError], ...]
    revision: int
    kept: tuple[Kept, ...] = ()
    grown: tuple[Growth, ...] = ()


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch of a fork."""

    lease: LeaseId
    blocks: IntArray
    copy: CopyPlan | None


@dataclass(frozen=True, slots=True)
class Forked:
    """Answers Fork: the branches in order, or none where there was no room."""

    sequence_id: SequenceId
    branches: tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class AbortAsked:
    """The operator wants a request ended."""

    abort_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class CreditGranted:
    """Blocks that came with another message than a report's answer."""

    blocks: IntArray


@dataclass(frozen=True, slots=True)
class WindowBlocksNamed:
    """Which window blocks the blocks of the next events have: rows (block, its window block), int32 [n, 2]."""

    pairs: IntArray


@dataclass(frozen=True, slots=True)
class Scrub:
    """These blocks and window blocks, handed over with the next event, hold another tenant's keys and values: zero them
    first."""

    blocks: IntArray
    window_blocks: IntArray = field(default_factory=_no_blocks)


@dataclass(frozen=True, slots=True)
class CreditReclaimed:
    """The daemon wants unused credit back."""

    num_blocks: int


SessionChange = Attached | Away | Resumed | Lost
Admission = Acquired | AcquireWaiting | PrefixReady | AcquireRefused
Lending = CreditGranted | CreditReclaimed | WindowBlocksNamed | Scrub
Event = SessionChange | Admission | Reported | Forked | AbortAsked | Lending


class CacheClient(Protocol):
    """One session after the other with a cache manager. Every method may be called from the engine's thread."""

    def start(self, post: Callable[[Event], None]) -> None:
        """Begin; events go to `post`, which never blocks, from any thread."""

    def send(self, session: int, command: Command) -> None:
        """Send a command of `session`; dropped silently if that session is over. Never waits."""

    def abandon(self, session: int) -> None:
        """End a session whose state cannot be trusted any more; `Lost` follows."""

    def present(self, session: int, holdings: Holdings) -> None:
        """Answers `Away`: what the engine holds of a session between two steps."""

    def is_fenced(self, session: int) -> bool:
        """Whether the session's leases may have run out, by the decoder's own clock: what was read since then may have
        been somebody else's, so that nothing computed may be given out before an answer says otherwise."""

    def resume(self) -> None:
        """The engine has stopped writing to the lost arena: a new session may be opened."""
