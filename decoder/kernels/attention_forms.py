"""What attention does with its tiles of lanes, per kernel set: AMX, or rows of vectors, widened, in pairs or in bytes.

The forms lay queries, spans and states out differently; `attention.py`, which calls this alone, sees none of it.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np

from decoder.kernels import (
    attention_bytes,
    attention_bytes_softmax,
    attention_dots,
    attention_rows,
    attention_tiles,
    simd,
)
from decoder.kernels.attention_products import pack_queries
from decoder.kernels.attention_state import clear_lines, merge_rows
from decoder.kernels.compiled import kernel, variant
from decoder.kernels.frame import (
    AT_LIMITS,
    AT_OUTPUT,
    AT_STATISTICS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SPAN,
    STATE_BYTES,
)
from decoder.kernels.sets import byte_attention, dot_attention, float32_inputs, tile_attention


def take_queries(kernels: Any, source: int, head_dim: int, lanes: int, target: int, tile: int) -> None:
    """Take in the first `lanes` of the sixteen query rows at `source` as the `tile`-th tile of lanes."""
    raise NotImplementedError("compiled code only")


@variant(take_queries)
def _take_queries(kernels: Any, source: Any, head_dim: Any, lanes: Any, target: Any, tile: Any) -> Any:
    if tile_attention(kernels):
        return lambda kernels, source, head_dim, lanes, target, tile: pack_queries(source, head_dim, target, tile)
    if dot_attention(kernels):
        return lambda kernels, source, head_dim, lanes, target, tile: attention_dots.copy_queries(
            source, head_dim, lanes, target + tile * 16 * head_dim * 2
        )
    if byte_attention(kernels):
        return lambda kernels, source, head_dim, lanes, target, tile: attention_bytes_softmax.take_queries(
            kernels, source, head_dim, lanes, target + tile * 16 * head_dim * 4
        )
    if float32_inputs(kernels):

        def float32(kernels: Any, source: Any, head_dim: Any, lanes: Any, target: Any, tile: Any) -> None:
            for index in range(0, lanes * head_dim, 16):
                simd.store_floats(target + (tile * 16 * head_dim + index) * 4, simd.load_floats(source + index * 4))

        return float32

    def bfloat16(kernels: Any, source: Any, head_dim: Any, lanes: Any, target: Any, tile: Any) -> None:
        for index in range(0, lanes * head_dim, 16):
            simd.store_floats(target + (tile * 16 * head_dim + index) * 4, simd.load_bf16(source + index * 2))

    return bfloat16


def clear(kernels: Any, state: int, head_dim: int, lanes: int) -> None:
    """Make a state of `lanes` lanes, the first ones of a tile, an empty one."""
    raise NotImplementedError("compiled code only")


@variant(clear)
def _clear(kernels: Any, state: Any, head_dim: Any, lanes: Any) -> Any:
    if tile_attention(kernels):
        return lambda kernels, state, head_dim, lanes: clear_lines(state, head_dim, head_dim)
    return lambda kernels, state, head_dim, lanes: clear_lines(state, head_dim, lanes * head_dim >> 4)


def attend_span(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, span: int, window: int, shared: bool, rows: int,
    tiles: int, states: int,
) -> None:  # fmt: skip
    """All tiles of a task of `rows` rows over one span; their states lie one after the other at `states`."""
    raise NotImplementedError("compiled code only")


@variant(attend_span)
def _attend_span(
    kernels: Any, frame: Any, scratch: Any, plane: Any, sequence: Any, span: Any, window: Any, shared: Any, rows: Any,
    tiles: Any, states: Any,
) -> Any:  # fmt: skip
    if tile_attention(kernels):

        def lanes(
            kernels: Any, frame: Any, scratch: Any, plane: Any, sequence: Any, span: Any, window: Any, shared: Any,
            rows: Any, tiles: Any, states: Any,
        ) -> None:  # fmt: skip
            attention_tiles.attend_span(frame, scratch, plane, sequence, span * SPAN, window, tiles, states)

        return lanes

    form: Any = attention_dots if dot_attention(kernels) else attention_rows
    if byte_attention(kernels):
        form = attention_bytes
    gather_span, attend_tile = form.gather_span, form.attend_tile

    def in_rows(
        kernels: Any, frame: Any, scratch: Any, plane: Any, sequence: Any, span: Any, window: Any, shared: Any,
        rows: Any, tiles: Any, states: Any,
    ) -> None:  # fmt: skip
        limits, start = scratch + frame[AT_LIMITS], span * SPAN
        if tiles > 1:
            first = np.int64(simd.load_int32(limits))
            last = np.int64(simd.load_int32(limits + (tiles * 16 - 1) * 4))
            begin, count = max(0, first - window - start), min(SPAN, last - start)
            gather_span(kernels, frame, scratch, plane, sequence, start, begin, count)
        for tile in range(tiles):
            attend_tile(
                kernels, frame, scratch, plane, sequence, start, window, tile, _lanes_of(frame, tile, rows, shared),
                tiles == 1, states + tile * frame[STATE_BYTES],
            )  # fmt: skip

    return in_rows


@kernel
def _lanes_of(frame: Any, tile: int, rows: int, shared: bool) -> int:
    """Lanes of a tile that belong to a row: the first ones."""
    group = frame[HEADS] // frame[KV_HEADS]
    if not shared:
        return min(16, rows * group - tile * 16)
    if group >= 16:
        return min(16, group - tile % ((group + 15) >> 4) * 16)
    together = 16 // group
    return min(together, rows - tile * together) * group


def merge(kernels: Any, frame: Any, state: int, part: int, lane: int, lanes: int, scratch: int) -> None:
    """Merge `lanes` lanes of a partial state, from `lane` on, into a state's first ones."""
    raise NotImplementedError("compiled code only")


