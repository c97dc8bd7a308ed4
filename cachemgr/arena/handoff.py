"""The arena socket: hands the arena's fd, once per token, to the very process that attached the session.

Invariant: an fd leaves only to a peer that the kernel (SO_PEERCRED) names as this daemon's own user and as the process
of the session whose token it brought; a token is spent by its first use, whatever the outcome. Frames are of
fixed size, read with a bound and a deadline; anything else is dropped and the daemon serves on. Called by the session
registry (`offer`, `withdraw`), which is told of each hand-over with a pidfd of the peer. A daemon that has no memory
yet takes one back the same way (`ask`), from the process that it asked alone.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachemgr.arena.base import Arena
from cachemgr.arena.frames import read_frame
from cachemgr.arena.listener import FdListener
from cachemgr.arena.peers import Peer, open_peer_pidfd, peer_of
from cachemgr.ids import SessionId
from common.arena_frames import (
    ARENA_TOKEN_BYTES,
    PROTOCOL_VERSION,
    REQUEST_BYTES,
    ArenaStatus,
    FrameError,
    decode_request,
    encode_reply,
    is_return,
    is_written,
    written_proof,
)
from common.errors import TesseraError
from common.kept_sockets import KeptSocket
from common.logs import get_logger

REQUEST_TIMEOUT_SECONDS: Final = 2.0
MAX_CONNECTIONS: Final = 32

HandedOver = Callable[[SessionId, int, int], None]  # session, process id, pidfd (the callee's to close)
TakeBack = Callable[[int], bool]  # the fd (the callee's to close); whether it was the memory that is wanted


@dataclass(frozen=True, slots=True)
class _Offer:
    token: bytes
    process_id: int


class Handoff:
    """Serves one arena to attached processes; lives on the daemon's event loop."""

    def __init__(
        self,
        on_handed_over: HandedOver,
        *,
        request_timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._on_handed_over = on_handed_over
        self._timeout = request_timeout_seconds
        self._listener = FdListener("arena", self._serve, max_connections)
        self._offers: dict[SessionId, _Offer] = {}
        self._asked: dict[int, bytes] = {}  # process -> token that it may hand the memory back with
        self._writers: dict[int, bytes] = {}  # process -> how it proves that it wrote the nonce
        self._take_back: TakeBack | None = None
        self._arena: Arena | None = None
        self._fingerprint = b""
        self._log = get_logger()

    def serve_arena(self, arena: Arena, layout_fingerprint: bytes) -> None:
        """Say what to hand over: called once, when the first attach has fixed the layout."""
        self._arena, self._fingerprint = arena, layout_fingerprint

    def want_arena(self, take_back: TakeBack | None) -> None:
        """Take memory back from now on, with tokens of `ask`; None: no more."""
        self._take_back = take_back
        self._asked.clear()

    def ask(self, process_id: int) -> bytes:
        """A fresh token (16 bytes), good once, for process `process_id` to hand the memory back with."""
        token = self._asked[process_id] = secrets.token_bytes(ARENA_TOKEN_BYTES)
        return token

    def offer(self, session: SessionId, process_id: int) -> bytes:
        """A fresh token (16 bytes), good once, for process `process_id`; it replaces the session's older one."""
        token = secrets.token_bytes(ARENA_TOKEN_BYTES)
        self._offers[session] = _Offer(token, process_id)
        return token

    def withdraw(self, session: SessionId) -> None:
        """Forget the session's token. Harmless when repeated."""
        self._offers.pop(session, None)

    @property
    def kept_socket(self) -> KeptSocket | None:
        """The socket's file, while it listens."""
        return self._listener.kept_socket

    async def start(self, path: Path) -> None:
        """Listen on `path` (mode 0600). Raises FailedPrecondition where the path holds something else."""
        await self._listener.start(path)

    async def stop(self) -> None:
        """Stop listening and drop open connections. Harmless when repeated."""
        await self._listener.stop()
        self._offers.clear()

    async def _serve(self, link: socket.socket) -> None:
        fds: list[int] = []
        try:
            async with asyncio.timeout(self._timeout):
                frame = await read_frame(link, REQUEST_BYTES, fds)
            if is_return(frame):
                self._answer_return(link, frame, fds)
            elif is_written(frame):
                self._answer_written(link, frame)
            else:
                self._answer(link, frame)
        except (TimeoutError, FrameError, OSError, TesseraError) as error:
            self._log.warning("arena_request_dropped", reason=type(error).__name__)
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(self, link: socket.socket, frame: bytes) -> None:
        """Judge one request and reply; never waits, a reply always fits an empty socket buffer."""
        version, token = decode_request(frame)
        if version != PROTOCOL_VERSION:
            link.send(encode_reply(ArenaStatus.VERSION_MISMATCH))
            return
        peer = peer_of(link)
        session = self._spend(token, peer)
        if session is None or self._arena is None:
            self._log.warning("arena_refused", peer_process_id=peer.process_id, peer_user_id=peer.user_id)
            link.send(encode_reply(ArenaStatus.REFUSED))
            return
        arena = self._arena
        info = arena.info(self._fingerprint)
        if info.nonce_wanted:
            self._writers[peer.process_id] = written_proof(token, arena.nonce)
        pidfd = open_peer_pidfd(link, peer)
        # Told before the fd leaves: from here on the process counts as one that can write.
        self._on_handed_over(session, peer.process_id, pidfd)
        socket.send_fds(link, [encode_reply(ArenaStatus.OK, info)], [arena.fileno()])
        self._log.info("arena_handed_over", session=session, process_id=peer.process_id)

    def _answer_return(self, link: socket.socket, frame: bytes, fds: list[int]) -> None:
        """Judge memory that is handed back and reply. What is not taken stays in `fds`."""
        version, token = decode_request(frame)
        peer = peer_of(link)
        wanted = self._asked.pop(peer.process_id, b"")
        fits = version == PROTOCOL_VERSION and len(fds) == 1 and peer.user_id == os.geteuid()
        if self._take_back is None or not (fits and hmac.compare_digest(wanted, token)):
            self._log.warning("arena_return_refused", peer_process_id=peer.process_id, peer_user_id=peer.user_id)
            link.send(encode_reply(ArenaStatus.REFUSED))
            return
        taken = self._take_back(fds.pop())
        link.send(encode_reply(ArenaStatus.OK if taken else ArenaStatus.REFUSED))

    def _answer_written(self, link: socket.socket, frame: bytes) -> None:
        """Judge the word of a process that was asked to write the nonce. From then on others must find it."""
        version, proof = decode_request(frame)
        peer = peer_of(link)
        wanted = self._writers.pop(peer.process_id, b"")
        fits = version == PROTOCOL_VERSION and peer.user_id == os.geteuid() and hmac.compare_digest(wanted, proof)
        if self._arena is None or not fits:
            self._log.warning("arena_nonce_refused", peer_process_id=peer.process_id)
            link.send(encode_reply(ArenaStatus.REFUSED))
            return
        self._arena.nonce_written = True
        self._log.info("arena_nonce_written", process_id=peer.process_id)
        link.send(encode_reply(ArenaStatus.OK))

    def _spend(self, token: bytes, peer: Peer) -> SessionId | None:
        """The session of `token` if `peer` may have the memory; the token is gone either way."""
        found: SessionId | None = None
        for session, offered in self._offers.items():
            if hmac.compare_digest(offered.token, token):
                found = session
        if found is None:
            return None
        process_id = self._offers.pop(found).process_id
        return found if peer == Peer(process_id, os.geteuid()) else None
