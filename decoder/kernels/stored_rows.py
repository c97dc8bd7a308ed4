"""Rows of keys and values as they are stored, by storage: float32 to elements, and elements back for attention.

A row is one token's keys, or values, of one head. A quantised row has a bfloat16 scale beside it, the largest magnitude
over that of the element type, rounded up (see `common/layout.py`); a row that holds a NaN or an infinity gets a NaN, so
all of it is read as NaN. Called by `rows.py` and `attention.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import simd
from decoder.kernels.compiled import inlined, inlined_variant, kernel, variant
from decoder.kernels.frame import ARENA, BLOCK_BYTES, BLOCK_TOKENS, HEAD_DIM, ROW_BYTES, SCALES, TABLE_WIDTH, TABLES
from decoder.kernels.sets import (
    Bfloat16Storage,
    Float16Storage,
    Float32Storage,
    Int8Storage,
    quantized,
    storage,
    tile_attention,
)

INT8_PEAK: Final = np.float32(127.0)
E4M3_PEAK: Final = np.float32(448.0)
_E4M3_UNIT: Final = np.float32(256.0)  # what `simd.load_e4m3` leaves out


@inlined
def _scale_of(source: Any, head_dim: Any, peak: Any) -> Any:
    most = simd.splat_ints(np.int32(0))
    for column in range(0, head_dim, 16):
        most = simd.magnitudes(simd.load_floats(source + column * 4), most)
    return simd.row_scale(most, peak)


def store_row(kernels: Any, address: int, scale_address: int, source: int, head_dim: int) -> None:
    """A row of float32 at `source` as stored elements at `address`; quantised, with its scale at `scale_address`."""
    raise NotImplementedError("compiled code only")


@variant(store_row)
def _store_row(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any) -> Any:
    kind = storage(kernels)
    if kind is Float32Storage:

        def float32(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any) -> None:
            for column in range(0, head_dim, 16):
                simd.store_floats(address + column * 4, simd.load_floats(source + column * 4))

        return float32
    if kind is Float16Storage:

        def float16(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any) -> None:
            for column in range(0, head_dim, 16):
                simd.store_f16(address + column * 2, simd.load_floats(source + column * 4))

        return float16
    if kind is Bfloat16Storage:

        def bfloat16(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any) -> None:
            for column in range(0, head_dim, 16):
                simd.store_bf16(address + column * 2, simd.load_floats(source + column * 4))

        return bfloat16
    if kind is Int8Storage:

        def int8(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any) -> None:
            scale = _scale_of(source, head_dim, INT8_PEAK)
            simd.store_scale(scale_address, scale)
            for column in range(0, head_dim, 16):
                simd.store_int8(address + column, simd.div(simd.load_floats(source + column * 4), scale))

        return int8

    def float8(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any) -> None:
        scale = _scale_of(source, head_dim, E4M3_PEAK)
        simd.store_scale(scale_address, scale)
        for column in range(0, head_dim, 16):
            simd.store_e4m3(address + column, simd.div(simd.load_floats(source + column * 4), scale))

    return float8


def load_rows(kernels: Any, source: int, scales: int, rows: int, head_dim: int, target: int) -> None:
    """Consecutive rows as attention takes them: as stored where tiles do, else as float32."""
    raise NotImplementedError("compiled code only")


@variant(load_rows)
def _load_rows(kernels: Any, source: Any, scales: Any, rows: Any, head_dim: Any, target: Any) -> Any:
    kind = storage(kernels)
    if tile_attention(kernels) or kind is Float32Storage:

        def copy(kernels: Any, source: Any, scales: Any, rows: Any, head_dim: Any, target: Any) -> None:
            for offset in range(0, rows * head_dim * stored_bytes(kernels), 64):
                simd.store_ints(target + offset, simd.load_ints(source + offset))

        return copy
    if kind is Float16Storage:

        def float16(kernels: Any, source: Any, scales: Any, rows: Any, head_dim: Any, target: Any) -> None:
            for index in range(0, rows * head_dim, 16):
                simd.store_floats(target + index * 4, simd.load_f16(source + index * 2))

        return float16
    if kind is Bfloat16Storage:

        def bfloat16(kernels: Any, source: Any, scales: Any, rows: Any, head_dim: Any, target: Any) -> None:
            for index in range(0, rows * head_dim, 16):
                simd.store_floats(target + index * 4, simd.load_bf16(source + index * 2))

        return bfloat16
    if kind is Int8Storage:

        def int8(kernels: Any, source: Any, scales: Any, rows: Any, head_dim: Any, target: Any) -> None:
            for row in range(rows):
                scale, start = simd.splat_bf16(scales + row * 2), row * head_dim
                for index in range(start, start + head_dim, 16):
                    simd.store_floats(target + index * 4, simd.mul(simd.load_int8(source + index), scale))

        return int8

    def float8(kernels: Any, source: Any, scales: Any, rows: Any, head_dim: Any, target: Any) -> None:
        for row in range(rows):
            scale, start = simd.mul(simd.splat_bf16(scales + row * 2), simd.splat(_E4M3_UNIT)), row * head_dim
            for index in range(start, start + head_dim, 16):
                simd.store_floats(target + index * 4, simd.mul(simd.load_e4m3(source + index), scale))

    return float8


def stored_bytes(kernels: Any) -> int:
    """Bytes of a stored element."""
    raise NotImplementedError("compiled code only")


@inlined_variant(stored_bytes)
def _stored_bytes(kernels: Any) -> Any:
    if quantized(kernels):
        return lambda kernels: 1
    if storage(kernels) is Float32Storage:
        return lambda kernels: 4
    return lambda kernels: 2


@kernel
def block_address(frame: Any, sequence: int, token: int) -> int:
    """Where the block of a sequence's token starts."""
    entry = frame[TABLES] + (sequence * frame[TABLE_WIDTH] + token // frame[BLOCK_TOKENS]) * 4
    return frame[ARENA] + np.int64(simd.load_int32(entry)) * frame[BLOCK_BYTES]


@kernel
def row_address(frame: Any, plane: int, sequence: int, token: int) -> int:
    """Address of the key row of one token; `plane` is the offset of (layer, key head) inside a block."""
    return block_address(frame, sequence, token) + plane + (token % frame[BLOCK_TOKENS]) * frame[ROW_BYTES]


def scale_address(kernels: Any, frame: Any, plane: int, sequence: int, token: int) -> int:
    """Address of the scale of that row; 0 where rows have none."""
    raise NotImplementedError("compiled code only")


@variant(scale_address)
def _scale_address(kernels: Any, frame: Any, plane: Any, sequence: Any, token: Any) -> Any:
    if not quantized(kernels):
        return lambda kernels, frame, plane, sequence, token: 0

    def address(kernels: Any, frame: Any, plane: Any, sequence: Any, token: Any) -> int:
        row = plane // frame[HEAD_DIM] + token % frame[BLOCK_TOKENS]
        return block_address(frame, sequence, token) + frame[SCALES] + row * 2

    return address
