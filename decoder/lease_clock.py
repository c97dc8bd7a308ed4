"""How long this decoder's leases are surely alive, by its own clock.

Invariant: an answer proves that the cache manager heard the operation after it was sent, so the leases live for
`lease_seconds` from the sending; never for longer than the cache manager counts. Written on the event loop, read from
any thread.
"""

from __future__ import annotations

import math
import time
from typing import Final

HEARTBEATS_PER_LEASE: Final = 3
NEVER: Final = math.inf


class LeaseClock:
    """`lease_seconds` and `grace_seconds` are those of the last attach; before it nothing runs out."""

    def __init__(self) -> None:
        self.lease_seconds = NEVER
        self.grace_seconds = 0.0
        self._until = NEVER

    def start(self, sent: float, lease_seconds: float, grace_seconds: float) -> None:
        """A session was granted by the answer to an attach that was sent at `sent` (monotonic seconds)."""
        self.lease_seconds = lease_seconds or NEVER
        self.grace_seconds = grace_seconds
        self._until = sent + self.lease_seconds

    def answered(self, sent: float) -> None:
        """An operation that was sent at `sent` has been answered."""
        self._until = max(self._until, sent + self.lease_seconds)

    @property
    def has_lapsed(self) -> bool:
        """Whether the leases may be over."""
        return time.monotonic() > self._until

    @property
    def is_hopeless(self) -> bool:
        """Whether the grace time is over too: a living cache manager has ended the session."""
        return time.monotonic() > self._until + self.grace_seconds

    @property
    def heartbeat_seconds(self) -> float:
        """After so much silence a heartbeat is due."""
        return self.lease_seconds / HEARTBEATS_PER_LEASE
