"""The event log: what changed, in order, for subscribers that resume where they were.

Invariant: sequence numbers grow by exactly one from 1, whatever is forgotten; what is known is always the newest run of
them. Bounded in events and in block numbers. Pure: the time is passed in, nothing is formatted and nobody is called, so
that adding one costs less than a microsecond. Written by the manager's modules and by the admin service (what operators
changed); read by the admin service. An event holds numbers and short words, never a token: those are looked up when
somebody asks (`event_blocks.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice, repeat
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from cachemgr.ids import BlockRun
from cachemgr.nodes import NO_BLOCKS
from common.errors import OutOfRange

MAX_EVENTS: Final = 32_768
MAX_BLOCKS: Final = 524_288  # block numbers in all events together: 4 MiB


class Event(NamedTuple):
    """One change. `owner` is an owner number of the core, `tenant` a name where the log's writer knows no numbers.

    blocks:     what it is about; never written again by whoever passed it
    generation: of the last block, so that a later reader sees whether it still is what it was
    detail:     more of it; values are words or numbers, never of a prompt
    """

    kind: str
    now_ns: int
    owner: int
    session: int
    lease: int
    blocks: BlockRun
    generation: int
    tenant: str
    detail: Mapping[str, object]


# The fields of an `Event`. A single block is a number, and no detail is None: such a tuple the garbage collector leaves
# alone once it has seen it.
_Stored = tuple[str, int, int, int, int, BlockRun | int, int, str, Mapping[str, object] | None]
_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})
_BLOCKS: Final = 5  # the place of `blocks` in an `Event`


class EventLog:
    """A ring of the newest events."""

    def __init__(self, max_events: int = MAX_EVENTS, max_blocks: int = MAX_BLOCKS) -> None:
        self._ring: deque[_Stored] = deque()
        self._max_events = max_events
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self.last_sequence = 0

    @property
    def oldest_sequence(self) -> int:
        """The first event that is still known; `last_sequence` + 1 where none is."""
        return self.last_sequence - len(self._ring) + 1

    def add(
        self,
        kind: str,
        now_ns: int,
        owner: int = 0,
        session: int = 0,
        lease: int = 0,
        blocks: BlockRun = NO_BLOCKS,
        generation: int = 0,
        tenant: str = "",
        detail: Mapping[str, object] | None = None,
        **more: object,
    ) -> None:
        """Appends an event, forgetting the oldest where there are too many. `more` is its detail where `detail` is not
        given as a whole."""
        stored: BlockRun | int = blocks
        if blocks is not NO_BLOCKS:
            count = len(blocks)
            self._num_blocks += count
            base = blocks.base  # an array, or whatever else has the memory
            if count == 1:
                stored = blocks.item(0)
            elif base is not None and getattr(base, "size", self._max_blocks + 1) > count:
                stored = blocks.copy()  # a view would keep all that it is a part of
        # A plain tuple costs a third of an `Event`; who reads makes one of it.
        self._ring.append((kind, now_ns, owner, session, lease, stored, generation, tenant, detail or more or None))
        self._added(1)

    def add_each(
        self,
        kind: str,
        now_ns: int,
        session: int,
        owners: Sequence[int],
        leases: Sequence[int],
        blocks: Sequence[int],
        generations: Sequence[int],
    ) -> None:
        """As `add` of one event for each lease, about one block: a column of each."""
        self._num_blocks += len(blocks)
        kinds, times, sessions, tenant, nothing = map(repeat, (kind, now_ns, session, "", None))
        self._ring.extend(
            zip(kinds, times, owners, sessions, leases, blocks, generations, tenant, nothing, strict=False)
        )
        self._added(len(blocks))

    def _added(self, count: int) -> None:
        """Counts what was appended, and forgets what is too much."""
        ring = self._ring
        self.last_sequence += count
        while len(ring) > self._max_events or (self._num_blocks > self._max_blocks and len(ring) > 1):
            blocks = ring.popleft()[_BLOCKS]
            self._num_blocks -= 1 if isinstance(blocks, int) else len(blocks)

    def since(self, sequence: int, limit: int = MAX_EVENTS) -> list[tuple[int, Event]]:
        """At most `limit` events after `sequence`, the oldest first, each with its own number.

        Raises OutOfRange, with the numbers that are known, where the next event is forgotten or `sequence` is ahead.
        """
        missing = self.last_sequence - sequence
        if missing < 0 or missing > len(self._ring):
            raise OutOfRange(
                f"after_sequence is {sequence}; known are events {self.oldest_sequence}..{self.last_sequence}",
                reason="SEQUENCE_UNKNOWN",
                metadata={"oldest_sequence": str(self.oldest_sequence), "last_sequence": str(self.last_sequence)},
            )
        newest = list(islice(reversed(self._ring), missing))
        newest.reverse()
        return [(number, _event(item)) for number, item in enumerate(newest[:limit], start=sequence + 1)]


def _event(stored: _Stored) -> Event:
    kind, now_ns, owner, session, lease, blocks, generation, tenant, detail = stored
    run = np.array((blocks,), np.intp) if isinstance(blocks, int) else blocks
    return Event(kind, now_ns, owner, session, lease, run, generation, tenant, _NOTHING if detail is None else detail)
