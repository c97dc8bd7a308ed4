"""Attention with AMX tiles: sixteen query lanes are the columns of a tile, over one span of keys.

Scores are [key, lane] and states [head_dim, lane], so that a softmax needs no sum across a vector and keys need no
transposing. Pairs of tiles share what is packed of a span; a tile alone reads keys where they lie
(`attention_in_place.py`), with the same sums in the same order. Called by `attention.py` alone.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np

from decoder.kernels import simd
from decoder.kernels.attention_in_place import scores_in_place, take_rows, weighted_values_in_place
from decoder.kernels.attention_products import WEIGHTS_BYTES, pack_values, scores, weighted_values
from decoder.kernels.attention_state import AHEAD, NOTHING, prefetch_rows
from decoder.kernels.compiled import kernel
from decoder.kernels.frame import (
    AT_KEYS,
    AT_LIMITS,
    AT_OUTPUT,
    AT_ROWS,
    AT_SCORES,
    AT_STATISTICS,
    AT_WEIGHTS,
    BLOCK_TOKENS,
    CAP_SIZE_OFFSET,
    CONTEXT_LENS,
    HEAD_DIM,
    LANES_BYTES,
    ROW_BYTES,
    SCALE,
    SCORE_CAP,
    SPAN,
    STATE_BYTES,
    VALUE_OFFSET,
)
from decoder.kernels.stored_rows import copy_rows, row_address


@kernel
def _gather_span(
    frame: Any, scratch: int, plane: int, sequence: int, start: int, count: int, end: int, floor: int
) -> None:
    """Bring `count` keys from `start` to the scratch memory, and as many values as lie before the sequence's `end`.

    Values up to the next multiple of 32 are zero; keys there are whatever the scratch memory held. So it is with runs
    that end before `floor`, which no lane looks at: their blocks may be gone.
    """
    head_dim, tokens, held = frame[HEAD_DIM], frame[BLOCK_TOKENS], frame[ROW_BYTES]
    keys = scratch + frame[AT_KEYS]
    run = min(16, tokens)
    # Rows of one head lie in short runs, too short for the hardware to foresee the next one.
    for first in range(0, AHEAD, 16):
        prefetch_rows(frame, plane, sequence, start + first, end)
    for first in range(0, count, 32):
        rows = scratch + frame[AT_ROWS]
        for part in range(first, first + 32, 16):
            ahead = start + part + AHEAD
            prefetch_rows(frame, plane, sequence, ahead, end)
            for index in range(part, min(part + 16, end - start), run):
                if start + index + run <= floor:
                    for offset in range((index - first) * held, (index - first + run) * held, 64):
                        simd.store_floats(rows + offset, simd.splat(np.float32(0.0)))
                    continue
                source = row_address(frame, plane, sequence, start + index)
                here = min(run, end - start - index)
                copy_rows(source, here * held, keys + index * held)
                copy_rows(source + frame[VALUE_OFFSET], here * held, rows + (index - first) * held)
        for offset in range(max(0, end - start - first) * held, 32 * held, 64):
            simd.store_floats(rows + offset, simd.splat(np.float32(0.0)))
        pack_values(frame, scratch, head_dim, first)


@kernel
def _cap_scores(source: int, keys: int, cap: int) -> None:
    """Replace scores of sixteen lanes by their soft caps, scaled for powers of two (Gemma 2, 2024, section 2)."""
    rate, size = simd.splat(simd.load_float(cap)), simd.splat(simd.load_float(cap + CAP_SIZE_OFFSET))
    for key in range(keys):
        address = source + key * LANES_BYTES
        simd.store_floats(address, simd.soft_cap(simd.load_floats(address), rate, size))


@kernel
def _softmax(
    source: int, target: int, keys: int, limits: int, window: int, start: int, scale: float,
    statistics: int,
) -> None:  # fmt: skip
    """Weights of sixteen lanes over `keys` keys (an even number) from `start`; writes (maximum, sum), base 2.

    A lane uses the last `window` keys before its limit; the first lane's limit is the lowest, the last one's the
    highest.
    """
    cut = start < np.int64(simd.load_int32(limits + 60)) - window
    masked = cut or start + keys > np.int64(simd.load_int32(limits))
    bounds = simd.add_ints(simd.load_ints(limits), simd.splat_ints(np.int32(-start)))
    floors = simd.add_ints(bounds, simd.splat_ints(np.int32(-window)))
    nothing = simd.splat(NOTHING)
    top, other_top = nothing, nothing
    if masked:
        for key in range(0, keys, 2):
            even = simd.load_floats(source + key * LANES_BYTES)
            odd = simd.load_floats(source + (key + 1) * LANES_BYTES)
            if cut:
                even = simd.keep_from(even, floors, np.int32(key), NOTHING)
                odd = simd.keep_from(odd, floors, np.int32(key + 1), NOTHING)
            top = simd.maximum(simd.keep_under(even, bounds, np.int32(key), NOTHING), top)
            other_top = simd.maximum(simd.keep_under(odd, bounds, np.int32(key + 1), NOTHING), other_top)
    else:
        for key in range(0, keys, 2):
            top = simd.maximum(simd.load_floats(source + key * LANES_BYTES), top)
            other_top = simd.maximum(simd.load_floats(source + (key + 1) * LANES_BYTES), other_top)
    factor = simd.splat(np.float32(scale))
    maximum = simd.mul(simd.maximum(top, other_top), factor)
    shift = simd.sub(simd.splat(np.float32(0.0)), maximum)
    total, other_total = simd.splat(np.float32(0.0)), simd.splat(np.float32(0.0))
    if masked:
        for key in range(0, keys, 2):
            even = simd.exp2_short(simd.fma(simd.load_floats(source + key * LANES_BYTES), factor, shift))
            odd = simd.exp2_short(simd.fma(simd.load_floats(source + (key + 1) * LANES_BYTES), factor, shift))
            even = simd.keep_under(even, bounds, np.int32(key), np.float32(0.0))
            odd = simd.keep_under(odd, bounds, np.int32(key + 1), np.float32(0.0))
            if cut:
                even = simd.keep_from(even, floors, np.int32(key), np.float32(0.0))
                odd = simd.keep_from(odd, floors, np.int32(key + 1), np.float32(0.0))
            total, other_total = simd.add(total, even), simd.add(other_total, odd)
            simd.store_weight_pair(target + key * 32, even, odd)
    else:
        for key in range(0, keys, 2):
            even = simd.exp2_short(simd.fma(simd.load_floats(source + key * LANES_BYTES), factor, shift))
            odd = simd.exp2_short(simd.fma(simd.load_floats(source + (key + 1) * LANES_BYTES), factor, shift))
            total, other_total = simd.add(total, even), simd.add(other_total, odd)
            simd.store_weight_pair(target + key * 32, even, odd)
    simd.store_floats(statistics, maximum)
    simd.store_floats(statistics + 64, simd.add(total, other_total))


@kernel
def merge_lanes(state: int, head_dim: int, values: int, stride: int, statistics: int) -> None:
    """Merge one span of sixteen lanes, rows of `values` at `stride`, into their state [head_dim sums, maximum, sum].

    An empty state and an empty span both have the sum zero and change nothing.
    """
    old_maximum, maximum = simd.load_floats(state + head_dim * 64), simd.load_floats(statistics)
    old_total, total = simd.load_floats(state + head_dim * 64 + 64), simd.load_floats(statistics + 64)
    top = simd.maximum(old_maximum, maximum)
    keep, take = simd.exp2(simd.sub(old_maximum, top)), simd.exp2(simd.sub(maximum, top))
    for row in range(head_dim):
        kept = simd.mul(simd.load_floats(state + row * 64), keep)
        simd.store_floats(state + row * 64, simd.fma(simd.load_floats(values + row * stride), take, kept))
    simd.store_floats(state + head_dim * 64, top)
    simd.store_floats(state + head_dim * 64 + 64, simd.fma(total, take, simd.mul(old_total, keep)))


@kernel
def _attend_span_in_place(
    frame: Any, scratch: int, plane: int, sequence: int, start: int, window: int, state: int
) -> None:
    """The only tile of lanes over one span, without a copy of the keys."""
    end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
    limits, statistics = scratch + frame[AT_LIMITS], scratch + frame[AT_STATISTICS]
    keys = min(SPAN, np.int64(simd.load_int32(limits + 60)) - start)
    padded = (keys + 31) & ~31
    for first in range(0, AHEAD, 16):
        prefetch_rows(frame, plane, sequence, start + first, end)
    rows = np.int64(0)
    for first in range(0, padded, 16):
        prefetch_rows(frame, plane, sequence, start + first + AHEAD, end)
        if start + first < end:
            rows = row_address(frame, plane, sequence, start + first)
        take_rows(frame, scratch, first, rows, end - start - first)
    scores_in_place(frame, scratch, padded)
    if frame[SCORE_CAP]:
        _cap_scores(scratch + frame[AT_SCORES], padded, frame[SCORE_CAP])
    _softmax(
        scratch + frame[AT_SCORES], scratch + frame[AT_WEIGHTS], padded, limits, window, start,
        simd.load_float(frame[SCALE]), statistics,
    )  # fmt: skip
    weighted_values_in_place(frame, scratch, padded)
    merge_lanes(state, frame[HEAD_DIM], scratch + frame[AT_OUTPUT], LANES_BYTES, statistics)


@kernel
def _attend_span_gathered(
    frame: Any, scratch: int, plane: int, sequence: int, start: int, window: int, tiles: int, states: int
) -> None:
    """All tiles of lanes over one span; their states lie one after the other at `states`."""
    head_dim = frame[HEAD_DIM]
    end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
    limits = scratch + frame[AT_LIMITS]
    last = np.int64(simd.load_int32(limits + (tiles * 16 - 1) * 4))
    floor = np.int64(simd.load_int32(limits)) - window
    _gather_span(frame, scratch, plane, sequence, start, min(SPAN, last - start), end, floor)
    scale = simd.load_float(frame[SCALE])
    statistics, output = scratch + frame[AT_STATISTICS], scratch + frame[AT_OUTPUT]
    for tile in range(0, tiles, 2):
        pair = min(2, tiles - tile)
        keys = min(SPAN, np.int64(simd.load_int32(limits + ((tile + pair) * 16 - 1) * 4)) - start)
        if keys <= 0:
            continue
        keys = (keys + 31) & ~31
        scores(frame, scratch, tile, pair, keys)
        for member in range(pair):
            if frame[SCORE_CAP]:
                _cap_scores(scratch + frame[AT_SCORES] + member * 64, keys, frame[SCORE_CAP])
            _softmax(
                scratch + frame[AT_SCORES] + member * 64,
                scratch + frame[AT_WEIGHTS] + member * WEIGHTS_BYTES, keys, limits + (tile + member) * 64,
                window, start, scale, statistics + member * 128,
            )  # fmt: skip
        weighted_values(frame, scratch, pair, keys)
        for member in range(pair):
            state = states + (tile + member) * frame[STATE_BYTES]
            merge_lanes(state, head_dim, output + member * 64, LANES_BYTES, statistics + member * 128)


@kernel
def attend_span(
    frame: Any, scratch: int, plane: int, sequence: int, start: int, window: int, tiles: int, states: int
) -> None:
    """All tiles of lanes over one span; their states lie one after the other at `states`."""
    if tiles == 1 and frame[BLOCK_TOKENS] >= 16:
        _attend_span_in_place(frame, scratch, plane, sequence, start, window, states)
    else:
        _attend_span_gathered(frame, scratch, plane, sequence, start, window, tiles, states)


@kernel
def lay_out_rows(state: int, head_dim: int, inverse: Any, lines: int) -> None:
    """The sums of a state times `inverse` [lane], as rows [lane, head_dim] at `lines`."""
    for index in range(head_dim):
        simd.store_floats(state + index * 64, simd.mul(simd.load_floats(state + index * 64), inverse))
    for column in range(0, head_dim, 16):
        simd.transpose_words(state + column * 64, 64, lines + column * 4, head_dim * 4)
