"""Rows of keys and values as they are stored, by storage: float32 to elements, and elements back for attention.

A row is one token's keys, or values, of one head. A quantised row has a bfloat16 scale beside it, the largest magnitude
over that of the element type, rounded up (see `common/layout.py`); a row that holds a NaN or an infinity gets a NaN, so
all of it is read as NaN. Keys in fp8 have the best of sixteen scales from there on (`row_scales.py`). Called by
`rows.py` and by attention.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import simd
from decoder.kernels.compiled import inlined_variant, kernel, made_kernel, variant
from decoder.kernels.frame import ARENA, BLOCK_BYTES, BLOCK_TOKENS, HEAD_DIM, ROW_BYTES, SCALES, TABLE_WIDTH, TABLES
from decoder.kernels.row_scales import E4M3_PEAK, INT8_PEAK, fitted_scale, lay_out_rates, scale_of
from decoder.kernels.sets import (
    Bfloat16Storage,
    Float8Storage,
    Float16Storage,
    Float32Storage,
    Int8Storage,
    quantized,
    storage,
)

_E4M3_UNIT: Final = np.float32(256.0)  # what `simd.load_e4m3` leaves out


def note_rates(kernels: Any, norm: int, head_dim: int, half: int, target: int) -> None:
    """`lay_out_rates`, where `store_row` reads them."""
    raise NotImplementedError("compiled code only")


@variant(note_rates)
def _note_rates(kernels: Any, norm: Any, head_dim: Any, half: Any, target: Any) -> Any:
    if storage(kernels) is Float8Storage:
        return lambda kernels, norm, head_dim, half, target: lay_out_rates(norm, head_dim, half, target)
    return lambda kernels, norm, head_dim, half, target: None


def store_row(kernels: Any, address: int, scale_address: int, source: int, head_dim: int, rates: int) -> None:
    """A row of float32 at `source` as stored elements at `address`; quantised, with its scale at `scale_address`.

    `rates` is the address of those of `lay_out_rates` for a key, whose scale is fitted in e4m3, and 0 for a value.
    """
    raise NotImplementedError("compiled code only")


@variant(store_row)
def _store_row(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any, rates: Any) -> Any:
    kind = storage(kernels)
    if kind is Float32Storage:

        def float32(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any, rates: Any) -> None:
            for column in range(0, head_dim, 16):
                simd.store_floats(address + column * 4, simd.load_floats(source + column * 4))

        return float32
    if kind is Float16Storage:

        def float16(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any, rates: Any) -> None:
            for column in range(0, head_dim, 16):
                simd.store_f16(address + column * 2, simd.load_floats(source + column * 4))

        return float16
    if kind is Bfloat16Storage:

        def bfloat16(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any, rates: Any) -> None:
            for column in range(0, head_dim, 16):
                simd.store_bf16(address + column * 2, simd.load_floats(source + column * 4))

        return bfloat16
    if kind is Int8Storage:

        def int8(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any, rates: Any) -> None:
            scale = scale_of(source, head_dim, INT8_PEAK)
            simd.store_scale(scale_address, scale)
            for column in range(0, head_dim, 16):
                simd.store_int8(address + column, simd.div(simd.load_floats(source + column * 4), scale))

        return int8

    def float8(kernels: Any, address: Any, scale_address: Any, source: Any, head_dim: Any, rates: Any) -> None:
        scale = fitted_scale(source, head_dim, rates) if rates else scale_of(source, head_dim, E4M3_PEAK)
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
