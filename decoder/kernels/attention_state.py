"""Partial results of attention: what a state of one tile of sixteen query lanes holds, and how rows are merged into it.

A state is sums of weighted values, sixteen maxima (base 2) and sixteen sums of weights. Without AMX its sums lie as
[lane, head_dim] (merged here), with AMX as [head_dim, lane] (`attention_tiles.py`). Spans of keys are merged in order
by their maxima (online softmax, Milakov and Gimelshein 2018). Also here: what both forms ask for ahead of its use.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import simd
from decoder.kernels.compiled import kernel
from decoder.kernels.frame import BLOCK_TOKENS, ROW_BYTES, VALUE_OFFSET
from decoder.kernels.stored_rows import row_address

AHEAD: Final = 32  # keys asked for before they are used
NOTHING: Final = np.float32(-1e30)  # maximum of an empty state; finite, so that no difference is NaN


@kernel
def prefetch_rows(frame: Any, plane: int, sequence: int, token: int, end: int) -> None:
    """Ask for sixteen key rows and their value rows, if the sequence has them."""
    if token >= end or frame[BLOCK_TOKENS] < 16:
        return
    address = row_address(frame, plane, sequence, token)
    for offset in range(0, 16 * frame[ROW_BYTES], 64):
        simd.prefetch(address + offset)
        simd.prefetch(address + frame[VALUE_OFFSET] + offset)


@kernel
def clear_lines(state: int, head_dim: int, lines: int) -> None:
    """An empty state, of either layout, whose sums that are used lie in the first `lines` lines of 64 bytes."""
    for line in range(lines):
        simd.store_floats(state + line * 64, simd.splat(np.float32(0.0)))
    simd.store_floats(state + head_dim * 64, simd.splat(NOTHING))
    simd.store_floats(state + head_dim * 64 + 64, simd.splat(np.float32(0.0)))


@kernel
def merge_rows(state: int, head_dim: int, values: int, statistics: int, rows: int, factors: int) -> None:
    """Merge one span of `rows` rows, `values` [row, head_dim] and `statistics` (maxima, sums), into their state.

    An empty state and an empty span both have the sum zero and change nothing. `factors` is room for 128 bytes.
    """
    old_maximum, maximum = simd.load_floats(state + head_dim * 64), simd.load_floats(statistics)
    old_total, total = simd.load_floats(state + head_dim * 64 + 64), simd.load_floats(statistics + 64)
    top = simd.maximum(old_maximum, maximum)
    keep, take = simd.exp2(simd.sub(old_maximum, top)), simd.exp2(simd.sub(maximum, top))
    simd.store_floats(factors, keep)
    simd.store_floats(factors + 64, take)
    for row in range(rows):
        kept, taken = (
            simd.splat(simd.load_float(factors + row * 4)),
            simd.splat(simd.load_float(factors + 64 + row * 4)),
        )
        for offset in range(row * head_dim * 4, (row + 1) * head_dim * 4, 64):
            old = simd.mul(simd.load_floats(state + offset), kept)
            simd.store_floats(state + offset, simd.fma(simd.load_floats(values + offset), taken, old))
    simd.store_floats(state + head_dim * 64, top)
    simd.store_floats(state + head_dim * 64 + 64, simd.fma(total, take, simd.mul(old_total, keep)))
