"""Large arrays get memory of their own, which goes back to the system when they are freed.

A full check or a replay makes arrays of the size of the pool for a moment. By default the C library learns from the
first of them to take such arrays from its heap, where the room stays this process's for good. Called at the start.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

LARGE_BYTES: Final = 128 * 1024
_MMAP_THRESHOLD: Final = -3  # M_MMAP_THRESHOLD of mallopt(3); setting it ends its adjustment


def give_large_arrays_back() -> None:
    """Does nothing where the C library has no mallopt."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