@variant(merge)
def _merge(kernels: Any, frame: Any, state: Any, part: Any, lane: Any, lanes: Any, scratch: Any) -> Any:
    if tile_attention(kernels):

        def columns(kernels: Any, frame: Any, state: Any, part: Any, lane: Any, lanes: Any, scratch: Any) -> None:
            # Lanes past the group's last take others' numbers; nothing reads them.
            statistics = part + (frame[HEAD_DIM] * 16 + lane) * 4
            attention_tiles.merge_lanes(state, frame[HEAD_DIM], part + lane * 4, 64, statistics)

        return columns

    def lines(kernels: Any, frame: Any, state: Any, part: Any, lane: Any, lanes: Any, scratch: Any) -> None:
        head_dim = frame[HEAD_DIM]
        statistics = part + (head_dim * 16 + lane) * 4
        merge_rows(state, head_dim, part + lane * head_dim * 4, statistics, lanes, scratch + frame[AT_STATISTICS])

    return lines


def finished_lines(kernels: Any, frame: Any, state: int, inverse: Any, lanes: int, scratch: int) -> int:
    """Address of the first `lanes` lanes of a state as rows [lane, head_dim], times `inverse` [lane]."""
    raise NotImplementedError("compiled code only")


@variant(finished_lines)
def _finished_lines(kernels: Any, frame: Any, state: Any, inverse: Any, lanes: Any, scratch: Any) -> Any:
    if tile_attention(kernels):

        def transposed(kernels: Any, frame: Any, state: Any, inverse: Any, lanes: Any, scratch: Any) -> int:
            lines = scratch + frame[AT_OUTPUT]
            attention_tiles.lay_out_rows(state, frame[HEAD_DIM], inverse, lines)
            return lines

        return transposed

    pairs = dot_attention(kernels)

    def in_rows(kernels: Any, frame: Any, state: Any, inverse: Any, lanes: Any, scratch: Any) -> int:
        factors, row_bytes = scratch + frame[AT_STATISTICS], frame[HEAD_DIM] * 4
        simd.store_floats(factors, inverse)
        for lane in range(lanes):
            factor = simd.splat(simd.load_float(factors + lane * 4))
            for offset in range(lane * row_bytes, (lane + 1) * row_bytes, 64):
                simd.store_floats(state + offset, simd.mul(simd.load_floats(state + offset), factor))
        if pairs:
            attention_dots.put_in_order(state, frame[HEAD_DIM], lanes)
        return state

    return in_rows
