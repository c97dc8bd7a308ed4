"""Attention by dot products of a tile that is alone (a decode): keys and values are read where they lie, once.

As `attention_alone.py`, whose list of runs it shares: while a run is read, one that lies some places later is asked
for. Keys become panels of pairs a few runs at a time; values are paired in registers. Half a pair whose key lies
outside the span's keys counts as zero, whatever is stored there. Called by `attention_dots.py` alone, on scratch memory
of one thread.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import simd
from decoder.kernels.attention_alone import FEWER_AHEAD, SCORE_ROW, list_runs
from decoder.kernels.attention_panels import copy_small_rows
from decoder.kernels.compiled import kernel
from decoder.kernels.dot_products import asking_product, run_product
from decoder.kernels.frame import (
    AT_KEYS,
    AT_OUTPUT,
    AT_QUERIES,
    AT_ROWS,
    AT_RUNS,
    AT_SCORES,
    AT_WEIGHTS,
    BLOCK_TOKENS,
    HEAD_DIM,
    ROW_BYTES,
    RUN,
    RUNS_AHEAD,
    SPAN,
)
from decoder.kernels.panels import pack_words_asking

WEIGHT_ROW: Final = SPAN * 2 + 64  # bytes of a row of weights; the line apart keeps rows in different sets of the cache
_WIDE_ROW: Final = 512  # bytes of a row, from which on fewer are packed and asked for: both fit the first-level cache
_EDGE: Final = (2 * SPAN // RUN + RUNS_AHEAD) * 8  # bytes to a place in it that bfloat16 keys, without scales, leave


@kernel
def _keys_together(row_bytes: int) -> int:
    """Keys that are packed, then multiplied."""
    return 2 * RUN if row_bytes >= _WIDE_ROW else 4 * RUN


@kernel
def _distance(row_bytes: int) -> int:
    """Bytes in the list of runs from the one that is read to the one that is asked for."""
    return 2 * 8 if row_bytes >= _WIDE_ROW else FEWER_AHEAD * 8


@kernel
def scores_in_place(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, begin: int, keys: int, rows: int
) -> None:
    """Query-key products of the only tile, a few panels at a time."""
    head_dim, row_bytes, first = frame[HEAD_DIM], frame[ROW_BYTES], begin & ~15
    list_runs(kernels, frame, scratch, plane, sequence, start, begin, keys)
    place, panel = scratch + frame[AT_RUNS], head_dim * 32
    together, distance = _keys_together(row_bytes), _distance(row_bytes)
    for group in range(first, keys, together):
        last, wanted = min(group + together, keys), place + distance
        for key in range(group, last, RUN):
            rows_at, ahead = simd.load_int64(place), simd.load_int64(place + distance)
            if frame[BLOCK_TOKENS] < RUN:
                rows_at = scratch + frame[AT_ROWS]
                copy_small_rows(
                    frame, plane, sequence, start + key, max(0, begin - key), min(RUN, keys - key), rows_at
                )  # fmt: skip
            target = scratch + frame[AT_KEYS] + ((key - group) >> 4) * panel
            pack_words_asking(rows_at, row_bytes, head_dim >> 1, target, ahead)
            place += 8
        asking_product(
            scratch + frame[AT_QUERIES], head_dim * 2, rows, scratch + frame[AT_KEYS], panel, (last - group + 15) >> 4,
            head_dim >> 1, wanted, scratch + frame[AT_SCORES] + group * 4, SCORE_ROW,
        )  # fmt: skip


@kernel
def _add_edge(frame: Any, scratch: int, values: int, key: int, rows: int) -> None:
    """Add the weighted values of one key whose neighbour in its pair is not one of the span's keys."""
    head_dim, row_bytes = frame[HEAD_DIM], frame[ROW_BYTES]
    pair, edge = scratch + frame[AT_ROWS], scratch + frame[AT_RUNS] + _EDGE
    source = simd.load_int64(values + (key >> 4) * 8) + (key & 15) * row_bytes
    for offset in range(0, 2 * row_bytes, 32):
        simd.store_floats(pair + offset, simd.splat(np.float32(0.0)))
    for offset in range(0, row_bytes, 16):
        simd.copy_16_bytes(pair + (key & 1) * row_bytes + offset, source + offset)
    simd.store_int64(edge, pair - ((key & 15) & ~1) * row_bytes)
    run_product(
        scratch + frame[AT_WEIGHTS], WEIGHT_ROW, rows, edge - (key >> 4) * 8, 2 * row_bytes, head_dim >> 4, key >> 1,
        (key >> 1) + 1, 0, scratch + frame[AT_OUTPUT], head_dim * 4,
    )  # fmt: skip


@kernel
def values_in_place(frame: Any, scratch: int, begin: int, keys: int, rows: int) -> None:
    """Weighted values of the only tile, whose runs `scores_in_place` has listed."""
    head_dim, first, output = frame[HEAD_DIM], begin & ~15, scratch + frame[AT_OUTPUT]
    runs = (keys - first + 15) >> 4
    place = scratch + frame[AT_RUNS] + (runs - (first >> 4)) * 8
    for offset in range(0, rows * head_dim * 4, 64):
        simd.store_floats(output + offset, simd.splat(np.float32(0.0)))
    if begin & 1:
        _add_edge(frame, scratch, place, begin, rows)
    if (begin + 1) >> 1 < keys >> 1:
        run_product(
            scratch + frame[AT_WEIGHTS], WEIGHT_ROW, rows, place, 2 * frame[ROW_BYTES], head_dim >> 4, (begin + 1) >> 1,
            keys >> 1, _distance(frame[ROW_BYTES]), output, head_dim * 4,
        )  # fmt: skip
    if keys & 1:
        _add_edge(frame, scratch, place, keys - 1, rows)
