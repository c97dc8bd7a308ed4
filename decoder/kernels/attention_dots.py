"""Attention of a tile of at most sixteen query rows over one span of keys, by dot products of pairs of bfloat16.

As `attention_rows.py`, without widening: queries are pairs of their elements, keys panels of such pairs, and softmax
weights and values pairs of neighbouring keys, 2j and 2j + 1 of the span. Weights are rounded to bfloat16. A tile alone
(a decode) reads keys and values where they lie (`attention_dots_alone.py`); several tiles (a prefill, a shared prefix)
share one packing of the span. Both do the same sums in the same order. Weighted values lie in the order of
`dot_products.py`, until they are finished. Called by `attention_forms.py` alone, on scratch memory of one thread.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np

from decoder.kernels import dots, simd
from decoder.kernels.attention_alone import SCORE_ROW
from decoder.kernels.attention_dots_alone import WEIGHT_ROW, scores_in_place, values_in_place
from decoder.kernels.attention_dots_softmax import row_maximum, row_weights
from decoder.kernels.attention_panels import copy_small_rows
from decoder.kernels.attention_softmax import cap_row
from decoder.kernels.attention_state import AHEAD, merge_rows, prefetch_rows
from decoder.kernels.compiled import kernel
from decoder.kernels.dot_products import pack_pair, panel_product, value_product
from decoder.kernels.frame import (
    AT_KEYS,
    AT_LIMITS,
    AT_OUTPUT,
    AT_QUERIES,
    AT_ROWS,
    AT_SCORES,
    AT_STATISTICS,
    AT_VALUES,
    AT_WEIGHTS,
    BLOCK_TOKENS,
    CONTEXT_LENS,
    HEAD_DIM,
    ROW_BYTES,
    RUN,
    SCALE,
    SCORE_CAP,
    SPAN,
    VALUE_OFFSET,
)
from decoder.kernels.panels import pack_words
from decoder.kernels.stored_rows import row_address


@kernel
def copy_queries(source: int, head_dim: int, lanes: int, target: int) -> None:
    """Take in `lanes` query rows as they are, bfloat16."""
    for offset in range(0, lanes * head_dim * 2, 32):
        simd.copy_16_bytes(target + offset, source + offset)
        simd.copy_16_bytes(target + offset + 16, source + offset + 16)


@kernel
def gather_span(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, begin: int, count: int
) -> None:
    """Pack keys and values `begin` to `count` of the span from `start`: panels at AT_KEYS, pairs at AT_VALUES."""
    head_dim, row_bytes, whole = frame[HEAD_DIM], frame[ROW_BYTES], frame[BLOCK_TOKENS] >= RUN
    end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
    rows, first = scratch + frame[AT_ROWS], begin & ~15
    small_values, zeros = rows + RUN * row_bytes, rows + 2 * RUN * row_bytes
    for offset in range(0, row_bytes, 32):
        simd.store_floats(zeros + offset, simd.splat(np.float32(0.0)))
    # Rows of one head lie in short runs, too short for the hardware to foresee the next one.
    for key in range(first, first + AHEAD, RUN):
        prefetch_rows(frame, plane, sequence, start + key, end)
    for key in range(first, count, RUN):
        prefetch_rows(frame, plane, sequence, start + key + AHEAD, end)
        low, high = max(0, begin - key), min(RUN, count - key)
        keys_at, values_at = rows, small_values
        if whole:
            keys_at = row_address(frame, plane, sequence, start + key)
            values_at = keys_at + frame[VALUE_OFFSET]
        else:
            copy_small_rows(frame, plane, sequence, start + key, low, high, rows)
            copy_small_rows(frame, plane + frame[VALUE_OFFSET], sequence, start + key, low, high, small_values)
        pack_words(keys_at, row_bytes, head_dim >> 1, scratch + frame[AT_KEYS] + (key >> 4) * head_dim * 32)
        for index in range(low & ~1, high, 2):
            even = values_at + index * row_bytes if index >= low else zeros
            odd = values_at + (index + 1) * row_bytes if index + 1 < high else zeros
            pack_pair(even, odd, head_dim, (key + index) >> 1, scratch + frame[AT_VALUES])


@kernel
def attend_tile(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, window: int, tile: int, rows: int,
    alone: bool, state: int,
) -> None:  # fmt: skip
    """`rows` query rows of one tile over one span, merged into their state; unless `alone`, the span is gathered."""
    head_dim, limits = frame[HEAD_DIM], scratch + frame[AT_LIMITS] + tile * 64
    keys = min(SPAN, np.int64(simd.load_int32(limits + (rows - 1) * 4)) - start)
    if keys <= 0:
        return
    begin = max(0, np.int64(simd.load_int32(limits)) - window - start)
    if begin >= keys:
        return
    table, weights, output = scratch + frame[AT_SCORES], scratch + frame[AT_WEIGHTS], scratch + frame[AT_OUTPUT]
    if alone:
        scores_in_place(kernels, frame, scratch, plane, sequence, start, begin, keys, rows)
    else:
        first, panel = begin >> 4, head_dim * 32
        panel_product(
            scratch + frame[AT_QUERIES] + tile * 16 * head_dim * 2, head_dim * 2, rows,
            scratch + frame[AT_KEYS] + first * panel, panel, ((keys + 15) >> 4) - first, head_dim >> 1,
            table + first * 64, SCORE_ROW,
        )  # fmt: skip
    statistics, scale = scratch + frame[AT_STATISTICS], simd.load_float(frame[SCALE])
    for row in range(rows):
        line, bound = table + row * SCORE_ROW, np.int64(simd.load_int32(limits + row * 4)) - start
        if frame[SCORE_CAP]:
            cap_row(line, begin, keys, frame[SCORE_CAP])
        top = row_maximum(line, begin, keys, bound - window, bound)
        simd.store_float(statistics + row * 4, np.float32(top * scale))
    for row in range(rows):
        bound = np.int64(simd.load_int32(limits + row * 4)) - start
        maximum, place = simd.load_float(statistics + row * 4), weights + row * WEIGHT_ROW
        total = row_weights(table + row * SCORE_ROW, begin, keys, bound - window, bound, scale, maximum, place)
        simd.store_float(statistics + 64 + row * 4, total)
    if alone:
        values_in_place(frame, scratch, begin, keys, rows)
    else:
        value_product(
            weights, WEIGHT_ROW, rows, scratch + frame[AT_VALUES], head_dim >> 4, begin >> 1, (keys + 1) >> 1, output,
            head_dim * 4,
        )  # fmt: skip
    merge_rows(state, head_dim, output, statistics, rows, statistics + 128)


@kernel
def put_in_order(lines: int, head_dim: int, lanes: int) -> None:
    """Bring the elements of `lanes` rows of weighted values into their order."""
    for lane in range(lanes):
        row = lines + lane * head_dim * 4
        for column in range(0, head_dim & ~31, 32):
            lower, upper = simd.load_floats(row + column * 4), simd.load_floats(row + column * 4 + 64)
            simd.store_floats(row + column * 4, dots.first_in_order(lower, upper))
            simd.store_floats(row + column * 4 + 64, dots.second_in_order(lower, upper))
