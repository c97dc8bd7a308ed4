"""A file mapped over memory of this process, in huge pages (2 MiB) where the kernel gives them.

Two ways lead there. Filesystems with large folios fill the page cache with them when advised so before the first
access. What lies in small pages all the same (another filesystem, a page cache that `cp` or a full memory left in
pieces) MADV_COLLAPSE (madvise(2), Linux 6.1) puts together: on tmpfs, and of other files as the kernel was built.
Invariant: addresses and content never change, and what is refused stays in small pages without an error. Called by
`packed_file.py`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.errors import Internal
from decoder.models.packing import HUGE_PAGE

_MAP_FIXED: Final = 0x10
_MADV_COLLAPSE: Final = 25
_PIECE_BYTES: Final = 32 * HUGE_PAGE  # the kernel stops at the first page that it cannot do: what is then left undone
_SIZES: Final = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:")

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_over(memory: NDArray[np.uint8], fd: int, offset: int) -> None:
    """Put the file's bytes from `offset` where `memory` (u8 [n], page-aligned) lies, for reading alone.

    n may end inside a page. The mapping lives as long as what it replaces. Raises Internal where the kernel refuses.
    """
    if not memory.size:
        return
    wanted, length = memory.ctypes.data, -(-memory.size // mmap.PAGESIZE) * mmap.PAGESIZE
    if _libc.mmap(wanted, length, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) != wanted:
        raise Internal("packed weights cannot be mapped")
    _libc.madvise(wanted, length, mmap.MADV_HUGEPAGE)


def collapse(memory: NDArray[np.uint8]) -> None:
    """Put the small pages of a mapping (u8 [n], at a huge page's address) together, as far as the kernel does.

    Some 0.3 s a GB where all of it has to be copied, next to nothing where none has. Other processes that map the same
    pages find the huge ones at their next access.
    """
    start, end = memory.ctypes.data, memory.ctypes.data + memory.size // HUGE_PAGE * HUGE_PAGE
    for piece in range(start, end, _PIECE_BYTES):
        refused = _libc.madvise(piece, min(_PIECE_BYTES, end - piece), _MADV_COLLAPSE) != 0
        # Not of this kernel, or no huge page left to be had: then not of the next piece either.
        if refused and ctypes.get_errno() in (errno.EINVAL, errno.ENOMEM):
            return


def huge_bytes(memory: NDArray[np.uint8]) -> int:
    """Bytes that huge pages map, of the mapping that `memory` begins in; 0 where the kernel does not tell."""
    address, found, inside = memory.ctypes.data, 0, False
    try:
        with open("/proc/self/smaps") as lines:
            for line in lines:
                first, *rest = line.split()
                if not first.endswith(":"):
                    begin, _, end = first.partition("-")
                    inside = int(begin, 16) <= address < int(end, 16)
                elif inside and first in _SIZES:
                    found += int(rest[0]) * 1024
    except OSError:
        return 0
    return found
