"""How many calls one gateway holds at once, of a tenant and of all. Owns the bounds; a call over one is refused and
never waits.

Called by `gateway/service.py` around each call. While draining it admits nobody.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from common.errors import ResourceExhausted, Unavailable

RETRY_SECONDS: Final = 1.0


class Admission:
    """Counters of running calls with upper bounds: of all, and of a tenant (by default the same)."""

    def __init__(self, limit: int, tenant_limit: int | None = None) -> None:
        self._limit = limit
        self._tenant_limit = limit if tenant_limit is None else tenant_limit
        self._running = 0
        self._tenants: Counter[str] = Counter()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Calls that are held now."""
        return self._running

    @contextmanager
    def hold(self, tenant: str) -> Iterator[None]:
        """Hold one place. Raises ResourceExhausted when all, or all of the tenant's, are taken; Unavailable while
        draining."""
        if self._draining:
            raise Unavailable("the gateway is shutting down", reason="DRAINING", retry_after_seconds=RETRY_SECONDS)
        own = self._tenants[tenant]
        for text, subject, running, limit in (
            (" of this tenant", "tenant_requests", own, self._tenant_limit),
            ("", "gateway_requests", self._running, self._limit),
        ):
            if running >= limit:
                raise ResourceExhausted(
                    f"the gateway holds {running} requests{text}, which is its limit; try again later",
                    subject=subject,
                    needed=running + 1,
                    usable=limit,
                    reason="GATEWAY_FULL",
                    retry_after_seconds=RETRY_SECONDS,
                )
        self._tenants[tenant] = own + 1
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            self._tenants[tenant] -= 1
            if not self._tenants[tenant]:
                del self._tenants[tenant]
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
