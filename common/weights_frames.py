"""The frames of the weights socket: fixed size, typed, little-endian. Pure.

A request says which weights (a key, 32 bytes, that names content, type and places) of how many bytes: it asks for their
memory, says that they are laid down in it, or hands it back with its fd. A reply says what the process is given. The
memory itself begins with a header, by which whoever maps it knows it. Invariant: nothing of a frame is believed before
magic, version and length are right. Used by the client (`weights_wire.py`) and by the cache manager's socket.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from common.arena_frames import ArenaKind, FrameError
from common.devices import NO_DEVICE, UUID_BYTES
from common.layout import NONCE_BYTES

WEIGHTS_PROTOCOL_VERSION: Final = 1
KEY_BYTES: Final = 32
PROOF_BYTES: Final = 32

_REQUEST: Final = struct.Struct(f"<8sIIQ{KEY_BYTES}s{PROOF_BYTES}s{NONCE_BYTES}s")
_REPLY: Final = struct.Struct(f"<8sIIIIQQQ{NONCE_BYTES}s{UUID_BYTES}s")
_HEADER: Final = struct.Struct(f"<8sIIQ{KEY_BYTES}s{NONCE_BYTES}s")
_REQUEST_MAGIC: Final = b"TSRWRQ\x00\x01"
_REPLY_MAGIC: Final = b"TSRWRP\x00\x01"
_HEADER_MAGIC: Final = b"TSRWTS\x00\x01"
REQUEST_BYTES: Final = _REQUEST.size
REPLY_BYTES: Final = _REPLY.size
HEADER_BYTES: Final = _HEADER.size


class WeightsCall(IntEnum):
    """What a request wants.

    ASK:    the memory of the weights, to read or to fill
    FILLED: to read what this process has laid down, as others do from now on
    RETURN: to give memory that it holds to a daemon that has none; the fd goes with it
    """

    ASK = 0
    FILLED = 1
    RETURN = 2


class WeightsStatus(IntEnum):
    """What the process is given. An fd comes with FILL and READ alone."""

    FILL = 0
    READ = 1
    WAIT = 2  # another process fills them: a further reply follows
    KEPT = 3  # what was handed back is held
    REFUSED = 4
    VERSION_MISMATCH = 5
    NO_MEMORY = 6
    NOT_SHARED = 7


@dataclass(frozen=True, slots=True)
class WeightsRequest:
    """One request. `proof` is `caller_proof`, or `filled_proof` in FILLED; `nonce` counts in RETURN alone."""

    call: WeightsCall
    num_bytes: int
    key: bytes
    proof: bytes = field(repr=False)
    nonce: bytes = field(default=bytes(NONCE_BYTES), repr=False)
    version: int = WEIGHTS_PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class WeightsReply:
    """One reply. Sizes in bytes.

    memory_bytes: all of the memory behind the fd; a GPU's is rounded up to its granularity
    needed, free: of NO_MEMORY
    """

    status: WeightsStatus
    kind: ArenaKind = ArenaKind.HOST
    memory_bytes: int = 0
    needed: int = 0
    free: int = 0
    nonce: bytes = field(default=bytes(NONCE_BYTES), repr=False)
    device_uuid: bytes = NO_DEVICE


def encode_request(it: WeightsRequest) -> bytes:
    """The frame. Raises ValueError where a key, proof or nonce has another length."""
    if (len(it.key), len(it.proof), len(it.nonce)) != (KEY_BYTES, PROOF_BYTES, NONCE_BYTES):
        raise ValueError(f"key, proof and nonce have {KEY_BYTES}, {PROOF_BYTES} and {NONCE_BYTES} bytes")
    return _REQUEST.pack(_REQUEST_MAGIC, it.version, int(it.call), it.num_bytes, it.key, it.proof, it.nonce)


def decode_request(frame: bytes) -> WeightsRequest:
    """The request, of whatever version. Raises FrameError on a wrong length, magic or call."""
    if len(frame) != REQUEST_BYTES:
        raise FrameError(f"a request has {REQUEST_BYTES} bytes, not {len(frame)}")
    magic, version, call, num_bytes, key, proof, nonce = _REQUEST.unpack(frame)
    if magic != _REQUEST_MAGIC or call not in WeightsCall.__members__.values():
        raise FrameError("the magic or call of the request is wrong")
    return WeightsRequest(WeightsCall(call), num_bytes, key, proof, nonce, version)


def encode_reply(it: WeightsReply) -> bytes:
    """The frame."""
    return _REPLY.pack(
        _REPLY_MAGIC, WEIGHTS_PROTOCOL_VERSION, int(it.status), int(it.kind), 0, it.memory_bytes, it.needed, it.free,
        it.nonce, it.device_uuid,
    )  # fmt: skip


def decode_reply(frame: bytes) -> WeightsReply:
    """The reply. Raises FrameError on a wrong length, magic, version, status or kind."""
    if len(frame) != REPLY_BYTES:
        raise FrameError(f"a reply has {REPLY_BYTES} bytes, not {len(frame)}")
    magic, version, status, kind, _, memory_bytes, needed, free, nonce, uuid = _REPLY.unpack(frame)
    if magic != _REPLY_MAGIC:
        raise FrameError("the magic of the reply is wrong")
    if version != WEIGHTS_PROTOCOL_VERSION:
        raise FrameError(f"the reply speaks version {version}; this build speaks {WEIGHTS_PROTOCOL_VERSION}")
    if status not in WeightsStatus.__members__.values() or kind not in ArenaKind.__members__.values():
        raise FrameError(f"the status of the reply is {status}, its kind of memory {kind}")
    return WeightsReply(WeightsStatus(status), ArenaKind(kind), memory_bytes, needed, free, nonce, uuid)


def caller_proof(secret: str, process_id: int, key: bytes, num_bytes: int) -> bytes:
    """32 bytes that only a process that knows the node's internal `secret` can name, for itself alone."""
    content = f"{process_id}/{num_bytes}/".encode() + key
    keyed = hashlib.sha256(secret.encode()).digest()
    return hashlib.blake2b(content, key=keyed, digest_size=PROOF_BYTES, person=b"tessera-weights").digest()


def weights_header(key: bytes, num_bytes: int, nonce: bytes) -> bytes:
    """What stands at the start of the memory once everything else is there."""
    return _HEADER.pack(_HEADER_MAGIC, WEIGHTS_PROTOCOL_VERSION, 0, num_bytes, key, nonce)


def filled_proof(nonce: bytes, header_read_back: bytes) -> bytes:
    """32 bytes that only who was given `nonce`, and read the header back from the memory, can name."""
    return hashlib.blake2b(header_read_back, key=nonce, digest_size=PROOF_BYTES, person=b"tessera-filled").digest()
