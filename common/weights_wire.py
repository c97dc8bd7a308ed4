"""The client of the weights socket: asks for the memory of a model's weights, and holds it while it is connected.

Invariant: an fd is kept only with a reply that gives one, and for memory of the host only with the seals and the size
that the reply says; every other fd is closed. The connection is the hold: closing it, or the end of this process, gives
the memory up. Frames are `weights_frames.py`'s. Used by the decoder's view of its weights; it maps nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import time
from pathlib import Path
from typing import Final

from common.arena_frames import ArenaKind, FrameError
from common.arena_wire import receive_with_fds
from common.errors import FailedPrecondition, PermissionDenied, ResourceExhausted, Unavailable
from common.weights_frames import (
    REPLY_BYTES,
    WEIGHTS_PROTOCOL_VERSION,
    WeightsCall,
    WeightsReply,
    WeightsRequest,
    WeightsStatus,
    caller_proof,
    decode_reply,
    encode_request,
)

CONNECT_SECONDS: Final = 5.0
FILLED_SECONDS: Final = 60.0  # a loaded machine must not cost what took minutes to lay down
WAIT_SECONDS: Final = 1800.0  # for others to fill: more than the daemon lets one take
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class WeightsLink:
    """One connection for the weights `key` of `num_bytes` bytes. Every method raises Unavailable where the daemon is
    not there or does not answer in time, and FailedPrecondition on a frame that does not fit."""

    def __init__(self, path: Path | str, secret: str, key: bytes, num_bytes: int) -> None:
        self._secret, self._key, self._num_bytes = secret, key, num_bytes
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._link.settimeout(CONNECT_SECONDS)
        try:
            self._link.connect(str(path))
        except OSError as error:
            self._link.close()
            raise _away() from error

    def ask(self, wait_seconds: float = WAIT_SECONDS) -> tuple[WeightsReply, int]:
        """(reply, fd) of memory to fill or to read, as its status says; the fd is the caller's to close.

        While another process fills, waits, at most `wait_seconds`. Raises ResourceExhausted with needed and free bytes,
        PermissionDenied where the daemon refuses this process, FailedPrecondition where it shares no weights.
        """
        return self._exchange(self._request(WeightsCall.ASK, self._own_proof()), None, wait_seconds)

    def filled(self, proof: bytes) -> tuple[WeightsReply, int]:
        """Say that everything is there; what to read from now on, with its fd. Raises what `ask` raises."""
        return self._exchange(self._request(WeightsCall.FILLED, proof), None, FILLED_SECONDS)

    def hand_back(self, nonce: bytes, fd: int) -> bool:
        """Give mapped memory to this daemon; the fd stays the caller's. Whether the daemon holds it now."""
        request = self._request(WeightsCall.RETURN, self._own_proof(), nonce)
        try:
            self._exchange(request, fd, CONNECT_SECONDS)
        except PermissionDenied:
            return False
        return True

    def wait_closed(self) -> None:
        """Return when the daemon is gone, or `close` was called."""
        poll = select.poll()
        try:
            poll.register(self._link, select.POLLIN | select.POLLHUP)
            poll.poll()
        except (OSError, ValueError):
            return

    def close(self) -> None:
        """Hold the memory no longer. Harmless when repeated."""
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)  # wakes `wait_closed` in another thread
        self._link.close()

    def _own_proof(self) -> bytes:
        return caller_proof(self._secret, os.getpid(), self._key, self._num_bytes)

    def _request(self, call: WeightsCall, proof: bytes, nonce: bytes = bytes(32)) -> WeightsRequest:
        return WeightsRequest(call, self._num_bytes, self._key, proof, nonce)

    def _exchange(self, request: WeightsRequest, fd: int | None, seconds: float) -> tuple[WeightsReply, int]:
        deadline = time.monotonic() + seconds
        try:
            socket.send_fds(self._link, [encode_request(request)], [] if fd is None else [fd])
            while True:
                reply, fds = self._received(deadline)
                if reply.status is not WeightsStatus.WAIT:
                    return reply, _checked(reply, fds, self._num_bytes)
                _close_all(fds)
        except OSError as error:
            raise _away() from error

    def _received(self, deadline: float) -> tuple[WeightsReply, list[int]]:
        frame, fds = b"", list[int]()
        try:
            while len(frame) < REPLY_BYTES:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError("the reply took too long")
                self._link.settimeout(remaining)
                data = receive_with_fds(self._link, REPLY_BYTES - len(frame), fds)
                if not data:
                    raise ConnectionResetError("the daemon closed the connection")
                frame += data
            return decode_reply(frame), fds
        except FrameError as error:
            _close_all(fds)
            raise FailedPrecondition(f"weights reply: {error}", reason="WEIGHTS_FRAME") from error
        except OSError:
            _close_all(fds)
            raise


def _checked(reply: WeightsReply, fds: list[int], num_bytes: int) -> int:
    """The one fd of a reply that gives one; -1 where it keeps what was handed back."""
    gives = reply.status in (WeightsStatus.FILL, WeightsStatus.READ)
    try:
        _check_status(reply)
        if len(fds) != gives:
            raise FailedPrecondition(f"the weights reply carries {len(fds)} fds", reason="WEIGHTS_FRAME")
        if gives:
            _check_memory(fds[0], reply, num_bytes)
    except (FailedPrecondition, PermissionDenied, ResourceExhausted):
        _close_all(fds)
        raise
    return fds[0] if gives else -1


def _check_status(reply: WeightsReply) -> None:
    if reply.status is WeightsStatus.VERSION_MISMATCH:
        raise FailedPrecondition(
            f"the cache manager does not speak weights protocol {WEIGHTS_PROTOCOL_VERSION}", reason="WEIGHTS_VERSION"
        )
    if reply.status is WeightsStatus.NOT_SHARED:
        raise FailedPrecondition(
            "the cache manager shares no weights: its driver exports no memory, or it has --arena-handles ipc; give "
            "this decoder --arena-handles ipc as well, so that it holds its own",
            reason="WEIGHTS_NOT_SHARED",
        )
    if reply.status is WeightsStatus.NO_MEMORY:
        raise ResourceExhausted(
            f"the weights take {reply.needed} bytes, and beside the pool and other weights {reply.free} are free",
            subject="weights_bytes", needed=reply.needed, usable=reply.free, reason="NO_MEMORY",
        )  # fmt: skip
    if reply.status is WeightsStatus.REFUSED:
        raise PermissionDenied("the cache manager refused this process the weights", reason="WEIGHTS_REFUSED")


def _check_memory(fd: int, reply: WeightsReply, num_bytes: int) -> None:
    if reply.memory_bytes < num_bytes or reply.kind is ArenaKind.CUDA_IPC:
        raise _wrong_size(reply.memory_bytes, num_bytes)
    if reply.kind is ArenaKind.CUDA:  # an fd of the driver's, which tells its size to the driver alone
        return
    wanted = _SIZE_SEALS | (fcntl.F_SEAL_WRITE if reply.status is WeightsStatus.READ else 0)
    try:
        size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        size, seals = -1, 0
    if seals & wanted != wanted:
        raise FailedPrecondition("the memory of the weights is not sealed", reason="WEIGHTS_SEALS")
    if size != reply.memory_bytes:
        raise _wrong_size(size, num_bytes)


def _wrong_size(have: int, want: int) -> FailedPrecondition:
    return FailedPrecondition(f"the memory has {have} bytes; these weights take {want}", reason="WEIGHTS_SIZE")


def _away() -> Unavailable:
    return Unavailable("the cache manager does not hand weights over now", reason="WEIGHTS_UNAVAILABLE")


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
