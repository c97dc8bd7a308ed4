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
    SCALES,
    SPAN,
    VALUE_OFFSET,
)
from decoder.kernels.panels import pack_panel
from decoder.kernels.sets import quantized
from decoder.kernels.stored_rows import block_address, load_scales, row_address, scale_address

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


def note_scales(kernels: Any, frame: Any, place: int, block: int, plane: int, slot: int) -> None:
    """Write where the scales of a block's keys of `plane` lie from `slot` on to `place`, if rows have any."""
    raise NotImplementedError("compiled code only")


@variant(note_scales)
def _note_scales(kernels: Any, frame: Any, place: Any, block: Any, plane: Any, slot: Any) -> Any:
    if not quantized(kernels):
        return lambda kernels, frame, place, block, plane, slot: None

    def note(kernels: Any, frame: Any, place: Any, block: Any, plane: Any, slot: Any) -> None:
        simd.store_int64(place, block + frame[SCALES] + (plane // frame[HEAD_DIM] + slot) * 2)

    return note


def take_noted_scales(kernels: Any, frame: Any, scratch: int, key: int, noted: int) -> None:
    """As `take_scales`, of sixteen keys whose scales lie where the address at `noted` says."""
    raise NotImplementedError("compiled code only")


@variant(take_noted_scales)
def _take_noted_scales(kernels: Any, frame: Any, scratch: Any, key: Any, noted: Any) -> Any:
    if not quantized(kernels):
        return lambda kernels, frame, scratch, key, noted: None

    def take(kernels: Any, frame: Any, scratch: Any, key: Any, noted: Any) -> None:
        target, source = scratch + frame[AT_WEIGHTS] + key * 4, simd.load_int64(noted)
        simd.store_floats(target, load_scales(kernels, source))
        values = source + frame[VALUE_OFFSET] // frame[HEAD_DIM] * 2
        simd.store_floats(target + VALUE_SCALES, load_scales(kernels, values))

    return take


def fetch_scales(kernels: Any, frame: Any, plane: int, sequence: int, token: int, end: int) -> None:
    """Ask for the scales of keys `token` to `end`, by sixteen, and of their values, if rows have any."""
    raise NotImplementedError("compiled code only")


@variant(fetch_scales)
def _fetch_scales(kernels: Any, frame: Any, plane: Any, sequence: Any, token: Any, end: Any) -> Any:
    if not quantized(kernels):
        return lambda kernels, frame, plane, sequence, token, end: None

    def fetch(kernels: Any, frame: Any, plane: Any, sequence: Any, token: Any, end: Any) -> None:
        row, apart = plane // frame[HEAD_DIM], frame[VALUE_OFFSET] // frame[HEAD_DIM] * 2
        slot, tokens = token % frame[BLOCK_TOKENS], frame[BLOCK_TOKENS]
        for ahead in range(token, end, 16):
            source = block_address(frame, sequence, ahead) + frame[SCALES] + (row + slot) * 2
            simd.prefetch(source)
            simd.prefetch(source + apart)
            slot = slot + 16 if slot + 16 < tokens else 0

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
