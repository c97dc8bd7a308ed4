"""The frames of the arena socket: fixed size, typed, little-endian. Pure.

A request of 28 bytes (magic, version, token) asks for the memory; with another magic it hands the memory back, and then
carries the fd, or says that the nonce was written, and then carries a proof in the token's place. A reply of 128 bytes
says status, kind of memory, sizes, layout fingerprint, nonce and GPU. Invariant: nothing of a frame is believed before
magic, version and length are right. Used by the clients (`arena_wire.py`) and by the daemon's hand-off.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from common.arena_sizes import ArenaSizes
from common.devices import NO_DEVICE, UUID_BYTES
from common.layout import NONCE_BYTES

PROTOCOL_VERSION: Final = 4  # of these frames and of CacheService: grows with what the other side would misread
ARENA_TOKEN_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 16

_REQUEST: Final = struct.Struct("<8sI16s")
_REPLY: Final = struct.Struct(f"<8sIIIIQQQQQ{FINGERPRINT_BYTES}s{NONCE_BYTES}s{UUID_BYTES}s")
_REQUEST_MAGIC: Final = b"TSRARQ\x00\x01"
_RETURN_MAGIC: Final = b"TSRART\x00\x01"
_WRITTEN_MAGIC: Final = b"TSRARW\x00\x01"
_REPLY_MAGIC: Final = b"TSRARP\x00\x01"
REQUEST_BYTES: Final = _REQUEST.size
REPLY_BYTES: Final = _REPLY.size


class FrameError(ValueError):
    """A frame is no frame of ours: wrong length, magic or version."""


class ArenaStatus(IntEnum):
    """How the daemon answered."""

    OK = 0
    REFUSED = 1
    VERSION_MISMATCH = 2


class ArenaKind(IntEnum):
    """What the fd is.

    HOST:      a sealed memfd, mapped as it is
    CUDA:      GPU memory, exported by the driver; imported and mapped
    CUDA_IPC:  a sealed memfd that holds the 64 bytes of an IPC handle, and nothing else
    """

    HOST = 0
    CUDA = 1
    CUDA_IPC = 2


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """What comes with the fd. Sizes in bytes; `num_blocks` and `num_window_blocks` do not count the null ones.

    memory_bytes:  all of the memory behind the fd; a GPU's is rounded up to its granularity
    device_uuid:   of the GPU; zeros where the memory is the host's
    nonce_wanted:  the reader maps fresh GPU memory: it writes the nonce, and says so with `ARENA_WRITTEN`
    """

    num_blocks: int
    block_bytes: int
    arena_bytes: int
    layout_fingerprint: bytes
    nonce: bytes = field(repr=False)
    kind: ArenaKind = ArenaKind.HOST
    memory_bytes: int = 0
    device_uuid: bytes = NO_DEVICE
    nonce_wanted: bool = False
    num_window_blocks: int = 0
    window_block_bytes: int = 0

    @property
    def sizes(self) -> ArenaSizes:
        """Of the arena."""
        return ArenaSizes(self.num_blocks, self.block_bytes, self.num_window_blocks, self.window_block_bytes)


_NO_INFO: Final = ArenaInfo(0, 0, 0, bytes(FINGERPRINT_BYTES), bytes(NONCE_BYTES))


def encode_request(token: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    """The request frame for a session's arena token (16 bytes; ValueError otherwise)."""
    if len(token) != ARENA_TOKEN_BYTES:
        raise ValueError(f"an arena token has {ARENA_TOKEN_BYTES} bytes, not {len(token)}")
    return _REQUEST.pack(_REQUEST_MAGIC, version, token)


def encode_return(token: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    """The return frame for the token (16 bytes) that asked for the memory; the fd goes with it."""
    return _RETURN_MAGIC + encode_request(token, version)[len(_REQUEST_MAGIC) :]


def encode_written(proof: bytes, version: int = PROTOCOL_VERSION) -> bytes:
    """The frame that says that the nonce stands in the memory, with a proof of `written_proof`."""
    return _WRITTEN_MAGIC + encode_request(proof, version)[len(_REQUEST_MAGIC) :]


def written_proof(token: bytes, nonce: bytes) -> bytes:
    """16 bytes that only who was given `token`, and read `nonce` (back), can name."""
    return hashlib.blake2b(nonce, key=token, digest_size=ARENA_TOKEN_BYTES, person=b"tessera-arena").digest()


def is_return(frame: bytes) -> bool:
    """Whether a frame of the right length hands the memory back."""
    return frame.startswith(_RETURN_MAGIC)


def is_written(frame: bytes) -> bool:
    """Whether a frame of the right length says that the nonce was written."""
    return frame.startswith(_WRITTEN_MAGIC)


def decode_request(frame: bytes) -> tuple[int, bytes]:
    """(version, token or proof) of a request, return or written frame. Raises FrameError on a wrong length or magic."""
    if len(frame) != REQUEST_BYTES:
        raise FrameError(f"a request has {REQUEST_BYTES} bytes, not {len(frame)}")
    magic, version, token = _REQUEST.unpack(frame)
    if magic not in (_REQUEST_MAGIC, _RETURN_MAGIC, _WRITTEN_MAGIC):
        raise FrameError("the magic of the request is wrong")
    return version, token


def encode_reply(status: ArenaStatus, info: ArenaInfo | None = None) -> bytes:
    """The reply frame; without `info` all numbers are 0."""
    it = info or _NO_INFO
    return _REPLY.pack(
        _REPLY_MAGIC,
        PROTOCOL_VERSION,
        int(status),
        int(it.kind) | it.nonce_wanted << 8,
        it.num_blocks,
        it.block_bytes,
        it.num_window_blocks,
        it.window_block_bytes,
        it.arena_bytes,
        it.memory_bytes or it.arena_bytes,
        it.layout_fingerprint,
        it.nonce,
        it.device_uuid,
    )


def decode_reply(frame: bytes) -> tuple[ArenaStatus, ArenaInfo]:
    """(status, info) of a reply frame. Raises FrameError on a wrong length, magic, version, status or kind."""
    if len(frame) != REPLY_BYTES:
        raise FrameError(f"a reply has {REPLY_BYTES} bytes, not {len(frame)}")
    magic, version, status, kind, num_blocks, *sizes, fingerprint, nonce, uuid = _REPLY.unpack(frame)
    if magic != _REPLY_MAGIC:
        raise FrameError("the magic of the reply is wrong")
    if version != PROTOCOL_VERSION:
        raise FrameError(f"the reply speaks version {version}; this build speaks {PROTOCOL_VERSION}")
    if status not in ArenaStatus.__members__.values():
        raise FrameError(f"the status of the reply is {status}")
    if kind & 0xFF not in ArenaKind.__members__.values() or kind >> 9:
        raise FrameError(f"the kind of memory of the reply is {kind}")
    block_bytes, num_window_blocks, window_block_bytes, arena_bytes, memory_bytes = sizes
    return ArenaStatus(status), ArenaInfo(
        num_blocks,
        block_bytes,
        arena_bytes,
        fingerprint,
        nonce,
        ArenaKind(kind & 0xFF),
        memory_bytes,
        uuid,
        bool(kind >> 8),
        num_window_blocks,
        window_block_bytes,
    )
