"""The weights socket: a process that connects, and knows the node's internal key, is given its model's weights.

Invariant: the connection is the hold: the kernel ends it with the process, and what a process was given counts as used
until then. An fd leaves only to this daemon's own user, to a process that proved the internal key for its own id and
for those very weights. While one fills, others wait; each wait and each fill is bounded. Called by the daemon.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cachemgr.arena.frames import read_frame
from cachemgr.arena.listener import FdListener
from cachemgr.arena.peers import peer_of
from cachemgr.weights.store import Copy, Holder, WeightsStore
from common.arena_frames import FrameError
from common.errors import FailedPrecondition, PermissionDenied, ResourceExhausted
from common.kept_sockets import KeptSocket
from common.logs import get_logger
from common.weights_frames import (
    REQUEST_BYTES,
    WEIGHTS_PROTOCOL_VERSION,
    WeightsCall,
    WeightsReply,
    WeightsRequest,
    WeightsStatus,
    caller_proof,
    decode_request,
    encode_reply,
)

REQUEST_TIMEOUT_SECONDS: Final = 2.0
FILL_SECONDS: Final = 600.0
SETTLE_SECONDS: Final = 5.0
MAX_CONNECTIONS: Final = 128


class WeightsSocket:
    """Serves one store on the daemon's event loop.

    now:          seconds of a steady clock
    fill_seconds: time to lay weights down; a process that takes longer is dropped and another one fills
    settle_seconds: time for the system to find memory that the books say is there
    """

    def __init__(
        self,
        store: WeightsStore,
        *,
        now: Callable[[], float],
        request_timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
        fill_seconds: float = FILL_SECONDS,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self._store = store
        self._now = now
        self._timeout = request_timeout_seconds
        self._fill_seconds = fill_seconds
        self._settle_seconds = settle_seconds
        self._listener = FdListener("weights", self._serve, MAX_CONNECTIONS)
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._secret = ""
        self._log = get_logger()

    @property
    def kept_socket(self) -> KeptSocket | None:
        """The socket's file, while it listens."""
        return self._listener.kept_socket

    async def start(self, path: Path, secret: str) -> None:
        """Listen on `path` for processes that know `secret`. Raises FailedPrecondition where the path is taken."""
        self._secret = secret
        await self._listener.start(path)

    async def stop(self) -> None:
        """Stop listening, end every hold, let the memory go. Harmless when repeated."""
        await self._listener.stop()
        self._store.close()

    def tick(self) -> None:
        """Drop what was unused for long; called as time passes."""
        self._store.drop_idle(self._now())

    def make_room(self) -> bool:
        """Drop what nobody uses; whether there was any."""
        return self._store.drop_unused()

    async def _serve(self, link: socket.socket) -> None:
        holder = next(self._numbers)
        fds: list[int] = []
        try:
            async with asyncio.timeout(self._timeout):
                request = decode_request(await read_frame(link, REQUEST_BYTES, fds))
            refusal = self._refusal(link, request)
            if refusal is not None:
                link.send(encode_reply(WeightsReply(refusal)))
            elif request.call is WeightsCall.RETURN:
                await self._take_back(link, holder, request, fds)
            else:
                await self._give(link, holder, request)
        except (TimeoutError, FrameError, OSError) as error:
            self._log.warning("weights_request_dropped", reason=type(error).__name__)
        finally:
            for fd in fds:
                os.close(fd)
            self._store.leave(holder, self._now())
            self._wake()

    def _refusal(self, link: socket.socket, request: WeightsRequest) -> WeightsStatus | None:
        if request.version != WEIGHTS_PROTOCOL_VERSION:
            return WeightsStatus.VERSION_MISMATCH
        peer = peer_of(link)
        wanted = caller_proof(self._secret, peer.process_id, request.key, request.num_bytes)
        known = peer.user_id == os.geteuid() and hmac.compare_digest(wanted, request.proof)
        if known and request.num_bytes > 0 and request.call is not WeightsCall.FILLED:
            return None
        self._log.warning("weights_refused", peer_process_id=peer.process_id, peer_user_id=peer.user_id)
        return WeightsStatus.REFUSED

    async def _give(self, link: socket.socket, holder: Holder, request: WeightsRequest) -> None:
        try:
            copy = await self._copy_for(link, holder, request)
            if copy.filler == holder:
                _send(link, WeightsStatus.FILL, copy)
                copy = await self._after_fill(link, holder)
            _send(link, WeightsStatus.READ, copy)
        except ResourceExhausted as error:
            self._log.warning("weights_do_not_fit", needed=error.needed, free=error.usable, cause=error.message)
            refusal = WeightsReply(WeightsStatus.NO_MEMORY, needed=error.needed, free=error.usable)
            link.send(encode_reply(refusal))
            return
        except FailedPrecondition as error:
            self._log.warning("weights_not_shared", cause=error.message)
            link.send(encode_reply(WeightsReply(WeightsStatus.NOT_SHARED)))
            return
        except PermissionDenied as error:
            self._log.warning("weights_refused", cause=error.message)
            link.send(encode_reply(WeightsReply(WeightsStatus.REFUSED)))
            return
        await _closed(link)

    async def _copy_for(self, link: socket.socket, holder: Holder, request: WeightsRequest) -> Copy:
        told = False
        deadline = self._now() + self._settle_seconds
        while True:
            changed = self._changed
            try:
                copy = self._store.ask(holder, request.key, request.num_bytes)
            except ResourceExhausted as error:
                # A driver takes its time to give back what a killed process had.
                if error.retry_after_seconds is None or self._now() >= deadline:
                    raise
                await asyncio.sleep(error.retry_after_seconds)
                continue
            if copy is not None:
                return copy
            if not told:
                link.send(encode_reply(WeightsReply(WeightsStatus.WAIT)))
                told = True
            await changed.wait()

    async def _after_fill(self, link: socket.socket, holder: Holder) -> Copy:
        fds: list[int] = []
        try:
            async with asyncio.timeout(self._fill_seconds):
                request = decode_request(await read_frame(link, REQUEST_BYTES, fds))
        finally:
            for fd in fds:
                os.close(fd)
        if request.call is not WeightsCall.FILLED:
            raise FrameError("a process that fills sent something else")
        copy = self._store.filled(holder, request.proof)
        self._wake()
        return copy

    async def _take_back(self, link: socket.socket, holder: Holder, request: WeightsRequest, fds: list[int]) -> None:
        try:
            kept = bool(fds) and self._store.take_back(holder, request.key, request.num_bytes, request.nonce, fds.pop())
        except ValueError as error:
            self._log.warning("weights_return_refused", cause=str(error))
            kept = False
        self._wake()
        link.send(encode_reply(WeightsReply(WeightsStatus.KEPT if kept else WeightsStatus.REFUSED)))
        if kept:
            await _closed(link)

    def _wake(self) -> None:
        """Whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()


def _send(link: socket.socket, status: WeightsStatus, copy: Copy) -> None:
    """The fd and what it is. A reply always fits the buffer of a socket that nothing else is written to."""
    memory = copy.memory
    reply = WeightsReply(status, memory.kind, memory.memory_bytes, nonce=copy.nonce, device_uuid=memory.device_uuid)
    socket.send_fds(link, [encode_reply(reply)], [memory.fileno()])


async def _closed(link: socket.socket) -> None:
    """Until the other side closes. It has nothing more to say."""
    loop = asyncio.get_running_loop()
    with_nothing = await loop.sock_recv(link, 1)
    if with_nothing:
        raise FrameError("a process that holds weights sent something")
