"""A call with header bytes that no client library would send: HTTP/2 frames by hand, header fields as plain literals.

For the tests of odd credentials. It reads no headers of the answer; it tells whether the call brought a message.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _CONTINUATION = 0, 1, 4, 6, 9
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_FRAME = 16_384
_STREAM = 1


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _length(number: int) -> bytes:
    """An integer of seven prefix bits, the first bit 0 (no Huffman code)."""
    if number < 127:
        return bytes([number])
    number, parts = number - 127, [127]
    while number >= 128:
        parts.append(number % 128 + 128)
        number //= 128
    return bytes([*parts, number])


def _field(name: bytes, value: bytes) -> bytes:
    return b"\x10" + _length(len(name)) + name + _length(len(value)) + value


def answered(address: tuple[str, int], method: str, message: bytes, authorization: bytes, within: float = 10.0) -> bool:
    """Whether a unary call of `method` with this header value brings a message before it ends or is cut off.

    Raises TimeoutError where neither happens in time.
    """
    fields = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", method.encode()), (b":authority", b"localhost"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"authorization", authorization),
    ]  # fmt: skip
    block = b"".join(_field(name, value) for name, value in fields)
    pieces = [block[at : at + _FRAME] for at in range(0, len(block), _FRAME)]
    frames = [_frame(_SETTINGS, 0, 0, b"")]
    for index, piece in enumerate(pieces):
        end = _END_HEADERS if index == len(pieces) - 1 else 0
        frames.append(_frame(_CONTINUATION if index else _HEADERS, end, _STREAM, piece))
    frames.append(_frame(_DATA, _END_STREAM, _STREAM, b"\0" + struct.pack(">I", len(message)) + message))
    deadline = time.monotonic() + within
    with socket.create_connection(address, timeout=within) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(_PREFACE + b"".join(frames))
        return _has_message(connection, deadline)


def _has_message(connection: socket.socket, deadline: float) -> bool:
    data, found = b"", False
    with contextlib.suppress(ConnectionResetError):
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError("the call neither ended nor was it cut off")
            received = connection.recv(65_536)
            if not received:
                return found
            data += received
            while len(data) >= 9 and len(data) >= 9 + (size := int.from_bytes(data[:3], "big")):
                kind, flags, payload = data[3], data[4], data[9 : 9 + size]
                stream = int.from_bytes(data[5:9], "big")
                data = data[9 + size :]
                if kind == _SETTINGS and not flags & _ACK:
                    connection.sendall(_frame(_SETTINGS, _ACK, 0, b""))
                if kind == _PING and not flags & _ACK:
                    connection.sendall(_frame(_PING, _ACK, 0, payload))
                if stream == _STREAM:
                    found = found or (kind == _DATA and bool(payload))
                    if (kind in (_DATA, _HEADERS) and flags & _END_STREAM) or kind == 3:  # the end, or RST_STREAM
                        return found
    return found
