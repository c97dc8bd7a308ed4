"""The session with the cache manager over gRPC: commands out, events in; gone back to when its stream breaks, attached
anew when it is over.

Invariants: commands go out in the order of `send` and those of another session are dropped; a broken stream is followed
by a resume of what the engine presents, and only where that is refused, or hopeless, by the end of the session; a new
one is opened only after the engine has let go of the old (`resume`). Runs on the IO event loop (`run`); the engine's
thread calls the rest and never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Final

import grpc

from common.errors import (
    FailedPrecondition,
    InvalidArgument,
    TesseraError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from common.logs import get_logger
from common.rpc import open_channel
from decoder.arena_view import MappedArena, map_arena
from decoder.cache_api import Attached, Away, Command, Event, Lost
from decoder.cache_messages import window_events
from decoder.holdings import Holdings
from decoder.lease_clock import LeaseClock
from decoder.resume_messages import SessionProof, resume_message, resumed_event
from decoder.session_stream import Refused, SessionStream
from decoder.session_target import SessionTarget
from tessera.cache.v1 import cache_pb2_grpc

FIRST_DELAY_SECONDS: Final = 0.1
LONGEST_DELAY_SECONDS: Final = 2.0
CONNECT_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 30.0
CLOSE_SECONDS: Final = 2.0
# A daemon that answers so will answer so again: this decoder does not fit it.
_FATAL: Final = (FailedPrecondition, InvalidArgument, Unauthenticated, Unimplemented)


class GrpcCacheClient:
    """A `CacheClient` over `CacheService.Session`. Make it on the event loop that `run` will be awaited on."""

    def __init__(self, target: SessionTarget, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._target = target
        self._answer_seconds = answer_seconds
        self._loop = asyncio.get_running_loop()
        self._post: Callable[[Event], None] = lambda event: None
        self._outgoing: deque[tuple[int, Command]] = deque()
        self._clock = LeaseClock()
        self._stream: SessionStream | None = None
        self._proof: SessionProof | None = None  # of the session that we have, its stream whole or broken
        self._memory: MappedArena | None = None
        self._presented: asyncio.Future[Holdings] | None = None
        self._asked = 0
        self._resumed = asyncio.Event()
        self._abandoned = asyncio.Event()
        self._closing = False
        self._log = get_logger()

    # ---- from the engine's thread

    def start(self, post: Callable[[Event], None]) -> None:
        """Post events to `post` from now on; call it before `run`."""
        self._post = post

    def send(self, session: int, command: Command) -> None:
        """Queue a command of `session`."""
        self._outgoing.append((session, command))
        self._call(self._wake)

    def abandon(self, session: int) -> None:
        """End the session; `Lost` follows."""
        self._call(self._abandoned.set)

    def resume(self) -> None:
        """A new session may be opened."""
        self._call(self._resumed.set)

    def present(self, session: int, holdings: Holdings) -> None:
        """What the engine holds of a session whose stream broke; it sends nothing more before `Resumed`."""
        self._call(lambda: self._take_holdings(holdings))

    def is_fenced(self, session: int) -> bool:
        """Whether the session is over, or its leases may be."""
        proof = self._proof
        return proof is None or proof.session != session or self._clock.has_lapsed

    def _call(self, action: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(action)

    # ---- on the event loop

    async def run(self) -> None:
        """Keep a session open until `close`. Raises the TesseraError of a daemon that this decoder cannot work with."""
        delay = FIRST_DELAY_SECONDS
        while not self._closing:
            error, is_final = await self._run_stream()
            proof = self._proof
            if proof is None:
                if isinstance(error, _FATAL):
                    raise error
                self._log.info("attach_failed", reason=error.reason, message=error.message)
            elif self._stream is not None and proof.resume_token and not is_final and self._keeps_memory:
                self._log.warning("session_broken", session=proof.session, reason=error.reason)
                self._stream, delay = None, FIRST_DELAY_SECONDS
                self._post(Away(proof.session))
                continue  # back at once, however late it is: only the cache manager knows whether it is too late
            elif is_final or self._stream is not None or self._clock.is_hopeless:
                await self._lose(proof, error)
                delay = FIRST_DELAY_SECONDS
            if not self._closing:
                await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)

    async def close(self) -> None:
        """Send what is queued, then end the session."""
        self._closing = True
        if self._stream is not None:
            self._stream.finish()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stream.ended.wait(), CLOSE_SECONDS)
        self._abandoned.set()

    async def _lose(self, proof: SessionProof, error: TesseraError) -> None:
        if not self._closing:
            self._log.warning("session_lost", session=proof.session, reason=error.reason)
        self._proof = self._stream = None
        self._resumed.clear()
        told = "the decoder of this request lost its session with the cache manager; try again"
        self._post(Lost(proof.session, Unavailable(told, reason="SESSION_LOST")))
        if not self._closing:
            await self._resumed.wait()
        self._outgoing.clear()
        self._abandoned.clear()

    async def _run_stream(self) -> tuple[TesseraError, bool]:
        # Why the stream ended, and whether the session did; what is not a TesseraError is a defect and leaves `run`.
        channel = open_channel(self._target.target, self._target.secret)
        call = None
        try:
            if self._proof is not None:
                await self._connect(channel)
            call = cache_pb2_grpc.CacheServiceStub(channel).Session()  # type: ignore[no-untyped-call,unused-ignore]
            stream = SessionStream(
                call,
                key=self._target.key,
                outgoing=self._outgoing,
                post=self._post,
                clock=self._clock,
                answer_seconds=self._answer_seconds,
            )
            session = await (self._attach(stream) if self._proof is None else self._come_back(stream, self._proof))
            self._stream = stream
            error = await stream.run(session, self._abandoned)
            return error, self._closing or self._abandoned.is_set()
        except Refused as refusal:
            # A daemon that cannot take us now may take us later.
            return refusal.error, self._stream is not None or not isinstance(refusal.error, Unavailable)
        except TesseraError as error:
            return error, self._abandoned.is_set()
        finally:
            if call is not None:
                call.cancel()
            await channel.close()

    @property
    def _keeps_memory(self) -> bool:
        # A daemon that is away may be dead, and some memory with it: nothing may be computed on it then.
        return self._memory is not None and self._memory.outlives_daemon

    async def _connect(self, channel: grpc.aio.Channel) -> None:
        try:
            await asyncio.wait_for(channel.channel_ready(), CONNECT_SECONDS)
        except TimeoutError:
            raise Unavailable("the cache manager is not there") from None

    async def _attach(self, stream: SessionStream) -> int:
        target = self._target
        response, sent = await stream.attach(self._target.attach_message())
        answer = response.attach
        if answer.layout_fingerprint != target.layout.fingerprint():
            raise FailedPrecondition("the cache manager holds another KV layout", reason="LAYOUT_MISMATCH")
        memory = await asyncio.to_thread(
            map_arena, target.arena_socket, answer.arena_token, target.layout, answer.num_blocks, target.gpu
        )
        if self._memory is not None:
            self._memory.close()
        self._memory = memory
        self._clock.start(sent, answer.lease_seconds, answer.grace_seconds)
        self._proof = SessionProof(answer.session_id, response.epoch, answer.resume_token, memory)
        self._post(Attached(answer.session_id, answer.num_blocks, memory.array))
        return answer.session_id

    async def _come_back(self, stream: SessionStream, proof: SessionProof) -> int:
        holdings = await self._ask_holdings(proof.session)
        attach = self._target.attach_message()
        attach.resume.CopyFrom(resume_message(proof, holdings, self._target.key))
        response, sent = await stream.attach(attach)
        if response.attach.arena_wanted and self._memory is not None:  # a new daemon, which has no memory yet
            await asyncio.to_thread(self._memory.hand_back, self._target.arena_socket, response.attach.arena_token)
            response, sent = await stream.attach(attach)
        answer = response.attach
        if not answer.resumed:
            raise Refused(FailedPrecondition("the cache manager did not resume the session", reason="NOT_RESUMED"))
        events = [*window_events(response), resumed_event(answer, response.revision, holdings)]
        self._clock.start(sent, answer.lease_seconds, answer.grace_seconds)
        self._proof = SessionProof(answer.session_id, response.epoch, answer.resume_token, proof.memory)
        for event in events:
            self._post(event)
        return answer.session_id

    async def _ask_holdings(self, session: int) -> Holdings:
        # Asked for again at each try, because the engine goes on meanwhile. An answer to an earlier question is not
        # taken: the engine counts from what it presented last.
        self._asked += 1
        self._presented = self._loop.create_future()
        self._post(Away(session, self._asked))
        giving_up = asyncio.create_task(self._abandoned.wait())
        try:
            await asyncio.wait((self._presented, giving_up), return_when=asyncio.FIRST_COMPLETED)
            if not self._presented.done():
                raise Unavailable("the session was given up")
            return self._presented.result()
        finally:
            giving_up.cancel()
            self._presented = None

    def _take_holdings(self, holdings: Holdings) -> None:
        self._outgoing.clear()  # all of it was sent before, and is in what is presented
        asked = self._presented
        if asked is not None and not asked.done() and holdings.number == self._asked:
            asked.set_result(holdings)

    def _wake(self) -> None:
        if self._stream is not None:
            self._stream.wake.set()
