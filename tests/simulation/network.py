"""Streams between decoders and the daemon, as gRPC keeps them: in order, whole, until they break.

Invariants: a direction delivers in the order of sending; after a break nothing more is sent, of what was on its way
some leading part still arrives, and each side is told of the end once, in its own time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.kernel import Kernel


@dataclass(frozen=True, slots=True)
class End:
    """The last thing that a side hears of a stream."""


class Direction:
    """One way of a stream."""

    def __init__(self, kernel: Kernel, link: Link, deliver: Callable[[Link, Any], object]) -> None:
        self._kernel = kernel
        self._link = link
        self._deliver = deliver
        self._queue: deque[tuple[int, Any]] = deque()
        self._last = 0
        self._pumping = False
        self.closed = False

    def send(self, message: Any, *, extra: int = 0) -> None:
        """Puts a message on its way, unless the way is closed."""
        if self.closed:
            return
        kernel = self._kernel
        self._last = max(self._last, kernel.now + kernel.between(50, 50 + self._link.latency) + extra)
        self._queue.append((self._last, message))
        if not self._pumping:
            self._pumping = True
            kernel.after(self._last - kernel.now, self._pump)

    def close(self, delay: int, *, lose: bool) -> None:
        """Ends the way: with `lose`, only some leading part of what is on it still arrives."""
        if self.closed:
            return
        if lose:
            for _ in range(self._kernel.between(0, len(self._queue))):
                self._queue.pop()
        self.send(End(), extra=delay)
        self.closed = True

    def silence(self) -> None:
        """Nobody is there to hear any more."""
        self._queue.clear()
        self.closed = True

    def _pump(self) -> None:
        kernel = self._kernel
        if not self._queue:
            self._pumping = False
            return
        ready = max(self._queue[0][0], self._link.held_until)
        if kernel.now < ready:
            kernel.after(ready - kernel.now, self._pump)
            return
        message = self._queue.popleft()[1]
        kernel.after(0, self._pump)
        self._deliver(self._link, message)


class Link:
    """One stream of one decoder process."""

    def __init__(
        self,
        kernel: Kernel,
        number: int,
        latency: int,
        to_daemon: Callable[[Link, Any], object],
        to_decoder: Callable[[Link, Any], object],
    ) -> None:
        self.number = number
        self.latency = latency
        self.held_until = 0
        self.up = Direction(kernel, self, to_daemon)
        self.down = Direction(kernel, self, to_decoder)
        self._kernel = kernel

    def cut(self) -> None:
        """The stream breaks; either side may see it first."""
        self.up.close(self._kernel.between(0, 4000), lose=True)
        self.down.close(self._kernel.between(0, 4000), lose=True)

    def hold(self, microseconds: int) -> None:
        """A partition: nothing moves for so long, and nothing is lost."""
        self.held_until = max(self.held_until, self._kernel.now + microseconds)
