"""The clients of the arena socket: ask for the memory, say that its nonce is written, hand it back.

Invariant: a client never keeps an fd whose kind, seals or size are not those of the reply; exactly one fd comes by
SCM_RIGHTS where the status is OK, and none otherwise. Frames are `arena_frames.py`'s. Used by the decoder's view; what
receives fds, by the daemon's hand-off too. It maps nothing and knows no service.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from common.arena_frames import (
    PROTOCOL_VERSION,
    REPLY_BYTES,
    ArenaInfo,
    ArenaKind,
    ArenaStatus,
    FrameError,
    decode_reply,
    encode_request,
    encode_return,
    encode_written,
    written_proof,
)
from common.cuda_driver import IPC_HANDLE_BYTES
from common.errors import FailedPrecondition, PermissionDenied, Unavailable

_NEEDED_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FD_BYTES: Final = 4
_MAX_FDS: Final = 8  # room for more than the one we take, so that a wrong count is seen and closed


def fetch_arena(path: Path | str, token: bytes, *, timeout_seconds: float = 5.0) -> tuple[int, ArenaInfo]:
    """Ask the arena socket at `path` for the memory; (fd, info), and the fd is the caller's to close.

    The caller maps the fd, compares `info.layout_fingerprint` with its own layout's, and reads `info.nonce` back
    from the first bytes of its mapping. Raises PermissionDenied where the daemon refuses the token or the peer,
    FailedPrecondition on a version, frame, seal or size that does not fit, Unavailable where nobody answers.
    Messages name neither the path nor the fd.
    """
    frame, fds = _exchange(path, encode_request(token), (), timeout_seconds, "does not hand the arena over now")
    try:
        info = _checked_reply(frame, fds)
    except (PermissionDenied, FailedPrecondition):
        _close_all(fds)
        raise
    return fds[0], info


def return_arena(path: Path | str, token: bytes, fd: int, *, timeout_seconds: float = 5.0) -> None:
    """Hand the memory behind `fd` back to a daemon that asked for it with `token`; the fd stays the caller's.

    Raises PermissionDenied where the daemon refuses the token, the peer or the memory, FailedPrecondition on a version
    or frame that does not fit, Unavailable where nobody answers.
    """
    frame, fds = _exchange(path, encode_return(token), [fd], timeout_seconds, "does not take the arena back now")
    _close_all(fds)
    _checked_status(frame)


def confirm_written(path: Path | str, token: bytes, nonce_read_back: bytes, *, timeout_seconds: float = 5.0) -> None:
    """Say that the nonce stands in the memory that `token` was spent for. Raises what `return_arena` raises."""
    frame = encode_written(written_proof(token, nonce_read_back))
    reply, fds = _exchange(path, frame, (), timeout_seconds, "does not hear that the arena is written")
    _close_all(fds)
    _checked_status(reply)


def _exchange(
    path: Path | str, frame: bytes, fds: Sequence[int], timeout_seconds: float, failing: str
) -> tuple[bytes, list[int]]:
    """Send `frame` with `fds`; the reply and the fds that came with it. Raises Unavailable where nobody answers."""
    deadline = time.monotonic() + timeout_seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as link:
            link.settimeout(timeout_seconds)
            link.connect(str(path))
            socket.send_fds(link, [frame], fds)
            return _receive_reply(link, deadline)
    except OSError as error:
        raise Unavailable(f"the cache manager {failing}", reason="ARENA_UNAVAILABLE") from error


def receive_with_fds(link: socket.socket, size: int, fds: list[int]) -> bytes:
    """At most `size` bytes; the fds that came with them go into `fds`, and into no child (`socket.recv_fds` forgets its
    flags). Raises what `recvmsg` raises."""
    room = socket.CMSG_LEN(_MAX_FDS * _FD_BYTES)
    data, ancillary, _, _ = link.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            count = len(content) // _FD_BYTES
            fds.extend(struct.unpack(f"={count}i", content[: count * _FD_BYTES]))
    return data


def _receive_reply(link: socket.socket, deadline: float) -> tuple[bytes, list[int]]:
    """Bytes and fds until the reply is whole or the peer closes. fds never leak, whatever comes."""
    frame, fds = b"", list[int]()
    try:
        while len(frame) < REPLY_BYTES:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("the arena reply took too long")
            link.settimeout(remaining)
            data = receive_with_fds(link, REPLY_BYTES - len(frame), fds)
            if not data:
                break
            frame += data
    except OSError:
        _close_all(fds)
        raise
    return frame, fds


def _checked_status(frame: bytes) -> ArenaInfo:
    if not frame:
        raise PermissionDenied("the cache manager closed the arena socket without an answer", reason="ARENA_REFUSED")
    try:
        status, info = decode_reply(frame)
    except FrameError as error:
        raise FailedPrecondition(f"arena reply: {error}", reason="ARENA_FRAME") from error
    if status is ArenaStatus.VERSION_MISMATCH:
        raise FailedPrecondition(
            f"the cache manager does not speak arena protocol {PROTOCOL_VERSION}", reason="ARENA_VERSION"
        )
    if status is not ArenaStatus.OK:
        raise PermissionDenied("the cache manager refused the arena token or this process", reason="ARENA_REFUSED")
    return info


def _checked_reply(frame: bytes, fds: list[int]) -> ArenaInfo:
    info = _checked_status(frame)
    if len(fds) != 1:
        raise FailedPrecondition(f"the arena reply carries {len(fds)} fds; it needs 1", reason="ARENA_FRAME")
    _check_memory(fds[0], info)
    return info


def _check_memory(fd: int, info: ArenaInfo) -> None:
    wanted = info.sizes.arena_bytes
    if info.num_blocks < 1 or info.arena_bytes != wanted or info.memory_bytes < wanted:
        raise _wrong_size(info, info.memory_bytes)
    if info.kind is ArenaKind.CUDA:  # an fd of the driver's, which tells its size to the driver alone
        return
    try:
        actual = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise FailedPrecondition("the arena is no sealed memory file", reason="ARENA_SEALS") from error
    if actual != (IPC_HANDLE_BYTES if info.kind is ArenaKind.CUDA_IPC else wanted):
        raise _wrong_size(info, actual)
    if seals & _NEEDED_SEALS != _NEEDED_SEALS:
        raise FailedPrecondition("the arena is not sealed against resizing", reason="ARENA_SEALS")


def _wrong_size(info: ArenaInfo, actual: int) -> FailedPrecondition:
    sizes = info.sizes
    return FailedPrecondition(
        f"the arena has {actual} bytes; {sizes} need {sizes.arena_bytes}",
        reason="ARENA_SIZE",
    )


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
