"""Aborts that decoders were asked for and have not answered yet.

Invariant: an abort ends with the first decoder that knew the request, or when every one that was asked has answered or
gone, or when time is up. Called by the session registry on the daemon's event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from cachemgr.ids import SessionId

ABORT_SECONDS: Final = 2.0


@dataclass(eq=False, slots=True)
class _Abort:
    result: asyncio.Future[bool]
    waiting: set[SessionId]


class Aborts:
    """Numbers aborts and gathers their answers."""

    def __init__(self) -> None:
        self._open: dict[int, _Abort] = {}
        self._last = 0

    def next_id(self) -> int:
        """The number of a new abort."""
        self._last += 1
        return self._last

    async def result(self, abort_id: int, asked: set[SessionId]) -> bool:
        """Whether one of `asked` knew the request. Waits at most ABORT_SECONDS."""
        if not asked:
            return False
        abort = self._open[abort_id] = _Abort(asyncio.get_running_loop().create_future(), asked)
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                return await abort.result
        except TimeoutError:
            return False
        finally:
            del self._open[abort_id]

    def answered(self, session: SessionId, abort_id: int, *, found: bool) -> None:
        """A decoder's answer; one that comes late or was not asked for is ignored."""
        abort = self._open.get(abort_id)
        if abort is not None:
            _settle(abort, session, found=found)

    def gone(self, session: SessionId) -> None:
        """A decoder that will not answer any more."""
        for abort in self._open.values():
            _settle(abort, session, found=False)


def _settle(abort: _Abort, session: SessionId, *, found: bool) -> None:
    if session not in abort.waiting or abort.result.done():
        return
    abort.waiting.discard(session)
    if found or not abort.waiting:
        abort.result.set_result(found)
