"""Packed weights as one file that every decoder of the node maps: the second one costs its activations alone.

A file is named after what its bytes follow from: content of the weights, configuration, type, version of the packing.
Invariants: it comes into being whole (written beside, renamed), is never changed after that, and counts only if
owner, mode, sizes, order of arrays and checksum are right; otherwise the weights are packed anew and it is replaced. A
file that cannot be had or made costs time and memory, never the load. The checksum (xxh3) finds damage, not malice: who
can write here is this user. Called by the loader.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from common.errors import Internal
from common.logs import get_logger
from decoder.models.packing import HUGE_PAGE, Memory
from decoder.weights.huge_pages import collapse, huge_bytes, map_over

MAGIC: Final = b"TSRPACK\x01"
KEY_BYTES: Final = 32
_HEADER: Final = struct.Struct(f"<8s{KEY_BYTES}sQ16s16s")  # key, bytes of weights, order of arrays, checksum
_SUM_BYTES: Final = 16
HEADER_BYTES: Final = HUGE_PAGE  # weights begin at a huge page of the file, so that huge pages can map them
_WRITE_BYTES: Final = 64 << 20


class _Ordered(Memory):
    """Knows in which order arrays were taken."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._order = xxhash.xxh3_128()

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        self._order.update(f"{shape}{np.dtype(dtype).str}".encode())
        return super().take(shape, dtype)


class StoringMemory(_Ordered):
    """Memory whose content becomes the file at `path`, and is mapped from it, when all of it is there."""

    def __init__(self, num_bytes: int, path: Path, key: bytes) -> None:
        super().__init__(num_bytes)
        self._path, self._key = path, key

    def finish(self) -> None:
        weights = self._bytes[self._start : self._offset]
        header = pack_header(self._key, len(weights), self._order.digest(), weights)
        try:
            fd = write_file(self._path, header, weights)
        except OSError as error:
            get_logger().warning("weights_not_stored", cause=error.strerror, effect="each decoder holds its own copy")
            return
        try:
            map_over(weights, fd, HEADER_BYTES)
        finally:
            os.close(fd)
        collapse(weights)


class FilledMemory(_Ordered):
    """The weights of a file, mapped for reading. What is taken must be what was stored, in that order."""

    filled = True

    def __init__(self, fd: int, num_weights: int, order: bytes) -> None:
        super().__init__(num_weights)
        self._stored = order
        self._weights = num_weights
        map_over(self._content, fd, HEADER_BYTES)

    @property
    def _content(self) -> NDArray[np.uint8]:
        return self._bytes[self._start : self._start + self._weights]

    @property
    def size(self) -> int:
        """Bytes of weights."""
        return self._weights

    @property
    def huge_bytes(self) -> int:
        """Bytes of weights that huge pages map."""
        return huge_bytes(self._content)

    def matches(self, checksum: bytes) -> bool:
        """Whether the content is what was stored. Reads all of it, then asks for huge pages."""
        if checksum_of(self._content) != checksum:
            return False
        collapse(self._content)
        return True

    def finish(self) -> None:
        if self._order.digest() != self._stored or self.used_bytes != self._weights:
            raise Internal("a file of packed weights has other arrays than the model: PACKING_VERSION was not raised")


def checksum_of(weights: NDArray[np.uint8]) -> bytes:
    """16 bytes."""
    return xxhash.xxh3_128(_view(weights)).digest()


def _view(weights: NDArray[np.uint8]) -> memoryview:
    raw: Any = weights
    return memoryview(raw)


def pack_header(key: bytes, num_weights: int, order: bytes, weights: NDArray[np.uint8]) -> bytes:
    """The bytes before the padding of a file's first huge page, with a checksum of their own at the end."""
    fields = _HEADER.pack(MAGIC, key, num_weights, order, checksum_of(weights))
    return fields + xxhash.xxh3_128(fields).digest()


def write_file(path: Path, header: bytes, weights: NDArray[np.uint8]) -> int:
    """Write the file whole and put it in place; an fd of it for reading. Raises OSError, and leaves nothing then."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # All room first: a disk that is full says so before hours of writing, and not to whom maps the file.
        os.posix_fallocate(fd, 0, HEADER_BYTES + -(-len(weights) // mmap.PAGESIZE) * mmap.PAGESIZE)
        _write_all(fd, memoryview(header), 0)
        for start in range(0, len(weights), _WRITE_BYTES):
            _write_all(fd, _view(weights)[start : start + _WRITE_BYTES], HEADER_BYTES + start)
        # The kernel gives no huge pages to a file that is open for writing, or mapped from a descriptor that is.
        reader = os.open(fresh, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # Not synced: what a crash of the machine leaves of it, the checksum finds.
            fresh.replace(path)
        except OSError:
            os.close(reader)
            raise
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return reader


def read_file(path: Path, key: bytes) -> tuple[FilledMemory | None, str]:
    """The weights of a file that counts, or None and why there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, "absent"
    except OSError as error:
        return None, error.strerror or "unreadable"
    try:
        return _checked(fd, key)
    except OSError as error:
        return None, error.strerror or "unreadable"
    finally:
        os.close(fd)


def _checked(fd: int, key: bytes) -> tuple[FilledMemory | None, str]:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o777077 != 0o100000:
        return None, "owner, mode or kind of the file"
    data = os.pread(fd, _HEADER.size + _SUM_BYTES, 0)
    if len(data) < _HEADER.size + _SUM_BYTES:
        return None, "truncated"
    fields = data[: _HEADER.size]
    magic, stored_key, num_weights, order, checksum = _HEADER.unpack(fields)
    if (magic, stored_key) != (MAGIC, key) or xxhash.xxh3_128(fields).digest() != data[_HEADER.size :]:
        return None, "damaged, or of another model or version"
    if found.st_size != HEADER_BYTES + -(-num_weights // mmap.PAGESIZE) * mmap.PAGESIZE:
        return None, "truncated"
    memory = FilledMemory(fd, num_weights, order)
    return (memory, "") if memory.matches(checksum) else (None, "damaged")


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def wait_for(try_once: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Whether `try_once` came true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not try_once():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True
