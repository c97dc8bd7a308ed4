"""AMX attention for one tile of lanes (a decode): keys are read where they lie, values paired but not transposed.

The same sums in the same order as `attention_products.py`, so results agree bit for bit; only for
blocks of at least sixteen tokens. Called by `attention_tiles.py` alone, on scratch memory of one thread.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np

from decoder.kernels import amx, simd
from decoder.kernels.compiled import kernel
from decoder.kernels.frame import (
    AT_KEYS,
    AT_OUTPUT,
    AT_QUERIES,
    AT_ROWS,
    AT_SCORES,
    AT_VALUES,
    AT_WEIGHTS,
    HEAD_DIM,
    LANES_BYTES,
    ROW_BYTES,
    SPAN,
    VALUE_OFFSET,
)


@kernel
def take_rows(frame: Any, scratch: int, first: int, keys: int, valid: int) -> None:
    """Note the address of sixteen key rows, the `first`-th of the span on, and pair up their values.

    Values from the `valid`-th on count as zero.
    """
    head_dim, stride = frame[HEAD_DIM], frame[ROW_BYTES]
    simd.store_int64(scratch + frame[AT_KEYS] + (first >> 4) * 8, keys)
    values, zeros = keys + frame[VALUE_OFFSET], scratch + frame[AT_ROWS]
    start = scratch + frame[AT_VALUES] + (first >> 5) * 1024 + (first & 31) * 32
    if valid < 16:
        for offset in range(0, stride, 64):
            simd.store_floats(zeros + offset, simd.splat(np.float32(0.0)))
    for index in range(0, 16, 2):
        even = values + index * stride if index < valid else zeros
        odd = values + (index + 1) * stride if index + 1 < valid else zeros
        for block in range(head_dim >> 4):
            out = start + block * (SPAN // 32) * 1024 + index * 32
            simd.store_pairs(out, even + block * 32, odd + block * 32)


@kernel
def scores_in_place(frame: Any, scratch: int, keys: int) -> None:
    """Query-key products of the only tile of lanes and `keys` noted keys (a multiple of 32), at AT_SCORES."""
    row, steps = frame[ROW_BYTES], frame[HEAD_DIM] >> 5
    noted, queries = scratch + frame[AT_KEYS], scratch + frame[AT_QUERIES]
    for first in range(0, keys, 32):
        a = simd.load_int64(noted + (first >> 4) * 8)
        other = simd.load_int64(noted + (first >> 4) * 8 + 8)
        out = scratch + frame[AT_SCORES] + first * LANES_BYTES
        amx.product_2x1(
            a, row, 64, other - a, queries, 1024, steps * 1024, steps, out, LANES_BYTES, 16 * LANES_BYTES, 64
        )


@kernel
def weighted_values_in_place(frame: Any, scratch: int, keys: int) -> None:
    """Values by softmax weights of the only tile of lanes, float32 [head_dim, lane] at AT_OUTPUT."""
    head_dim, wide, steps = frame[HEAD_DIM], (SPAN // 32) * 1024, keys >> 5
    weights, lines = scratch + frame[AT_WEIGHTS], scratch + frame[AT_ROWS]
    lanes = weights + wide
    for step in range(steps):
        simd.transpose_words(weights + step * 1024, 64, lanes + step * 1024, 64)
    for column in range(0, head_dim, 32):
        values = scratch + frame[AT_VALUES] + (column >> 4) * wide
        amx.product_1x2(lanes, 64, 1024, 0, values, 1024, wide, steps, lines + column * 4, head_dim * 4, 0, 64)
    for column in range(0, head_dim, 16):
        out = scratch + frame[AT_OUTPUT] + column * LANES_BYTES
        simd.transpose_words(lines + column * 4, head_dim * 4, out, LANES_BYTES)
