"""How many Generate calls one gateway holds at once. Owns the bound; a call over it is refused and never waits.

Called by `gateway/service.py` around each call. While draining it admits nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from common.errors import ResourceExhausted, Unavailable

RETRY_SECONDS: Final = 1.0


class Admission:
    """A counter of running calls with an upper bound."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Calls that are held now."""
        return self._running

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold one place. Raises ResourceExhausted when all are taken, Unavailable while draining."""
        if self._draining:
            raise Unavailable("the gateway is shutting down", reason="DRAINING", retry_after_seconds=RETRY_SECONDS)
        if self._running >= self._limit:
            raise ResourceExhausted(
                f"the gateway holds {self._running} requests, which is its limit; try again later",
                subject="gateway_requests",
                needed=self._running + 1,
                usable=self._limit,
                reason="GATEWAY_FULL",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    def drain(self) -> None:
        """Admit nobody from now on."""
        self._draining = True

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no call is held; False if the time is over first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True
