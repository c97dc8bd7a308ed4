"""The session with the cache manager over gRPC: commands out, events in, one stream at a time, attached anew when lost.

Invariants: commands go out in the order of `send` and those of another session are dropped; an answer that is missing,
out of order or late ends the session; a new one is opened only after the engine has let go of the old (`resume`). Runs
on the IO event loop (`run`); the engine's thread calls the rest and never waits. The only module of the decoder that
speaks `tessera.cache.v1`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from common.arena_wire import PROTOCOL_VERSION
from common.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    TesseraError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from common.interceptors import error_from_rpc
from common.layout import KvLayout
from common.logs import get_logger
from common.rpc import open_channel
from decoder.arena_view import map_arena
from decoder.cache_api import AcquireRefused, Attached, Command, Event, Forked, Lost, Report
from decoder.cache_messages import Pending, event_of, failure_error, layout_message, request_of
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc
from tessera.common.v1 import common_pb2

FIRST_DELAY_SECONDS: Final = 0.1
LONGEST_DELAY_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 2.0
# A daemon that answers so will answer so again: this decoder does not fit it.
_FATAL: Final = (FailedPrecondition, InvalidArgument, Unauthenticated, Unimplemented)


@dataclass(frozen=True, slots=True)
class SessionTarget:
    """Where the cache manager is and what this decoder is to it."""

    target: str
    secret: str
    arena_socket: Path
    layout: KvLayout
    key: common_pb2.CacheKey
    decoder_name: str


class GrpcCacheClient:
    """A `CacheClient` over `CacheService.Session`. Make it on the event loop that `run` will be awaited on."""

    def __init__(self, target: SessionTarget, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._target = target
        self._answer_seconds = answer_seconds
        self._loop = asyncio.get_running_loop()
        self._post: Callable[[Event], None] = lambda event: None
        self._outgoing: deque[tuple[int, Command]] = deque()
        self._wake = asyncio.Event()
        self._resumed = asyncio.Event()
        self._abandoned = asyncio.Event()
        self._closing = False
        self._flushed = asyncio.Event()
        self._session: int | None = None
        self._pending: deque[tuple[int, float, Pending]] = deque()
        self._sequence = 0
        self._applied_revision = 0
        self._log = get_logger()

    # ---- from the engine's thread

    def start(self, post: Callable[[Event], None]) -> None:
        """Post events to `post` from now on; call it before `run`."""
        self._post = post

    def send(self, session: int, command: Command) -> None:
        """Queue a command of `session`."""
        self._outgoing.append((session, command))
        self._call(self._wake.set)

    def abandon(self, session: int) -> None:
        """End the session; `Lost` follows."""
        self._call(self._abandoned.set)

    def resume(self) -> None:
        """A new session may be opened."""
        self._call(self._resumed.set)

    def _call(self, action: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(action)

    # ---- on the event loop

    async def run(self) -> None:
        """Keep a session open until `close`. Raises the TesseraError of a daemon that this decoder cannot work with."""
        delay = FIRST_DELAY_SECONDS
        while not self._closing:
            error = await self._run_session()
            if self._session is not None:
                if not self._closing:
                    self._log.warning("session_lost", session=self._session, reason=error.reason)
                self._resumed.clear()
                self._post(Lost(self._session, Unavailable("the cache manager went away", reason="SESSION_LOST")))
                self._session = None
                if self._closing:
                    return
                await self._resumed.wait()
                delay = FIRST_DELAY_SECONDS
            elif isinstance(error, _FATAL):
                raise error
            else:
                self._log.info("attach_failed", reason=error.reason, message=error.message)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)

    async def close(self) -> None:
        """Send what is queued, then end the session."""
        self._closing = True
        self._wake.set()
        if self._session is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._flushed.wait(), CLOSE_SECONDS)
        self._abandoned.set()

    async def _run_session(self) -> TesseraError:
        # Returns why the session ended; what is not a TesseraError is a defect and leaves through `run`.
        self._outgoing.clear()
        self._pending.clear()
        self._wake.clear()
        self._abandoned.clear()
        self._sequence = self._applied_revision = 0
        channel = open_channel(self._target.target, self._target.secret)
        try:
            call = cache_pb2_grpc.CacheServiceStub(channel).Session()  # type: ignore[no-untyped-call,unused-ignore]
            await self._attach(call)
            tasks = [asyncio.create_task(job) for job in (self._read(call), self._write(call), self._watch())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                call.cancel()
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)
        except TesseraError as error:
            return error
        finally:
            await channel.close()
        return Unavailable("the session was closed")

    async def _attach(self, call: Any) -> None:
        target = self._target
        attach = cache_pb2.AttachRequest(
            protocol_version=PROTOCOL_VERSION,
            decoder_name=target.decoder_name,
            layout=layout_message(target.layout),
            process_id=os.getpid(),
        )
        self._sequence = 1
        await call.write(cache_pb2.SessionRequest(sequence=1, attach=attach))
        response = await call.read()
        if response is grpc.aio.EOF:
            raise Unavailable("the cache manager closed the session")
        if response.WhichOneof("result") == "failure":
            raise failure_error(response.failure)
        answer = response.attach
        if answer.layout_fingerprint != target.layout.fingerprint():
            raise FailedPrecondition("the cache manager holds another KV layout", reason="LAYOUT_MISMATCH")
        arena = await asyncio.to_thread(
            map_arena, target.arena_socket, answer.arena_token, target.layout, answer.num_blocks
        )
        self._session = answer.session_id
        self._post(Attached(answer.session_id, answer.num_blocks, arena))

    async def _write(self, call: Any) -> None:
        while True:
            while self._outgoing:
                session, command = self._outgoing.popleft()
                if session == self._session:
                    await call.write(self._request(command))
            if self._closing:
                await call.done_writing()
                self._flushed.set()
            self._wake.clear()
            if not self._outgoing:
                await self._wake.wait()

    def _request(self, command: Command) -> cache_pb2.SessionRequest:
        self._sequence += 1
        if isinstance(command, Report):
            self._applied_revision = command.applied_revision
        self._pending.append((self._sequence, self._loop.time(), Pending.of(command)))
        return request_of(command, self._sequence, self._applied_revision, self._target.key)

    async def _read(self, call: Any) -> None:
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                raise Unavailable("the cache manager closed the session")
            for event in self._events(response):
                self._post(event)

    def _events(self, response: cache_pb2.SessionResponse) -> list[Event]:
        if not response.sequence:
            return event_of(response, None)
        if not self._pending or self._pending[0][0] != response.sequence:
            raise Internal("the cache manager left an operation unanswered", reason="ANSWER_MISSING")
        pending = self._pending.popleft()[2]
        events = event_of(response, pending)
        if response.WhichOneof("result") == "failure" and not any(
            isinstance(event, AcquireRefused | Forked) for event in events
        ):
            raise failure_error(response.failure)  # a refused report: what the two sides know differs
        return events

    async def _watch(self) -> None:
        # Ends the session when it is given up, or when an answer is overdue.
        while not self._abandoned.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._abandoned.wait(), self._answer_seconds / 4)
            if self._pending and self._loop.time() - self._pending[0][1] > self._answer_seconds:
                raise Unavailable("the cache manager does not answer", reason="ANSWER_LATE")
