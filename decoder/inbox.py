"""The one way into the engine from other threads, and what others may say to it. Owns the order of what comes in.

Invariant: nothing is lost or reordered, and a waiting engine wakes for each item. `put` never blocks, so that it may be
called from an event loop.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.errors import TesseraError
from decoder.outputs import Sink
from decoder.sequence import Request, RequestNumber

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request, with the time it came."""

    request: Request
    sink: Sink
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request, or one sample of it; with `finish` that ended well, and is kept as its request asks."""

    sink: Sink
    number: RequestNumber
    sample: int | None
    finish: bool = False


@dataclass(frozen=True, slots=True)
class Consumed:
    """How far a request's client has read."""

    sink: Sink
    number: RequestNumber
    tokens: int


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A sink is gone."""

    sink: Sink


@dataclass(frozen=True, slots=True)
class Drain:
    """No new requests from now on."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End everything with an error."""

    error: TesseraError


Message = Submit | Cancel | Consumed | Disconnect | Drain | Stop


class Inbox(Generic[Item]):
    """A queue for many writers and one reader that waits passively."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._ready = threading.Condition()

    def put(self, item: Item) -> None:
        """Add an item and wake the reader."""
        with self._ready:
            self._items.append(item)
            self._ready.notify()

    def take(self) -> Item | None:
        """The oldest item, or None."""
        try:
            return self._items.popleft()
        except IndexError:
            return None

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait until there is an item; False if the time passed first. None waits for ever."""
        with self._ready:
            return self._ready.wait_for(lambda: bool(self._items), timeout_seconds)
