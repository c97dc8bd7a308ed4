"""Simulated time: one queue of events, one source of randomness, one trace.

Invariant: everything that happens follows from the seed. No module of the simulation reads a clock, iterates over a
set of strings or draws from another source. Called by every other module here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

MILLISECOND = 1000  # time counts in microseconds


class Violation(AssertionError):
    """A rule that must never break is broken."""


class Kernel:
    """The clock of one simulated node. `now` is in microseconds."""

    def __init__(self, seed: int, *, echo: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0
        self.lines: list[str] = []
        self._echo = echo
        self._events: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = 0

    @property
    def now_ns(self) -> int:
        """The time as the cache manager counts it."""
        return self.now * 1000

    def after(self, delay: int, action: Callable[..., object], *arguments: Any) -> None:
        """Runs `action` in `delay` microseconds, after everything that was asked for the same moment before."""
        self._order += 1
        heappush(self._events, (self.now + delay, self._order, action, arguments))

    def run_one(self) -> bool:
        """Runs the next event; False where there is none."""
        if not self._events:
            return False
        self.now, _, action, arguments = heappop(self._events)
        action(*arguments)
        return True

    def chance(self, probability: float) -> bool:
        """True as often as `probability` says. Draws nothing where it is 0."""
        return probability > 0 and self.random.random() < probability

    def between(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return low + int(self.random.random() * (high - low + 1))

    def say(self, line: str) -> None:
        """Adds a line to the trace."""
        line = f"{self.now / MILLISECOND:9.3f} {line}"
        self.lines.append(line)
        if self._echo:
            print(line)

    @property
    def digest(self) -> str:
        """Names the trace: equal traces have equal digests."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=16).hexdigest()
