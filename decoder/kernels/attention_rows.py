"""Attention of a tile of at most sixteen query rows over one span of keys, without AMX.

Scores lie as [row, key]: keys are transposed to panels of sixteen, and a row of a narrow group of heads wastes no lane.
Weighted values lie as [row, head_dim], summed over rows of values as they are stored. A tile alone (a decode) reads
keys and values where they lie; several tiles (a prefill) share one widened copy of the span. Both do the same sums in
the same order. Scales of quantised rows multiply scores and weights. Called by `attention.py` alone, on scratch memory
of one thread.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,call-overload,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np

from decoder.kernels import simd
from decoder.kernels.attention_alone import SCORE_ROW, ask_ahead, scores_in_place, values_in_place
from decoder.kernels.attention_panels import VALUE_SCALES, take_panel
from decoder.kernels.attention_softmax import cap_row, multiply_row, softmax
from decoder.kernels.attention_state import AHEAD, merge_rows, prefetch_rows
from decoder.kernels.compiled import kernel
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
    SCALE,
    SCORE_CAP,
    SPAN,
    VALUE_OFFSET,
)
from decoder.kernels.register_tiles import float_product
from decoder.kernels.stored_rows import load_rows, row_address


@kernel
def gather_span(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, begin: int, count: int
) -> None:
    """Widen keys and values `begin` to `count` of the span from `start`: panels at AT_KEYS, rows at AT_VALUES."""
    head_dim, tokens = frame[HEAD_DIM], frame[BLOCK_TOKENS]
    end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
    panel, run = head_dim * 64, min(16, tokens)
    first = begin & ~15
    # Rows of one head lie in short runs, too short for the hardware to foresee the next one.
    for key in range(first, first + AHEAD, 16):
        prefetch_rows(frame, plane, sequence, start + key, end)
    for key in range(first, count, 16):
        prefetch_rows(frame, plane, sequence, start + key + AHEAD, end)
        narrow = scratch + frame[AT_ROWS] + panel
        source = row_address(frame, plane, sequence, start + key)
        take_panel(kernels, frame, scratch, plane, sequence, start, key, start + begin, source, narrow)
        load_rows(kernels, narrow, 16, head_dim, scratch + frame[AT_KEYS] + (key >> 4) * panel)
        for index in range(key, min(key + 16, count), run):
            if index + run <= begin:
                continue
            source = row_address(frame, plane, sequence, start + index) + frame[VALUE_OFFSET]
            load_rows(
                kernels, source, min(run, count - index), head_dim, scratch + frame[AT_VALUES] + index * head_dim * 4
            )


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
    table = scratch + frame[AT_SCORES]
    if alone:
        scores_in_place(kernels, frame, scratch, plane, sequence, start, begin, keys, rows)
    else:
        first, panel = begin >> 4, head_dim * 64
        float_product(
            scratch + frame[AT_QUERIES] + tile * 16 * head_dim * 4, head_dim * 4, rows,
            scratch + frame[AT_KEYS] + first * panel, 64, panel, ((keys + 15) >> 4) - first, head_dim,
            table + first * 64, SCORE_ROW,
        )  # fmt: skip
    statistics, scale = scratch + frame[AT_STATISTICS], simd.load_float(frame[SCALE])
    for row in range(rows):
        line, bound = table + row * SCORE_ROW, np.int64(simd.load_int32(limits + row * 4)) - start
        if alone:
            ask_ahead(kernels, frame, scratch, begin, keys, rows, row)
        multiply_row(kernels, line, begin, keys, scratch + frame[AT_WEIGHTS])
        if frame[SCORE_CAP]:
            cap_row(line, begin, keys, frame[SCORE_CAP])
        softmax(line, begin, keys, bound - window, bound, scale, statistics + row * 4, statistics + 64 + row * 4)
        multiply_row(kernels, line, begin, keys, scratch + frame[AT_WEIGHTS] + VALUE_SCALES)
    if alone:
        values_in_place(kernels, frame, scratch, begin, keys, rows)
    else:
        float_product(
            table + begin * 4, SCORE_ROW, rows, scratch + frame[AT_VALUES] + begin * head_dim * 4, head_dim * 4, 64,
            head_dim >> 4, keys - begin, scratch + frame[AT_OUTPUT], head_dim * 4,
        )  # fmt: skip
    merge_rows(state, head_dim, scratch + frame[AT_OUTPUT], statistics, rows, statistics + 128)
