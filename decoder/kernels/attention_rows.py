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

from typing import Any, Final

import numpy as np

from decoder.kernels import simd
from decoder.kernels.attention_softmax import cap_row, multiply_row, softmax
from decoder.kernels.attention_state import AHEAD, merge_rows, prefetch_rows
from decoder.kernels.compiled import kernel, variant
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
    SCALE,
    SCORE_CAP,
    SPAN,
    VALUE_OFFSET,
)
from decoder.kernels.panels import pack_panel
from decoder.kernels.register_tiles import add_stored_product, float_product
from decoder.kernels.sets import quantized
from decoder.kernels.stored_rows import load_rows, load_scales, row_address, scale_address, stored_bytes

SCORE_ROW: Final = SPAN * 4 + 64  # bytes of a row of scores; the line apart keeps rows in different sets of the cache
_PANEL_KEYS: Final = 64  # keys that are packed, then multiplied: their panels stay in the first-level cache
_VALUE_SCALES: Final = SPAN * 4 + 64  # bytes from the scales of keys to those of values


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
            simd.store_floats(target + _VALUE_SCALES + index * 4, load_scales(kernels, source + apart))

    return scales


@kernel
def _take_panel(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, key: int, floor: int, target: int
) -> None:
    """Sixteen keys, the `key`-th of the span on, as a panel at `target`; those outside [floor, end) are anything."""
    take_scales(kernels, frame, scratch, plane, sequence, start, key)
    head_dim, stride = frame[HEAD_DIM], frame[ROW_BYTES]
    if frame[BLOCK_TOKENS] >= 16:
        pack_panel(kernels, row_address(frame, plane, sequence, start + key), stride, head_dim, target)
        return
    end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
    rows = scratch + frame[AT_ROWS]
    for index in range(max(0, floor - start - key), min(16, end - start - key)):
        source = row_address(frame, plane, sequence, start + key + index)
        for offset in range(0, stride, 16):
            simd.copy_16_bytes(rows + index * stride + offset, source + offset)
    pack_panel(kernels, rows, stride, head_dim, target)


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
        _take_panel(kernels, frame, scratch, plane, sequence, start, key, start + begin, narrow)
        load_rows(kernels, narrow, 16, head_dim, scratch + frame[AT_KEYS] + (key >> 4) * panel)
        for index in range(key, min(key + 16, count), run):
            if index + run <= begin:
                continue
            source = row_address(frame, plane, sequence, start + index) + frame[VALUE_OFFSET]
            load_rows(
                kernels, source, min(run, count - index), head_dim, scratch + frame[AT_VALUES] + index * head_dim * 4
            )


@kernel
def _scores_in_place(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, begin: int, keys: int, rows: int
) -> None:
    """Query-key products of the only tile, a few panels at a time."""
    head_dim, stored = frame[HEAD_DIM], stored_bytes(kernels)
    end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
    queries, panels, panel = scratch + frame[AT_QUERIES], scratch + frame[AT_KEYS], head_dim * 16 * stored
    table, first = scratch + frame[AT_SCORES], begin & ~15
    for row in range(rows):
        for key in range(first, keys, 16):
            simd.store_floats(table + row * SCORE_ROW + key * 4, simd.splat(np.float32(0.0)))
    for key in range(first, first + AHEAD, 16):
        prefetch_rows(frame, plane, sequence, start + key, end)
    for group in range(first, keys, _PANEL_KEYS):
        last = min(group + _PANEL_KEYS, keys)
        for key in range(group, last, 16):
            prefetch_rows(frame, plane, sequence, start + key + AHEAD, end)
            target = panels + ((key - group) >> 4) * panel
            _take_panel(kernels, frame, scratch, plane, sequence, start, key, start + begin, target)
        add_stored_product(
            kernels, queries, head_dim * 4, rows, panels, 16 * stored, panel, (last - group + 15) >> 4, head_dim,
            table + group * 4, SCORE_ROW,
        )  # fmt: skip


@kernel
def _values_in_place(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, begin: int, keys: int, rows: int
) -> None:
    """Weighted values of the only tile, run by run of rows that lie together."""
    head_dim, run = frame[HEAD_DIM], min(64, frame[BLOCK_TOKENS])
    weights, output = scratch + frame[AT_SCORES], scratch + frame[AT_OUTPUT]
    for offset in range(0, rows * head_dim * 4, 64):
        simd.store_floats(output + offset, simd.splat(np.float32(0.0)))
    key = begin
    while key < keys:
        count = min(run - (start + key) % run, keys - key)
        source = row_address(frame, plane, sequence, start + key) + frame[VALUE_OFFSET]
        add_stored_product(
            kernels, weights + key * 4, SCORE_ROW, rows, source, frame[ROW_BYTES], 16 * stored_bytes(kernels),
            head_dim >> 4, count,
            output, head_dim * 4,
        )  # fmt: skip
        key += count


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
        _scores_in_place(kernels, frame, scratch, plane, sequence, start, begin, keys, rows)
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
        multiply_row(kernels, line, begin, keys, scratch + frame[AT_WEIGHTS])
        if frame[SCORE_CAP]:
            cap_row(line, begin, keys, frame[SCORE_CAP])
        softmax(line, begin, keys, bound - window, bound, scale, statistics + row * 4, statistics + 64 + row * 4)
        multiply_row(kernels, line, begin, keys, scratch + frame[AT_WEIGHTS] + _VALUE_SCALES)
    if alone:
        _values_in_place(kernels, frame, scratch, plane, sequence, start, begin, keys, rows)
    else:
        float_product(
            table + begin * 4, SCORE_ROW, rows, scratch + frame[AT_VALUES] + begin * head_dim * 4, head_dim * 4, 64,
            head_dim >> 4, keys - begin, scratch + frame[AT_OUTPUT], head_dim * 4,
        )  # fmt: skip
    merge_rows(state, head_dim, scratch + frame[AT_OUTPUT], statistics, rows, statistics + 128)
