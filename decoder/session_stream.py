"""One stream of a session: commands out in their order, answers matched to them, heartbeats, and overdue answers.

Invariant: the n-th answer belongs to the n-th operation; an answer that is missing, out of order or late ends the
stream. A `Refused` is the cache manager's word on the session itself, anything else is a broken stream.
Runs on the IO event loop; made by the cache client for each stream, which decides what an end means.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import grpc

from common.errors import Internal, TesseraError, Unavailable
from common.interceptors import error_from_rpc
from decoder.cache_api import AcquireRefused, Command, Event, Forked, Heartbeat, Report
from decoder.cache_messages import Pending, event_of, failure_error, request_of
from decoder.lease_clock import LeaseClock
from tessera.cache.v1 import cache_pb2
from tessera.common.v1 import common_pb2

LOOKS_PER_HEARTBEAT: Final = 2
# The last two: something was written to a call that has just ended.
_BROKEN: Final = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)


class Refused(Exception):
    """The cache manager refused the session, or an operation that must not be refused: `error` says why."""

    def __init__(self, error: TesseraError) -> None:
        super().__init__(error.message)
        self.error = error


class SessionStream:
    """A call of `CacheService.Session`. `outgoing` holds (session, command) to send; others are dropped."""

    def __init__(
        self,
        call: Any,
        *,
        key: common_pb2.CacheKey,
        outgoing: deque[tuple[int, Command]],
        post: Callable[[Event], None],
        clock: LeaseClock,
        answer_seconds: float,
    ) -> None:
        self.wake = asyncio.Event()  # something was put into `outgoing`, or `finish` was called
        self.ended = asyncio.Event()
        self._call = call
        self._key = key
        self._outgoing = outgoing
        self._post = post
        self._clock = clock
        self._answer_seconds = answer_seconds
        self._pending: deque[tuple[int, float, Pending]] = deque()
        self._sequence = 0
        self._applied_revision = 0
        self._last_sent = time.monotonic()
        self._finishing = False

    async def attach(self, attach: cache_pb2.AttachRequest) -> tuple[cache_pb2.SessionResponse, float]:
        """Send an attach: its answer, and when it was sent. Raises Refused, or a TesseraError of a broken stream."""
        self._sequence += 1
        sent = time.monotonic()
        try:
            async with asyncio.timeout(self._answer_seconds):
                await self._call.write(cache_pb2.SessionRequest(sequence=self._sequence, attach=attach))
                response = await self._call.read()
        except TimeoutError:
            raise Unavailable("the cache manager does not answer", reason="ANSWER_LATE") from None
        except _BROKEN as error:
            raise _error_of(error) from None
        if response is grpc.aio.EOF:
            raise Unavailable("the cache manager closed the session")
        if response.WhichOneof("result") == "failure":
            raise Refused(failure_error(response.failure))
        return response, sent

    async def run(self, session: int, abandoned: asyncio.Event) -> TesseraError:
        """Serve an attached session until the stream ends, or `abandoned` is set; why it ended. Raises Refused."""
        jobs = (self._read(), self._write(session), self._watch(session, abandoned))
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except _BROKEN as error:
            return _error_of(error)
        except TesseraError as error:
            return error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.ended.set()
        return Unavailable("the session was closed")

    def finish(self) -> None:
        """Send what is queued, then close our side; the cache manager ends the session and the stream."""
        self._finishing = True
        self.wake.set()

    async def _write(self, session: int) -> None:
        while True:
            while self._outgoing:
                wanted, command = self._outgoing.popleft()
                if wanted == session:
                    await self._call.write(self._request(command))
            if self._finishing:
                await self._call.done_writing()
                await self.ended.wait()
            self.wake.clear()
            if not self._outgoing:
                await self.wake.wait()

    def _request(self, command: Command) -> cache_pb2.SessionRequest:
        self._sequence += 1
        if isinstance(command, Report):
            self._applied_revision = command.applied_revision
        self._last_sent = time.monotonic()
        self._pending.append((self._sequence, self._last_sent, Pending.of(command)))
        return request_of(command, self._sequence, self._applied_revision, self._key)

    async def _read(self) -> None:
        while True:
            response = await self._call.read()
            if response is grpc.aio.EOF:
                raise Unavailable("the cache manager closed the session")
            for event in self._events(response):
                self._post(event)

    def _events(self, response: cache_pb2.SessionResponse) -> list[Event]:
        if not response.sequence:
            return event_of(response, None)
        if not self._pending or self._pending[0][0] != response.sequence:
            raise Internal("the cache manager left an operation unanswered", reason="ANSWER_MISSING")
        _, sent, pending = self._pending.popleft()
        try:
            events = event_of(response, pending)
        except TesseraError as error:
            raise Refused(error) from None
        if response.WhichOneof("result") == "failure" and not any(
            isinstance(event, AcquireRefused | Forked) for event in events
        ):
            raise Refused(failure_error(response.failure))  # what the two sides know differs
        self._clock.answered(sent)
        return events

    async def _watch(self, session: int, abandoned: asyncio.Event) -> None:
        # Ends the stream when it is given up, or when an answer is overdue; says that we live when it was silent.
        bound = min(self._answer_seconds, self._clock.lease_seconds)
        pause = min(self._answer_seconds / 4, self._clock.heartbeat_seconds / LOOKS_PER_HEARTBEAT)
        while not abandoned.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(abandoned.wait(), pause)
            now = time.monotonic()
            if self._pending:
                if now - self._pending[0][1] > bound:
                    raise Unavailable("the cache manager does not answer", reason="ANSWER_LATE")
            elif now - self._last_sent >= self._clock.heartbeat_seconds - pause:
                self._outgoing.append((session, Heartbeat()))
                self.wake.set()


def _error_of(error: Exception) -> TesseraError:
    if isinstance(error, grpc.aio.AioRpcError):
        return error_from_rpc(error)
    return Unavailable("the stream of the session broke")
