"""Paged attention for prefill and decode: exact softmax over spans of keys, read through the block tables.

One arithmetic for both: keys are taken in spans that start at absolute multiples of SPAN; a span gives (maximum,
sum, weighted values) per query lane, and spans are merged in order (online softmax, Milakov and Gimelshein 2018;
split keys as in Flash-Decoding 2023). So a chunked prefill, a one-shot prefill and a decode agree bit for bit.
A lane is one (token, query head of the group). Slots past a sequence's end are never used in a sum.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import amx, simd, sync
from decoder.kernels.compiled import inlined_variant, kernel, variant
from decoder.kernels.frame import (
    ARENA,
    AT_KEYS,
    AT_OUTPUT,
    AT_ROWS,
    AT_SCORES,
    AT_STATE,
    AT_VALUES,
    AT_WEIGHTS,
    AT_ZEROS,
    BLOCK_BYTES,
    BLOCK_TOKENS,
    CONTEXT_LENS,
    DECODE_SLOTS,
    HEAD_BYTES,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYER_BYTES,
    MIXED,
    MIXED_COLUMNS,
    NUM_DECODES,
    NUM_TASKS,
    PARTIALS,
    POSITIONS,
    QUERIES,
    QUERY_PLANE_BYTES,
    ROW_BYTES,
    SCALE,
    SCORE_ROW,
    SPAN,
    STATE_ROW,
    TABLE_WIDTH,
    TABLES,
    TASK_ROW,
    TASK_ROWS,
    TASK_SEQUENCE,
    TASK_SLOT,
    TASK_SPAN,
    TASK_WORDS,
    TASKS,
    VALUE_OFFSET,
    WEIGHT_ROW,
)
from decoder.kernels.linear import is_amx
from decoder.kernels.rows import activation, element_bytes, is_float32, load_values, store_values

_AHEAD: Final = 32  # keys asked for before they are used
_NOTHING: Final = np.float32(-1e30)  # maximum of an empty state; finite, so that no difference is NaN


@kernel
def _row_address(frame: Any, plane: int, sequence: int, token: int) -> int:
    """Address of the key row of one token; `plane` is the offset of (layer, key head) inside a block."""
    tokens = frame[BLOCK_TOKENS]
    entry = frame[TABLES] + (sequence * frame[TABLE_WIDTH] + token // tokens) * 4
    block = np.int64(simd.load_int32(entry))
    return frame[ARENA] + block * frame[BLOCK_BYTES] + plane + (token % tokens) * frame[ROW_BYTES]


@kernel
def _sixteen_rows(kernels: Any, frame: Any, plane: int, sequence: int, token: int, end: int, rows: int) -> int:
    """Address of sixteen consecutive rows from `token` (a multiple of 16).

    Blocks of fewer than sixteen tokens are copied to `rows`, as far as `end`.
    """
    if frame[BLOCK_TOKENS] >= 16:
        return _row_address(frame, plane, sequence, token)
    for index in range(min(16, end - token)):
        source = _row_address(frame, plane, sequence, token + index)
        target = rows + index * frame[ROW_BYTES]
        for offset in range(0, frame[ROW_BYTES], 16 * element_bytes(kernels)):
            store_values(kernels, target + offset, load_values(kernels, source + offset))
    return rows


def pack_keys(kernels: Any, rows: int, head_dim: int, target: int) -> None:
    """Sixteen key rows, transposed for the score product."""
    raise NotImplementedError("compiled code only")


@variant(pack_keys)
def _pack_keys(kernels: Any, rows: Any, head_dim: Any, target: Any) -> Any:
    if is_amx(kernels):

        def tiles(kernels: Any, rows: Any, head_dim: Any, target: Any) -> None:
            for block in range(head_dim >> 5):
                simd.transpose_words(rows + block * 64, head_dim * 2, target + block * 1024, 64)

        return tiles
    if is_float32(kernels):

        def float32(kernels: Any, rows: Any, head_dim: Any, target: Any) -> None:
            for block in range(head_dim >> 4):
                simd.transpose_words(rows + block * 64, head_dim * 4, target + block * 1024, 64)

        return float32

    def bfloat16(kernels: Any, rows: Any, head_dim: Any, target: Any) -> None:
        for block in range(head_dim >> 4):
            simd.transpose_bf16(rows + block * 32, head_dim * 2, target + block * 1024, 64)

    return bfloat16


def pack_values(kernels: Any, rows: int, valid: int, first: int, head_dim: int, target: int, zeros: int) -> None:
    """Sixteen value rows, the `first`-th of the span; rows from `valid` on count as zero."""
    raise NotImplementedError("compiled code only")


@variant(pack_values)
def _pack_values(kernels: Any, rows: Any, valid: Any, first: Any, head_dim: Any, target: Any, zeros: Any) -> Any:
    if is_amx(kernels):

        def tiles(kernels: Any, rows: Any, valid: Any, first: Any, head_dim: Any, target: Any, zeros: Any) -> None:
            stride = head_dim * 2
            start = target + (first >> 5) * 1024 + (first & 31) * 32
            for index in range(0, 16, 2):
                even = rows + index * stride if index < valid else zeros
                odd = rows + (index + 1) * stride if index + 1 < valid else zeros
                for block in range(head_dim >> 4):
                    out = start + block * (SPAN // 32) * 1024 + index * 32
                    simd.store_pairs(out, even + block * 32, odd + block * 32)

        return tiles

    def plain(kernels: Any, rows: Any, valid: Any, first: Any, head_dim: Any, target: Any, zeros: Any) -> None:
        stride = head_dim * element_bytes(kernels)
        for index in range(min(16, valid)):
            for column in range(0, head_dim, 16):
                vector = load_values(kernels, rows + index * stride + column * element_bytes(kernels))
                simd.store_floats(target + ((first + index) * head_dim + column) * 4, vector)

    return plain


@kernel
def _prefetch_rows(frame: Any, plane: int, sequence: int, token: int, end: int) -> None:
    """Ask for sixteen key rows and their value rows, if the sequence has them."""
    if token >= end or frame[BLOCK_TOKENS] < 16:
        return
    address = _row_address(frame, plane, sequence, token)
    for offset in range(0, 16 * frame[ROW_BYTES], 64):
        simd.prefetch(address + offset)
        simd.prefetch(address + frame[VALUE_OFFSET] + offset)


@kernel
def _pack_span(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, count: int, end: int
) -> None:
    """Pack `count` keys from `start`, and as many values as lie before the sequence's `end`."""
    head_dim = frame[HEAD_DIM]
    rows = scratch + frame[AT_ROWS]
    # Rows of one head lie in short runs, too short for the hardware to foresee the next one.
    for first in range(0, _AHEAD, 16):
        _prefetch_rows(frame, plane, sequence, start + first, start + count)
    for first in range(0, count, 16):
        token = start + first
        _prefetch_rows(frame, plane, sequence, token + _AHEAD, start + count)
        keys = _sixteen_rows(kernels, frame, plane, sequence, token, end, rows)
        pack_keys(kernels, keys, head_dim, scratch + frame[AT_KEYS] + (first >> 4) * head_dim * key_bytes(kernels))
        values = _sixteen_rows(kernels, frame, plane + frame[VALUE_OFFSET], sequence, token, end, rows)
        target, zeros = scratch + frame[AT_VALUES], scratch + frame[AT_ZEROS]
        pack_values(kernels, values, end - token, first, head_dim, target, zeros)
    groups = (count + 15) >> 4
    if groups & 1:
        # Products take 32 keys at a time; the second half of the last step must hold zeros.
        target, zeros = scratch + frame[AT_VALUES], scratch + frame[AT_ZEROS]
        pack_values(kernels, rows, 0, groups * 16, head_dim, target, zeros)


