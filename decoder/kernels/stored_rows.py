"""Rows of keys and values as they are stored, by storage: float32 to elements, and elements back for attention.

A row is one token's keys, or values, of one head. A quantised row has a bfloat16 scale beside it, the largest magnitude
over that of the element type, rounded up (see `common/layout.py`); a row that holds a NaN or an infinity gets a NaN, so
all of it is read as NaN. Keys in fp8 have the best of sixteen scales from there on (`_fitted_scale`). Called by
`rows.py` and by attention.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import simd
from decoder.kernels.compiled import inlined, inlined_variant, kernel, made_kernel, variant
from decoder.kernels.frame import ARENA, BLOCK_BYTES, BLOCK_TOKENS, HEAD_DIM, ROW_BYTES, SCALES, TABLE_WIDTH, TABLES
from decoder.kernels.sets import (
    Bfloat16Storage,
    Float8Storage,
    Float16Storage,
    Float32Storage,
    Int8Storage,
    quantized,
    storage,
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


@inlined
def _fitted_scale(source: Any, head_dim: Any) -> Any:
    """Of the scale for e4m3 and of it times 17/16 to 31/16 that with the least squared error of the row, the first of
    equals. Errors are counted in whole units of a quarter of the scale's power of two, so that the sum is exact."""
    least = _scale_of(source, head_dim, E4M3_PEAK)
    unit = simd.misfit_unit(least)
    scale, error = least, np.float32(np.inf)
    for sixteenths in range(16):
        tried = simd.widened_scale(least, np.float32(1.0) + np.float32(sixteenths) * np.float32(0.0625))
        inverse = simd.div(simd.splat(np.float32(1.0)), tried)
        total = simd.splat(np.float32(0.0))
        for column in range(0, head_dim, 16):
            misfit = simd.e4m3_misfit(simd.load_floats(source + column * 4), tried, inverse, unit)
            total = simd.add(total, misfit)
        found = simd.reduce_add(total)
        scale = simd.select_less(found, error, tried, scale)
        error = min(error, found)
    return scale


def store_row(kernels: Any, address: int, scale_address: int, source: int, head_dim: int, is_key: bool) -> None:
    """A row of float32 at `source` as stored elements at `address`; quantised, with its scale at `scale_address`."""
    raise NotImplementedError("compiled code only")


@variant(store_row)
def _store_row(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any, is_key: Any) -> Any:
    kind = storage(kernels)
    if kind is Float32Storage:

        def float32(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any, is_key: Any) -> None:
            for column in range(0, head_dim, 16):
                simd.store_floats(address + column * 4, simd.load_floats(source + column * 4))

        return float32
    if kind is Float16Storage:

        def float16(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any, is_key: Any) -> None:
            for column in range(0, head_dim, 16):
                simd.store_f16(address + column * 2, simd.load_floats(source + column * 4))

        return float16
    if kind is Bfloat16Storage:

        def bfloat16(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any, is_key: Any) -> None:
            for column in range(0, head_dim, 16):
                simd.store_bf16(address + column * 2, simd.load_floats(source + column * 4))

        return bfloat16
    if kind is Int8Storage:

        def int8(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any, is_key: Any) -> None:
            scale = _scale_of(source, head_dim, INT8_PEAK)
            simd.store_scale(scale_address, scale)
            for column in range(0, head_dim, 16):
                simd.store_int8(address + column, simd.div(simd.load_floats(source + column * 4), scale))

        return int8

    def float8(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any, is_key: Any) -> None:
        scale = _fitted_scale(source, head_dim) if is_key else _scale_of(source, head_dim, E4M3_PEAK)
        simd.store_scale(scale_address, scale)
        for column in range(0, head_dim, 16):
            simd.store_e4m3(address + column, simd.div(simd.load_floats(source + column * 4), scale))

    return float8


@kernel
def copy_rows(source: int, num_bytes: int, target: int) -> None:
    """Rows as they are stored; whole cache lines are written."""
    for offset in range(0, num_bytes, 64):
        simd.store_ints(target + offset, simd.load_ints(source + offset))


def load_rows(kernels: Any, source: int, rows: int, head_dim: int, target: int) -> None:
    """Consecutive rows of stored elements as float32, without their scales."""
    raise NotImplementedError("compiled code only")


def _loaded(kind: type, load: Any, num_bytes: int) -> Any:
    @made_kernel(kind.__name__)
    def rows_of(source: int, rows: int, head_dim: int, target: int) -> None:
        for index in range(0, rows * head_dim, 16):
            simd.store_floats(target + index * 4, load(source + index * num_bytes))

    return rows_of


_LOADED: Final[dict[type, Any]] = {
    Float32Storage: _loaded(Float32Storage, simd.load_floats, 4),
    Bfloat16Storage: _loaded(Bfloat16Storage, simd.load_bf16, 2),
    Float16Storage: _loaded(Float16Storage, simd.load_f16, 2),
    Int8Storage: _loaded(Int8Storage, simd.load_int8, 1),
    Float8Storage: _loaded(Float8Storage, simd.load_e4m3, 1),
}


@variant(load_rows)
def _load_rows(kernels: Any, source: Any, rows: Any, head_dim: Any, target: Any) -> Any:
    loaded = _LOADED[storage(kernels)]
    return lambda kernels, source, rows, head_dim, target: loaded(source, rows, head_dim, target)


def load_scales(kernels: Any, source: int) -> Any:
    """What the elements that `load_rows` gives for sixteen rows are to be multiplied by."""
    raise NotImplementedError("compiled code only")


@inlined_variant(load_scales)
def _load_scales(kernels: Any, source: Any) -> Any:
    if storage(kernels) is Float8Storage:
        return lambda kernels, source: simd.mul(simd.load_bf16(source), simd.splat(_E4M3_UNIT))
    return lambda kernels, source: simd.load_bf16(source)


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
def table_entry(frame: Any, sequence: int, token: int) -> int:
    """Where the tables name the block of a sequence's token; the next entry is that of the tokens after the block's."""
    return frame[TABLES] + (sequence * frame[TABLE_WIDTH] + token // frame[BLOCK_TOKENS]) * 4


@kernel
def entry_address(frame: Any, entry: int) -> int:
    """Where the block starts that an entry of the tables names."""
    return frame[ARENA] + np.int64(simd.load_int32(entry)) * frame[BLOCK_BYTES]


@kernel
def block_address(frame: Any, sequence: int, token: int) -> int:
    """Where the block of a sequence's token starts."""
    return entry_address(frame, table_entry(frame, sequence, token))


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
