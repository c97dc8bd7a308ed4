"""Attention of a tile of at most sixteen query rows over one span of int8 or fp8 keys and values, by dot products.

As `attention_rows.py`, without widening. Beside int8 queries, and softmax weights times the scales of values, are whole
numbers of 16 bits of a unit of their row, in digits of eight bits, and sums of products are exact. Beside fp8 they are
rounded to bfloat16 and multiplied in pairs, with float32 sums in one order. Bytes whose weights are zero add zeros,
whatever they are. A tile alone (a decode) reads keys and values where they lie, and asks for runs that it reads later;
several tiles (a prefill, a shared prefix) share panels of keys.
Called by `attention_forms.py` alone, on scratch memory of one thread.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import simd
from decoder.kernels.attention_alone import FEWER_AHEAD, SCALES_LISTED, SCORE_ROW, list_runs
from decoder.kernels.attention_bytes_softmax import (
    CONSTANTS,
    lay_out_weights,
    query_unit_of,
    scale_scores,
    scaled_weights,
)
from decoder.kernels.attention_panels import VALUE_SCALES, copy_small_rows, take_noted_scales, take_scales
from decoder.kernels.attention_state import AHEAD, merge_rows, prefetch_rows
from decoder.kernels.byte_dots import DIGITS
from decoder.kernels.byte_products import finish_values, key_product, value_product
from decoder.kernels.compiled import kernel
from decoder.kernels.frame import (
    AT_KEYS,
    AT_LIMITS,
    AT_OUTPUT,
    AT_QUERIES,
    AT_ROWS,
    AT_RUNS,
    AT_SCORES,
    AT_STATISTICS,
    AT_VALUES,
    AT_WEIGHTS,
    BLOCK_TOKENS,
    CONTEXT_LENS,
    HEAD_DIM,
    ROW_BYTES,
    RUN,
    RUNS_AHEAD,
    SCALE,
    SCORE_CAP,
    SPAN,
)
from decoder.kernels.panels import pack_words, pack_words_asking

_SMALL_RUN: Final = 1024  # bytes of a run of which RUNS_AHEAD are asked for ahead
_KEYS_TOGETHER: Final = 2 * RUN  # keys that are packed, then multiplied
_UNITS: Final = 2 * VALUE_SCALES + 64  # behind the scales: the unit of each row's weights
_RUNS_AT: Final = _UNITS + 64  # and where the list has the span's first run of values
_DIGITS_AT: Final = 4096  # and digits of weights
_WEIGHT_ROW: Final = (
    DIGITS * SPAN + 64
)  # bytes of digits or of bfloat16; the line apart keeps rows in different sets of the cache


@kernel
def _distance(row_bytes: int) -> int:
    """Bytes in the list of runs from the one that is read to the one that is asked for."""
    return (RUNS_AHEAD if RUN * row_bytes <= _SMALL_RUN else FEWER_AHEAD) * 8


@kernel
def _small_keys(
    frame: Any, scratch: int, plane: int, sequence: int, start: int, begin: int, keys: int, key: int
) -> int:
    """Where sixteen keys of blocks that are smaller are copied together."""
    rows = scratch + frame[AT_ROWS]
    copy_small_rows(frame, plane, sequence, start + key, max(0, begin - key), min(RUN, keys - key), rows)
    return rows


@kernel
def _note_values(frame: Any, scratch: int, begin: int, keys: int) -> None:
    """Note where the list has the span's first run of values, were it there."""
    first = begin & ~15
    runs = (keys - first + 15) >> 4
    simd.store_int64(scratch + frame[AT_WEIGHTS] + _RUNS_AT, scratch + frame[AT_RUNS] + (runs - (first >> 4)) * 8)


@kernel
def gather_span(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, begin: int, count: int
) -> None:
    """Panels of keys `begin` to `count` of the span from `start` at AT_KEYS, all scales, and the list of the runs."""
    head_dim, row_bytes, first = frame[HEAD_DIM], frame[ROW_BYTES], begin & ~15
    end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
    # Rows of one head lie in short runs, too short for the hardware to foresee the next one.
    for key in range(first, first + AHEAD, RUN):
        prefetch_rows(frame, plane, sequence, start + key, end)
    list_runs(kernels, frame, scratch, plane, sequence, start, begin, count)
    _note_values(frame, scratch, begin, count)
    place = scratch + frame[AT_RUNS]
    for key in range(first, count, RUN):
        prefetch_rows(frame, plane, sequence, start + key + AHEAD, end)
        if frame[BLOCK_TOKENS] >= RUN:
            rows = simd.load_int64(place)
            take_noted_scales(kernels, frame, scratch, key, place + SCALES_LISTED)
        else:
            rows = _small_keys(frame, scratch, plane, sequence, start, begin, count, key)
            take_scales(kernels, frame, scratch, plane, sequence, start, key)
        pack_words(rows, row_bytes, head_dim >> 2, scratch + frame[AT_KEYS] + key * head_dim)
        place += 8