def key_bytes(kernels: Any) -> int:
    """Bytes that sixteen packed keys take per element of the head."""
    raise NotImplementedError("compiled code only")


@inlined_variant(key_bytes)
def _key_bytes(kernels: Any) -> Any:
    if is_amx(kernels):
        return lambda kernels: 32
    return lambda kernels: 64


@kernel
def _four_scores(q: int, stride: int, head_dim: int, keys: int, out: int, out_stride: int, kernels: Any) -> None:
    zero = simd.splat(np.float32(0.0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    for d in range(head_dim):
        key = simd.load_floats(keys + d * 64)
        s0 = simd.fma(splat_element(kernels, q, d), key, s0)
        s1 = simd.fma(splat_element(kernels, q + stride, d), key, s1)
        s2 = simd.fma(splat_element(kernels, q + 2 * stride, d), key, s2)
        s3 = simd.fma(splat_element(kernels, q + 3 * stride, d), key, s3)
    simd.store_floats(out, s0)
    simd.store_floats(out + out_stride, s1)
    simd.store_floats(out + 2 * out_stride, s2)
    simd.store_floats(out + 3 * out_stride, s3)


@kernel
def _four_outputs(p: int, stride: int, keys: int, values: int, value_stride: int, out: int, out_stride: int) -> None:
    zero = simd.splat(np.float32(0.0))
    o0, o1, o2, o3 = zero, zero, zero, zero
    for key in range(keys):
        value = simd.load_floats(values + key * value_stride)
        o0 = simd.fma(simd.splat(simd.load_float(p + key * 4)), value, o0)
        o1 = simd.fma(simd.splat(simd.load_float(p + stride + key * 4)), value, o1)
        o2 = simd.fma(simd.splat(simd.load_float(p + 2 * stride + key * 4)), value, o2)
        o3 = simd.fma(simd.splat(simd.load_float(p + 3 * stride + key * 4)), value, o3)
    simd.store_floats(out, o0)
    simd.store_floats(out + out_stride, o1)
    simd.store_floats(out + 2 * out_stride, o2)
    simd.store_floats(out + 3 * out_stride, o3)


def splat_element(kernels: Any, base: int, index: int) -> Any:
    """One stored element in all lanes."""
    raise NotImplementedError("compiled code only")


@inlined_variant(splat_element)
def _splat_element(kernels: Any, base: Any, index: Any) -> Any:
    if is_float32(kernels):
        return lambda kernels, base, index: simd.splat(simd.load_float(base + index * 4))
    return lambda kernels, base, index: simd.splat_bf16(base + index * 2)


def scores(kernels: Any, frame: Any, scratch: int, queries: int, lanes: int, keys: int) -> None:
    """Query-key products of at most 32 lanes and `keys` packed keys, float32 [lane, key] at AT_SCORES."""
    raise NotImplementedError("compiled code only")


@variant(scores)
def _scores(kernels: Any, frame: Any, scratch: Any, queries: Any, lanes: Any, keys: Any) -> Any:
    if is_amx(kernels):

        def tiles(kernels: Any, frame: Any, scratch: Any, queries: Any, lanes: Any, keys: Any) -> None:
            head_dim, row = frame[HEAD_DIM], frame[SCORE_ROW]
            wide = (head_dim >> 5) * 1024
            for first in range(0, keys, 32):
                packed = scratch + frame[AT_KEYS] + (first >> 4) * wide
                out = scratch + frame[AT_SCORES] + first * 4
                if lanes > 16:
                    amx.product_2x2(
                        queries, head_dim * 2, 64, head_dim * 32, packed, 1024, wide, head_dim >> 5,
                        out, row, row * 16, 64,
                    )  # fmt: skip
                else:
                    amx.product_1x2(
                        queries, head_dim * 2, 64, head_dim * 32, packed, 1024, wide, head_dim >> 5,
                        out, row, row * 16, 64,
                    )  # fmt: skip

        return tiles

    def plain(kernels: Any, frame: Any, scratch: Any, queries: Any, lanes: Any, keys: Any) -> None:
        head_dim, row = frame[HEAD_DIM], frame[SCORE_ROW]
        stride = head_dim * element_bytes(kernels)
        for first in range(0, keys, 16):
            packed = scratch + frame[AT_KEYS] + first * head_dim * 4
            for lane in range(0, lanes, 4):
                out = scratch + frame[AT_SCORES] + lane * row + first * 4
                _four_scores(queries + lane * stride, stride, head_dim, packed, out, row, kernels)

    return plain


def store_probability(kernels: Any, base: int, key: int, vector: Any) -> None:
    """Sixteen softmax weights in the type the value product takes."""
    raise NotImplementedError("compiled code only")


@inlined_variant(store_probability)
def _store_probability(kernels: Any, base: Any, key: Any, vector: Any) -> Any:
    if is_amx(kernels):
        return lambda kernels, base, key, vector: simd.store_weight(base + key * 2, vector)
    return lambda kernels, base, key, vector: simd.store_floats(base + key * 4, vector)


def power(kernels: Any, vector: Any) -> Any:
    """2**x, as exact as the type of the softmax weights deserves."""
    raise NotImplementedError("compiled code only")


@inlined_variant(power)
def _power(kernels: Any, vector: Any) -> Any:
    if is_amx(kernels):
        return lambda kernels, vector: simd.exp2_short(vector)
    return lambda kernels, vector: simd.exp2(vector)


@kernel
def _softmax_row(kernels: Any, row: int, out: int, valid: int, padded: int, scale: float) -> Any:
    """Weights of one lane over its `valid` keys, zero up to `padded`; returns (maximum, sum), base 2."""
    # Two chains of maxima and sums, because one would wait for its own last result.
    top, other_top = simd.splat(_NOTHING), simd.splat(_NOTHING)
    full, even = valid & ~15, valid & ~31
    for key in range(0, even, 32):
        top = simd.maximum(simd.load_floats(row + key * 4), top)
        other_top = simd.maximum(simd.load_floats(row + key * 4 + 64), other_top)
    if even < full:
        top = simd.maximum(simd.load_floats(row + even * 4), top)
    rest = valid - full
    if rest:
        other_top = simd.maximum(simd.keep_first(simd.load_floats(row + full * 4), rest, _NOTHING), other_top)
    maximum = simd.reduce_max(simd.maximum(top, other_top)) * np.float32(scale)
    factor, shift = simd.splat(np.float32(scale)), simd.splat(-maximum)
    total, other_total = simd.splat(np.float32(0.0)), simd.splat(np.float32(0.0))
    for key in range(0, even, 32):
        weight = power(kernels, simd.fma(simd.load_floats(row + key * 4), factor, shift))
        other_weight = power(kernels, simd.fma(simd.load_floats(row + key * 4 + 64), factor, shift))
        total, other_total = simd.add(total, weight), simd.add(other_total, other_weight)
        store_probability(kernels, out, key, weight)
        store_probability(kernels, out, key + 16, other_weight)
    if even < full:
        weight = power(kernels, simd.fma(simd.load_floats(row + even * 4), factor, shift))
        total = simd.add(total, weight)
        store_probability(kernels, out, even, weight)
    if rest:
        weight = power(kernels, simd.fma(simd.load_floats(row + full * 4), factor, shift))
        weight = simd.keep_first(weight, rest, np.float32(0.0))
        other_total = simd.add(other_total, weight)
        store_probability(kernels, out, full, weight)
    for key in range((valid + 15) & ~15, padded, 16):
        store_probability(kernels, out, key, simd.splat(np.float32(0.0)))
    return maximum, simd.reduce_add(simd.add(total, other_total))


def outputs(kernels: Any, frame: Any, scratch: int, lanes: int, keys: int) -> None:
    """Softmax weights by values, float32 [lane, head_dim] at AT_OUTPUT."""
    raise NotImplementedError("compiled code only")


@variant(outputs)
def _outputs(kernels: Any, frame: Any, scratch: Any, lanes: Any, keys: Any) -> Any:
    if is_amx(kernels):

        def tiles(kernels: Any, frame: Any, scratch: Any, lanes: Any, keys: Any) -> None:
            head_dim, row = frame[HEAD_DIM], frame[WEIGHT_ROW]
            wide = (SPAN // 32) * 1024
            weights, steps = scratch + frame[AT_WEIGHTS], (keys + 31) >> 5
            for column in range(0, head_dim, 32):
                packed = scratch + frame[AT_VALUES] + (column >> 4) * wide
                out = scratch + frame[AT_OUTPUT] + column * 4
                if lanes > 16:
                    amx.product_2x2(
                        weights, row, 64, row * 16, packed, 1024, wide, steps, out, head_dim * 4, head_dim * 64, 64
                    )
                else:
                    amx.product_1x2(
                        weights, row, 64, row * 16, packed, 1024, wide, steps, out, head_dim * 4, head_dim * 64, 64
                    )

        return tiles

    def plain(kernels: Any, frame: Any, scratch: Any, lanes: Any, keys: Any) -> None:
        head_dim, row = frame[HEAD_DIM], frame[WEIGHT_ROW]
        for lane in range(0, lanes, 4):
            weights = scratch + frame[AT_WEIGHTS] + lane * row
            out = scratch + frame[AT_OUTPUT] + lane * head_dim * 4
            for column in range(0, head_dim, 16):
                values = scratch + frame[AT_VALUES] + column * 4
                _four_outputs(weights, row, keys, values, head_dim * 4, out + column * 4, head_dim * 4)

    return plain


@kernel
def _merge(state: int, head_dim: int, values: int, maximum: float, total: float) -> None:
    """Merge one span of one lane into its state [head_dim sums, maximum, sum]."""
    old_maximum = simd.load_float(state + head_dim * 4)
    old_total = simd.load_float(state + head_dim * 4 + 4)
    if old_total == np.float32(0.0):
        # Nothing to merge with: what the sums below would give, without their cost.
        for column in range(0, head_dim, 16):
            simd.store_floats(state + column * 4, simd.load_floats(values + column * 4))
        simd.store_float(state + head_dim * 4, np.float32(maximum))
        simd.store_float(state + head_dim * 4 + 4, np.float32(total))
        return
    top = max(old_maximum, maximum)
    keep = simd.exp2(simd.splat(np.float32(old_maximum - top)))
    take = simd.exp2(simd.splat(np.float32(maximum - top)))
    for column in range(0, head_dim, 16):
        kept = simd.mul(simd.load_floats(state + column * 4), keep)
        simd.store_floats(state + column * 4, simd.fma(simd.load_floats(values + column * 4), take, kept))
    both = simd.fma(simd.splat(np.float32(total)), take, simd.mul(simd.splat(old_total), keep))
    simd.store_float(state + head_dim * 4, top)
    simd.store_float(state + head_dim * 4 + 4, simd.reduce_max(both))


@kernel
def _clear(state: int, head_dim: int) -> None:
    for column in range(0, head_dim, 16):
        simd.store_floats(state + column * 4, simd.splat(np.float32(0.0)))
    simd.store_float(state + head_dim * 4, _NOTHING)
    simd.store_float(state + head_dim * 4 + 4, np.float32(0.0))


@kernel
def _store_output(kernels: Any, frame: Any, state: int, row: int, head: int) -> None:
    head_dim = frame[HEAD_DIM]
    inverse = simd.splat(np.float32(1.0) / simd.load_float(state + head_dim * 4 + 4))
    for column in range(0, head_dim, 16):
        value = simd.mul(simd.load_floats(state + column * 4), inverse)
        target = activation(kernels, frame[MIXED], row, head * head_dim + column, frame[MIXED_COLUMNS])
        store_values(kernels, target, value)


@kernel
def _attend_span(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, head: int, span: int,
    row: int, rows: int, states: int,
) -> None:  # fmt: skip
    """All query lanes of `rows` rows over one span; their states lie one after the other at `states`."""
    group = frame[HEADS] // frame[KV_HEADS]
    head_dim = frame[HEAD_DIM]
    end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
    last = np.int64(simd.load_int32(frame[POSITIONS] + (row + rows - 1) * 4))
    start = span * SPAN
    _pack_span(kernels, frame, scratch, plane, sequence, start, min(SPAN, last + 1 - start), end)
    scale = simd.load_float(frame[SCALE])
    queries = frame[QUERIES] + head * frame[QUERY_PLANE_BYTES] + row * group * head_dim * element_bytes(kernels)
    lanes = rows * group
    for first in range(0, lanes, 32):
        here = min(32, lanes - first)
        last = np.int64(simd.load_int32(frame[POSITIONS] + (row + (first + here - 1) // group) * 4))
        keys = min(SPAN, last + 1 - start)
        if keys <= 0:
            continue
        padded = (keys + 31) & ~31
        scores(kernels, frame, scratch, queries + first * head_dim * element_bytes(kernels), here, keys)
        token, member = row + first // group, first % group
        for lane in range(here):
            position = np.int64(simd.load_int32(frame[POSITIONS] + token * 4))
            valid = min(SPAN, max(0, position + 1 - start))
            member += 1
            if member == group:
                token, member = token + 1, 0
            source = scratch + frame[AT_SCORES] + lane * frame[SCORE_ROW]
            target = scratch + frame[AT_WEIGHTS] + lane * frame[WEIGHT_ROW]
            maximum, total = _softmax_row(kernels, source, target, valid, padded, scale)
            statistics = scratch + frame[AT_OUTPUT] + 32 * head_dim * 4 + lane * 8
            simd.store_float(statistics, maximum)
            simd.store_float(statistics + 4, total)
        outputs(kernels, frame, scratch, here, keys)
        for lane in range(here):
            statistics = scratch + frame[AT_OUTPUT] + 32 * head_dim * 4 + lane * 8
            total = simd.load_float(statistics + 4)
            if total > np.float32(0.0):
                values = scratch + frame[AT_OUTPUT] + lane * head_dim * 4
                state = states + (first + lane) * frame[STATE_ROW]
                _merge(state, head_dim, values, simd.load_float(statistics), total)


@kernel
def attention(kernels: Any, frame: Any, layer: int, counter: int, scratch: int) -> None:
    """This thread's share of one layer: whole prefill items, and single spans of decodes left as partial states."""
    group, kv_heads, head_dim = frame[HEADS] // frame[KV_HEADS], frame[KV_HEADS], frame[HEAD_DIM]
    while True:
        item = sync.fetch_add_int64(counter, 1)
        if item >= frame[NUM_TASKS] * kv_heads:
            return
        task, head = frame[TASKS] + (item // kv_heads) * TASK_WORDS * 4, item % kv_heads
        row = np.int64(simd.load_int32(task + TASK_ROW * 4))
        rows = np.int64(simd.load_int32(task + TASK_ROWS * 4))
        sequence = np.int64(simd.load_int32(task + TASK_SEQUENCE * 4))
        span = np.int64(simd.load_int32(task + TASK_SPAN * 4))
        slot = np.int64(simd.load_int32(task + TASK_SLOT * 4))
        plane = layer * frame[LAYER_BYTES] + head * frame[HEAD_BYTES]
        states = scratch + frame[AT_STATE]
        if span >= 0:
            states = frame[PARTIALS] + (slot * kv_heads + head) * group * frame[STATE_ROW]
        for lane in range(rows * group):
            _clear(states + lane * frame[STATE_ROW], head_dim)
        if span >= 0:
            _attend_span(kernels, frame, scratch, plane, sequence, head, span, row, rows, states)
            continue
        last = np.int64(simd.load_int32(frame[POSITIONS] + (row + rows - 1) * 4))
        for step in range(last // SPAN + 1):
            _attend_span(kernels, frame, scratch, plane, sequence, head, step, row, rows, states)
        for lane in range(rows * group):
            head_index = head * group + lane % group
            _store_output(kernels, frame, states + lane * frame[STATE_ROW], row + lane // group, head_index)


@kernel
def combine(kernels: Any, frame: Any, rank: int, size: int) -> None:
    """Merge the partial states of this thread's decodes, in the order of their spans."""
    group, kv_heads, head_dim = frame[HEADS] // frame[KV_HEADS], frame[KV_HEADS], frame[HEAD_DIM]
    for item in range(rank, frame[NUM_DECODES] * frame[HEADS], size):
        sequence, head = item // frame[HEADS], item % frame[HEADS]
        first = np.int64(simd.load_int32(frame[DECODE_SLOTS] + sequence * 4))
        last = np.int64(simd.load_int32(frame[DECODE_SLOTS] + sequence * 4 + 4))
        lane = (head // group) * group + head % group
        state = frame[PARTIALS] + (first * kv_heads * group + lane) * frame[STATE_ROW]
        for slot in range(first + 1, last):
            part = frame[PARTIALS] + (slot * kv_heads * group + lane) * frame[STATE_ROW]
            maximum = simd.load_float(part + head_dim * 4)
            _merge(state, head_dim, part, maximum, simd.load_float(part + head_dim * 4 + 4))
        _store_output(kernels, frame, state, sequence, head)
