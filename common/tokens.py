"""Token ids at a boundary: packed little-endian int32. Pure; used by every process."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidArgument

TOKEN_DTYPE = np.dtype("<i4")


def pack_tokens(ids: Iterable[int] | NDArray[np.int32] | NDArray[np.int64]) -> bytes:
    """Pack ids (each in int32) into little-endian bytes, 4 per token."""
    array = ids if isinstance(ids, np.ndarray) else np.fromiter(ids, dtype=TOKEN_DTYPE)
    return array.astype(TOKEN_DTYPE, copy=False).tobytes()


def check_tokens(data: bytes, field: str = "tokens") -> None:
    """As `unpack_tokens`, for bytes that stay packed. A single token costs no array."""
    if len(data) == TOKEN_DTYPE.itemsize and data[-1] < 0x80:  # the sign is in the last byte
        return
    unpack_tokens(data, field)


def unpack_tokens(data: bytes, field: str = "tokens") -> NDArray[np.int32]:
    """Read-only int32 view of packed ids. Raises InvalidArgument on a broken length or a negative id."""
    if len(data) % TOKEN_DTYPE.itemsize:
        raise InvalidArgument(field, f"{len(data)} bytes are no whole number of packed int32")
    array = np.frombuffer(data, dtype=TOKEN_DTYPE)
    if array.size and int(array.min()) < 0:
        raise InvalidArgument(field, "holds a negative id; allowed are ids >= 0")
    return array