@kernel
def _scores_in_place(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, begin: int, keys: int, rows: int
) -> None:
    """Query-key products of the only tile, a few panels at a time."""
    head_dim, row_bytes, queries = frame[HEAD_DIM], frame[ROW_BYTES], scratch + frame[AT_QUERIES]
    list_runs(kernels, frame, scratch, plane, sequence, start, begin, keys)
    _note_values(frame, scratch, begin, keys)
    place, panels, distance = scratch + frame[AT_RUNS], scratch + frame[AT_KEYS], _distance(row_bytes)
    for group in range(begin & ~15, keys, _KEYS_TOGETHER):
        last, wanted = min(group + _KEYS_TOGETHER, keys), place + distance
        for key in range(group, last, RUN):
            rows_at = simd.load_int64(place)
            if frame[BLOCK_TOKENS] >= RUN:
                take_noted_scales(kernels, frame, scratch, key, place + SCALES_LISTED)
            else:
                rows_at = _small_keys(frame, scratch, plane, sequence, start, begin, keys, key)
                take_scales(kernels, frame, scratch, plane, sequence, start, key)
            ahead = simd.load_int64(place + distance)
            pack_words_asking(rows_at, row_bytes, head_dim >> 2, panels + (key - group) * head_dim, ahead)
            place += 8
        key_product(
            kernels, queries, head_dim * 4, head_dim, head_dim * 4 - CONSTANTS, rows, panels,
            head_dim * RUN, (last - group + 15) >> 4, head_dim >> 2, wanted, scratch + frame[AT_SCORES] + group * 4,
            SCORE_ROW,
        )  # fmt: skip


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
    table, scales = scratch + frame[AT_SCORES], scratch + frame[AT_WEIGHTS]
    queries = scratch + frame[AT_QUERIES] + tile * 16 * head_dim * 4
    if alone:
        _scores_in_place(kernels, frame, scratch, plane, sequence, start, begin, keys, rows)
    else:
        first = begin >> 4
        key_product(
            kernels, queries, head_dim * 4, head_dim, head_dim * 4 - CONSTANTS, rows,
            scratch + frame[AT_KEYS] + first * head_dim * RUN, head_dim * RUN, ((keys + 15) >> 4) - first,
            head_dim >> 2, 0, table + first * 64, SCORE_ROW,
        )  # fmt: skip
    statistics, scale, digits = scratch + frame[AT_STATISTICS], simd.load_float(frame[SCALE]), scales + _DIGITS_AT
    for row in range(rows):
        bound = np.int64(simd.load_int32(limits + row * 4)) - start
        query_unit = query_unit_of(kernels, queries + row * head_dim * 4, head_dim)
        top = scale_scores(
            table + row * SCORE_ROW, begin, keys, bound - window, bound, scales, query_unit, frame[SCORE_CAP]
        )  # fmt: skip
        simd.store_float(statistics + row * 4, np.float32(top * scale))
    for row in range(rows):
        bound = np.int64(simd.load_int32(limits + row * 4)) - start
        unit = scaled_weights(
            table + row * SCORE_ROW, begin, keys, bound - window, bound, scale, simd.load_float(statistics + row * 4),
            scales + VALUE_SCALES, statistics + 64 + row * 4,
        )  # fmt: skip
        simd.store_float(scales + _UNITS + row * 4, unit)
    for row in range(rows):
        unit = simd.load_float(scales + _UNITS + row * 4)
        unit = lay_out_weights(kernels, table + row * SCORE_ROW, begin, keys, unit, digits + row * _WEIGHT_ROW)
        simd.store_float(scales + _UNITS + row * 4, unit)
    output = scratch + frame[AT_OUTPUT]
    _weigh_values(kernels, frame, scratch, begin, keys, rows)
    merge_rows(state, head_dim, output, statistics, rows, statistics + 128)


@kernel
def _weigh_values(kernels: Any, frame: Any, scratch: int, begin: int, keys: int, rows: int) -> None:
    """Weighted values of a tile's rows at AT_OUTPUT, float32 [row, head_dim]."""
    head_dim, scales, output = frame[HEAD_DIM], scratch + frame[AT_WEIGHTS], scratch + frame[AT_OUTPUT]
    # Behind the values of small blocks, which are copied together.
    sums, digit_bytes = scratch + frame[AT_VALUES] + SPAN * head_dim, head_dim * 4
    for offset in range(0, rows * DIGITS * digit_bytes, 64):
        simd.store_floats(sums + offset, simd.splat(np.float32(0.0)))
    value_product(
        kernels, scales + _DIGITS_AT, _WEIGHT_ROW, SPAN, rows, simd.load_int64(scales + _RUNS_AT), frame[ROW_BYTES],
        head_dim >> 4, begin >> 2, (keys + 3) >> 2, _distance(frame[ROW_BYTES]), sums, DIGITS * digit_bytes,
        digit_bytes,
    )  # fmt: skip
    for row in range(rows):
        unit, place = simd.load_float(scales + _UNITS + row * 4), output + row * digit_bytes
        finish_values(kernels, sums, DIGITS * digit_bytes, digit_bytes, row, head_dim, unit, place)
