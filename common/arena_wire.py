"""The frames of the arena socket, and the clients that ask for the memory and hand it back.

Fixed size, typed, little-endian: a request of 28 bytes (magic, version, the session's arena token) and a reply of
88 bytes (magic, version, status, sizes, layout fingerprint, nonce) with exactly one fd by SCM_RIGHTS where the
status is OK. A return is a request with another magic that carries the fd itself; its reply has neither numbers nor fd.
Invariant: nothing of a frame is believed before magic, version and length are right, and a client never keeps an fd
whose seals or size are not those of the reply. Used by the daemon's hand-off and by the decoder's view; it maps nothing
and knows no service.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

from common.errors import FailedPrecondition, PermissionDenied, Unavailable
from common.layout import NONCE_BYTES

PROTOCOL_VERSION: Final = 1
ARENA_TOKEN_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 16

_REQUEST: Final = struct.Struct("<8sI16s")
_REPLY: Final = struct.Struct("<8sIIIxxxxQQ16s32s")
_REQUEST_MAGIC: Final = b"TSRARQ\x00\x01"
_RETURN_MAGIC: Final = b"TSRART\x00\x01"
_REPLY_MAGIC: Final = b"TSRARP\x00\x01"
REQUEST_BYTES: Final = _REQUEST.size
REPLY_BYTES: Final = _REPLY.size

_NEEDED_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FD_BYTES: Final = 4
_MAX_FDS: Final = 8  # room for more than the one we take, so that a wrong count is seen and closed


class FrameError(ValueError):
    """A frame is no frame of ours: wrong length, magic or version."""


class ArenaStatus(IntEnum):
    """How the daemon answered."""

    OK = 0
    REFUSED = 1
    VERSION_MISMATCH = 2


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """What comes with the fd. Sizes in bytes; `num_blocks` does not count the null block."""

    num_blocks: int
    block_bytes: int
    arena_bytes: int
    layout_fingerprint: bytes
    nonce: bytes


_NO_INFO: Final = ArenaInfo(0, 0, 0, bytes(FINGERPRINT_BYTES), bytes(NONCE_BYTES))


def encode_request(token: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    """The request frame for a session's arena token (16 bytes; ValueError otherwise)."""
    if len(token) != ARENA_TOKEN_BYTES:
        raise ValueError(f"an arena token has {ARENA_TOKEN_BYTES} bytes, not {len(token)}")
    return _REQUEST.pack(_REQUEST_MAGIC, version, token)


def encode_return(token: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    """The return frame for the token (16 bytes) that asked for the memory; the fd goes with it."""
    return _RETURN_MAGIC + encode_request(token, version)[len(_REQUEST_MAGIC) :]


def is_return(frame: bytes) -> bool:
    """Whether a frame of the right length hands the memory back."""
    return frame.startswith(_RETURN_MAGIC)


def decode_request(frame: bytes) -> tuple[int, bytes]:
    """(version, token) of a request or a return frame. Raises FrameError on a wrong length or magic."""
    if len(frame) != REQUEST_BYTES:
        raise FrameError(f"a request has {REQUEST_BYTES} bytes, not {len(frame)}")
    magic, version, token = _REQUEST.unpack(frame)
    if magic not in (_REQUEST_MAGIC, _RETURN_MAGIC):
        raise FrameError("the magic of the request is wrong")
    return version, token


def encode_reply(status: ArenaStatus, info: ArenaInfo | None = None) -> bytes:
    """The reply frame; without `info` all numbers are 0."""
    it = info or _NO_INFO
    return _REPLY.pack(
        _REPLY_MAGIC,
        PROTOCOL_VERSION,
        int(status),
        it.num_blocks,
        it.block_bytes,
        it.arena_bytes,
        it.layout_fingerprint,
        it.nonce,
    )


def decode_reply(frame: bytes) -> tuple[ArenaStatus, ArenaInfo]:
    """(status, info) of a reply frame. Raises FrameError on a wrong length, magic, version or status."""
    if len(frame) != REPLY_BYTES:
        raise FrameError(f"a reply has {REPLY_BYTES} bytes, not {len(frame)}")
    magic, version, status, num_blocks, block_bytes, arena_bytes, fingerprint, nonce = _REPLY.unpack(frame)
    if magic != _REPLY_MAGIC:
        raise FrameError("the magic of the reply is wrong")
    if version != PROTOCOL_VERSION:
        raise FrameError(f"the reply speaks version {version}; this build speaks {PROTOCOL_VERSION}")
    if status not in ArenaStatus.__members__.values():
        raise FrameError(f"the status of the reply is {status}")
    return ArenaStatus(status), ArenaInfo(num_blocks, block_bytes, arena_bytes, fingerprint, nonce)


def fetch_arena(path: Path | str, token: bytes, *, timeout_seconds: float = 5.0) -> tuple[int, ArenaInfo]:
    """Ask the arena socket at `path` for the memory; (fd, info), and the fd is the caller's to close.

    The caller maps the fd, compares `info.layout_fingerprint` with its own layout's, and reads `info.nonce` back
    from the first bytes of its mapping. Raises PermissionDenied where the daemon refuses the token or the peer,
    FailedPrecondition on a version, frame, seal or size that does not fit, Unavailable where nobody answers.
    Messages name neither the path nor the fd.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as link:
            link.settimeout(timeout_seconds)
            link.connect(str(path))
            link.sendall(encode_request(token))
            frame, fds = _receive_reply(link, deadline)
    except OSError as error:
        raise Unavailable("the cache manager does not hand the arena over now", reason="ARENA_UNAVAILABLE") from error
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
    deadline = time.monotonic() + timeout_seconds
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as link:
            link.settimeout(timeout_seconds)
            link.connect(str(path))
            socket.send_fds(link, [encode_return(token)], [fd])
            frame, fds = _receive_reply(link, deadline)
    except OSError as error:
        raise Unavailable("the cache manager does not take the arena back now", reason="ARENA_UNAVAILABLE") from error
    _close_all(fds)
    _checked_status(frame)


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
    wanted = (info.num_blocks + 1) * info.block_bytes
    try:
        actual = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise FailedPrecondition("the arena is no sealed memory file", reason="ARENA_SEALS") from error
    if info.num_blocks < 1 or not info.arena_bytes == wanted == actual:
        raise FailedPrecondition(
            f"the arena has {actual} bytes; {info.num_blocks} + 1 blocks of {info.block_bytes} bytes need {wanted}",
            reason="ARENA_SIZE",
        )
    if seals & _NEEDED_SEALS != _NEEDED_SEALS:
        raise FailedPrecondition("the arena is not sealed against resizing", reason="ARENA_SEALS")


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
