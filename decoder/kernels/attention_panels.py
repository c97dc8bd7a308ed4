"""Sixteen keys of a span as a panel, from whatever blocks they lie in, and the scales of quantised ones beside them.

Called by `attention_rows.py`, where several tiles share a widened span, and by `attention_alone.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import simd
from decoder.kernels.compiled import kernel, variant
from decoder.kernels.frame import (
    AT_ROWS,
    AT_WEIGHTS,
    BLOCK_TOKENS,
    CONTEXT_LENS,
    HEAD_DIM,
    ROW_BYTES,
    SPAN,
    VALUE_OFFSET,
)
from decoder.kernels.panels import pack_panel
from decoder.kernels.sets import quantized
from decoder.kernels.stored_rows import load_scales, row_address, scale_address

VALUE_SCALES: Final = SPAN * 4 + 64  # bytes from the scales of keys to those of values


def take_scales(kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, key: int) -> None:
    """Widen the scales of sixteen keys, the `key`-th of the span on, and of their values, into the scratch memory."""
    raise NotImplementedError("compiled code only")


@variant(take_scales)
def _take_scales(kernels: Any, frame: Any, scratch: Any, plane: Any, sequence: Any, start: Any, key: Any) -> Any:
    if not quantized(kernels):
        return lambda kernels, frame, scratch, plane, sequence, start, key: None

    def scales(kernels: Any, frame: Any, scratch: Any, plane: Any, sequence: Any, start: Any, key: Any) -> None:
        target, apart = scratch + frame[AT_WEIGHTS] + key * 4, frame[VALUE_OFFSET] // frame[HEAD_DIM] * 2
        run = min(16, frame[BLOCK_TOKENS])
        end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
        for index in range(0, min(16, end - start - key), run):
            # Lanes past a short run are anything until the next run fills them.
            source = scale_address(kernels, frame, plane, sequence, start + key + index)
            simd.store_floats(target + index * 4, load_scales(kernels, source))
            simd.store_floats(target + VALUE_SCALES + index * 4, load_scales(kernels, source + apart))

    return scales


def fetch_scales(kernels: Any, frame: Any, plane: int, sequence: int, token: int) -> None:
    """Ask for the scales of sixteen keys from `token` on, and of their values, if rows have any."""
    raise NotImplementedError("compiled code only")


@variant(fetch_scales)
def _fetch_scales(kernels: Any, frame: Any, plane: Any, sequence: Any, token: Any) -> Any:
    if not quantized(kernels):
        return lambda kernels, frame, plane, sequence, token: None

    def fetch(kernels: Any, frame: Any, plane: Any, sequence: Any, token: Any) -> None:
        source = scale_address(kernels, frame, plane, sequence, token)
        simd.prefetch(source)
        simd.prefetch(source + frame[VALUE_OFFSET] // frame[HEAD_DIM] * 2)

    return fetch


@kernel
def copy_small_rows(frame: Any, plane: int, sequence: int, token: int, first: int, last: int, target: int) -> None:
    """Copy rows `first` to `last` of those from `token` on, in blocks of any size, to their places at `target`."""
    stride = frame[ROW_BYTES]
    for index in range(first, last):
        source, place = row_address(frame, plane, sequence, token + index), target + index * stride
        for offset in range(0, stride, 16):
            simd.copy_16_bytes(place + offset, source + offset)


@kernel
def take_panel(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, key: int, floor: int, keys: int,
    target: int,
) -> None:  # fmt: skip
    """Sixteen keys, the `key`-th of the span on, as a panel at `target`; those outside [floor, end) are anything.

    In blocks of at least sixteen tokens the rows lie at `keys`. Those of smaller blocks are copied together first.
    """
    take_scales(kernels, frame, scratch, plane, sequence, start, key)
    head_dim, stride = frame[HEAD_DIM], frame[ROW_BYTES]
    if frame[BLOCK_TOKENS] >= 16:
        pack_panel(kernels, keys, stride, head_dim, target)
        return
    end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
    rows = scratch + frame[AT_ROWS]
    copy_small_rows(frame, plane, sequence, start + key, max(0, floor - start - key), min(16, end - start - key), rows)
    pack_panel(kernels, rows, stride, head_dim, target)
