"""HostArena: an arena in ordinary memory, as a sealed memfd.

Invariant: the file can neither grow nor shrink (so that no peer can make another one's access fault), its pages are
taken from the machine only when a decoder first writes them, and the nonce lies at offset 0. The daemon writes
through the fd, never through a mapping of its own.
"""

from __future__ import annotations

import fcntl
import hmac
import os
from typing import Final

from cachemgr.arena.base import Arena, check_sizes
from common.arena_sizes import ArenaSizes

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_POISON_CHUNK_BYTES: Final = 1 << 20


class HostArena(Arena):
    """A sealed, sparse memfd of `sizes.arena_bytes` bytes.

    `nonce` is NONCE_BYTES random bytes that the caller draws. Raises ValueError on an impossible size, OSError where
    the system refuses the memory file.
    """

    def __init__(self, sizes: ArenaSizes, *, nonce: bytes) -> None:
        check_sizes(sizes, nonce)
        self.sizes, self.nonce = sizes, nonce
        self._fd = os.memfd_create("tessera-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.arena_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            _write_all(self._fd, nonce, 0)
        except OSError:
            self.close()
            raise

    @classmethod
    def adopt(cls, fd: int, sizes: ArenaSizes, *, nonce: bytes) -> HostArena:
        """The arena behind an fd that a peer has handed back; `fd` is ours to close from now on, whatever happens.

        Raises ValueError where it is not writable, not sealed, of another size or with another nonce than these.
        """
        arena = cls.__new__(cls)
        arena.sizes, arena.nonce, arena._fd = sizes, nonce, fd
        try:
            wrong = _what_differs(fd, arena.arena_bytes, nonce)
        except OSError as error:
            wrong = f"it is no sealed memory file ({error.strerror})"
        if wrong:
            arena.close()
            raise ValueError(f"the memory that was handed back is not the arena: {wrong}")
        return arena

    def fileno(self) -> int:
        if self._fd < 0:
            raise ValueError("the arena is closed")
        return self._fd

    def _fill(self, offset: int, num_bytes: int) -> None:
        fd, end = self.fileno(), offset + num_bytes
        pattern = b"\xff" * min(num_bytes, _POISON_CHUNK_BYTES)
        while offset < end:
            part = pattern[: end - offset]
            _write_all(fd, part, offset)
            offset += len(part)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _what_differs(fd: int, arena_bytes: int, nonce: bytes) -> str:
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        return "its seals differ"
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        return "it cannot be written"
    size = os.fstat(fd).st_size
    if size != arena_bytes:
        return f"it has {size} bytes, not {arena_bytes}"
    return "" if hmac.compare_digest(os.pread(fd, len(nonce), 0), nonce) else "its nonce differs"


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
