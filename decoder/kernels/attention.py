"""Paged attention for prefill and decode: exact softmax over spans of keys, read through the block tables.

One arithmetic for both: keys are taken in spans that start at absolute multiples of SPAN; a span gives (maximum,
sum, weighted values) per query lane, and spans are merged in order (online softmax, Milakov and Gimelshein 2018;
split keys as in Flash-Decoding 2023). So a chunked prefill, a one-shot prefill and a decode agree bit for bit.
A lane is one (token, query head of the group). Sixteen lanes are one vector: scores are [key, lane], states
[head_dim, lane], so that a softmax needs no sum across a vector and keys need no transposing. A lane's sums do not
depend on its place, so decodes whose tables share a span's blocks read it once, lanes of all of them in the tiles of
one task (`decoder/kernels/attention_plan.py` finds them). Slots past a sequence's end are never used in a sum.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import simd, sync
from decoder.kernels.attention_in_place import (
    reads_in_place,
    scores_in_place,
    take_rows,
    weighted_values_in_place,
)
from decoder.kernels.attention_products import (
    held_bytes,
    pack_queries,
    pack_values,
    scores,
    value_rows,
    weighted_values,
    weights_bytes,
)
from decoder.kernels.compiled import inlined_variant, kernel
from decoder.kernels.frame import (
    AT_KEYS,
    AT_LIMITS,
    AT_OUTPUT,
    AT_QUERIES,
    AT_SCORES,
    AT_STATE,
    AT_STATISTICS,
    AT_WEIGHTS,
    BLOCK_TOKENS,
    CAP_SIZE_OFFSET,
    CONTEXT_LENS,
    HEAD_BYTES,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LANES_BYTES,
    LAYER_BYTES,
    LAYER_WINDOW,
    LAYER_WORDS,
    LAYERS,
    LOG_SUMS,
    MEMBERS,
    MIXED,
    MIXED_COLUMNS,
    NUM_DECODES,
    NUM_PARTIALS,
    NUM_TASKS,
    PART_LANE,
    PART_SLOT,
    PART_STARTS,
    PART_WORDS,
    PARTIALS,
    PARTS,
    POSITIONS,
    QUERIES,
    QUERY_PLANE_BYTES,
    ROW_BYTES,
    SCALE,
    SCORE_CAP,
    SPAN,
    STATE_BYTES,
    TASK_ROW,
    TASK_ROWS,
    TASK_SEQUENCE,
    TASK_SHARED,
    TASK_SLOT,
    TASK_SPAN,
    TASK_WORDS,
    TASKS,
    VALUE_OFFSET,
)
from decoder.kernels.rows import query_bytes, store_input
from decoder.kernels.sets import tile_attention
from decoder.kernels.stored_rows import load_rows, row_address, scale_address

_AHEAD: Final = 32  # keys asked for before they are used
_NOTHING: Final = np.float32(-1e30)  # maximum of an empty state; finite, so that no difference is NaN


@kernel
def _prefetch_rows(frame: Any, plane: int, sequence: int, token: int, end: int) -> None:
    """Ask for sixteen key rows and their value rows, if the sequence has them."""
    if token >= end or frame[BLOCK_TOKENS] < 16:
        return
    address = row_address(frame, plane, sequence, token)
    for offset in range(0, 16 * frame[ROW_BYTES], 64):
        simd.prefetch(address + offset)
        simd.prefetch(address + frame[VALUE_OFFSET] + offset)


@kernel
def _gather_span(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, count: int, end: int, floor: int
) -> None:
    """Bring `count` keys from `start` to the scratch memory, and as many values as lie before the sequence's `end`.

    Values up to the next multiple of 32 are zero; keys there are whatever the scratch memory held. So it is with runs
    that end before `floor`, which no lane looks at: their blocks may be gone.
    """
    head_dim, tokens = frame[HEAD_DIM], frame[BLOCK_TOKENS]
    held = head_dim * held_bytes(kernels)
    keys = scratch + frame[AT_KEYS]
    run = min(16, tokens)
    # Rows of one head lie in short runs, too short for the hardware to foresee the next one.
    for first in range(0, _AHEAD, 16):
        _prefetch_rows(frame, plane, sequence, start + first, end)
    for first in range(0, count, 32):
        rows = value_rows(kernels, frame, scratch, first)
        for part in range(first, first + 32, 16):
            ahead = start + part + _AHEAD
            _prefetch_rows(frame, plane, sequence, ahead, end)
            for index in range(part, min(part + 16, end - start), run):
                if start + index + run <= floor:
                    for offset in range((index - first) * held, (index - first + run) * held, 64):
                        simd.store_floats(rows + offset, simd.splat(np.float32(0.0)))
                    continue
                source = row_address(frame, plane, sequence, start + index)
                scales = scale_address(kernels, frame, plane, sequence, start + index)
                here = min(run, end - start - index)
                load_rows(kernels, source, scales, here, head_dim, keys + index * held)
                load_rows(
                    kernels, source + frame[VALUE_OFFSET], scales + frame[VALUE_OFFSET] // head_dim * 2, here, head_dim,
                    rows + (index - first) * held,
                )  # fmt: skip
        for offset in range(max(0, end - start - first) * held, 32 * held, 64):
            simd.store_floats(rows + offset, simd.splat(np.float32(0.0)))
        pack_values(kernels, frame, scratch, head_dim, first)


def store_weights(kernels: Any, target: int, key: int, even: Any, odd: Any) -> None:
    """Softmax weights of sixteen lanes for two keys, as the value product takes them."""
    raise NotImplementedError("compiled code only")


@inlined_variant(store_weights)
def _store_weights(kernels: Any, target: Any, key: Any, even: Any, odd: Any) -> Any:
    if tile_attention(kernels):
        return lambda kernels, target, key, even, odd: simd.store_weight_pair(target + key * 32, even, odd)

    def floats(kernels: Any, target: Any, key: Any, even: Any, odd: Any) -> None:
        simd.store_floats(target + key * LANES_BYTES, even)
        simd.store_floats(target + (key + 1) * LANES_BYTES, odd)

    return floats


def power(kernels: Any, vector: Any) -> Any:
    """2**x, as exact as the type of the softmax weights deserves."""
    raise NotImplementedError("compiled code only")


@inlined_variant(power)
def _power(kernels: Any, vector: Any) -> Any:
    if tile_attention(kernels):
        return lambda kernels, vector: simd.exp2_short(vector)
    return lambda kernels, vector: simd.exp2(vector)


@kernel
def _cap_scores(source: int, keys: int, cap: int) -> None:
    """Replace scores of sixteen lanes by their soft caps, scaled for powers of two (Gemma 2, 2024, section 2)."""
    rate, size = simd.splat(simd.load_float(cap)), simd.splat(simd.load_float(cap + CAP_SIZE_OFFSET))
    for key in range(keys):
        address = source + key * LANES_BYTES
        simd.store_floats(address, simd.soft_cap(simd.load_floats(address), rate, size))


@kernel
def _softmax(
    kernels: Any, source: int, target: int, keys: int, limits: int, window: int, start: int, scale: float,
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
    nothing = simd.splat(_NOTHING)
    top, other_top = nothing, nothing
    if masked:
        for key in range(0, keys, 2):
            even = simd.load_floats(source + key * LANES_BYTES)
            odd = simd.load_floats(source + (key + 1) * LANES_BYTES)
            if cut:
                even = simd.keep_from(even, floors, np.int32(key), _NOTHING)
                odd = simd.keep_from(odd, floors, np.int32(key + 1), _NOTHING)
            top = simd.maximum(simd.keep_under(even, bounds, np.int32(key), _NOTHING), top)
            other_top = simd.maximum(simd.keep_under(odd, bounds, np.int32(key + 1), _NOTHING), other_top)
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
            even = power(kernels, simd.fma(simd.load_floats(source + key * LANES_BYTES), factor, shift))
            odd = power(kernels, simd.fma(simd.load_floats(source + (key + 1) * LANES_BYTES), factor, shift))
            even = simd.keep_under(even, bounds, np.int32(key), np.float32(0.0))
            odd = simd.keep_under(odd, bounds, np.int32(key + 1), np.float32(0.0))
            if cut:
                even = simd.keep_from(even, floors, np.int32(key), np.float32(0.0))
                odd = simd.keep_from(odd, floors, np.int32(key + 1), np.float32(0.0))
            total, other_total = simd.add(total, even), simd.add(other_total, odd)
            store_weights(kernels, target, key, even, odd)
    else:
        for key in range(0, keys, 2):
            even = power(kernels, simd.fma(simd.load_floats(source + key * LANES_BYTES), factor, shift))
            odd = power(kernels, simd.fma(simd.load_floats(source + (key + 1) * LANES_BYTES), factor, shift))
            total, other_total = simd.add(total, even), simd.add(other_total, odd)
            store_weights(kernels, target, key, even, odd)
    simd.store_floats(statistics, maximum)
    simd.store_floats(statistics + 64, simd.add(total, other_total))


@kernel
def _merge(state: int, head_dim: int, values: int, stride: int, statistics: int) -> None:
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
def _clear(state: int, head_dim: int) -> None:
    for row in range(head_dim + 2):
        simd.store_floats(state + row * 64, simd.splat(np.float32(0.0)))
    simd.store_floats(state + head_dim * 64, simd.splat(_NOTHING))


@kernel
def _store_lanes(kernels: Any, frame: Any, state: int, row: int, rows: int, head: int, tile: int, scratch: int) -> None:
    """Write the finished states of one tile of lanes of the `rows` rows from `row` as inputs of the next product."""
    head_dim, group = frame[HEAD_DIM], frame[HEADS] // frame[KV_HEADS]
    inverse = simd.div(simd.splat(np.float32(1.0)), simd.load_floats(state + head_dim * 64 + 64))
    if frame[LOG_SUMS]:
        for lane in range(tile * 16, min(tile * 16 + 16, rows * group)):
            source = state + head_dim * 64 + (lane & 15) * 4
            value = simd.load_float(source) + np.log2(simd.load_float(source + 64))
            target = (row + lane // group) * frame[HEADS] + head * group + lane % group
            simd.store_float(frame[LOG_SUMS] + target * 4, np.float32(value))
    for index in range(head_dim):
        simd.store_floats(state + index * 64, simd.mul(simd.load_floats(state + index * 64), inverse))
    lines = scratch + frame[AT_OUTPUT]
    for column in range(0, head_dim, 16):
        simd.transpose_words(state + column * 64, 64, lines + column * 4, head_dim * 4)
    for lane in range(tile * 16, min(tile * 16 + 16, rows * group)):
        first_column = (head * group + lane % group) * head_dim
        for column in range(0, head_dim, 16):
            value = simd.load_floats(lines + ((lane - tile * 16) * head_dim + column) * 4)
            store_input(kernels, frame[MIXED], row + lane // group, first_column + column, frame[MIXED_COLUMNS], value)


@kernel
def _attend_span_in_place(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, window: int, state: int
) -> None:
    """The only tile of lanes over one span, without a copy of the keys."""
    end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
    limits, statistics = scratch + frame[AT_LIMITS], scratch + frame[AT_STATISTICS]
    keys = min(SPAN, np.int64(simd.load_int32(limits + 60)) - start)
    padded = (keys + 31) & ~31
    for first in range(0, _AHEAD, 16):
        _prefetch_rows(frame, plane, sequence, start + first, end)
    rows = np.int64(0)
    for first in range(0, padded, 16):
        _prefetch_rows(frame, plane, sequence, start + first + _AHEAD, end)
        if start + first < end:
            rows = row_address(frame, plane, sequence, start + first)
        take_rows(kernels, frame, scratch, first, rows, end - start - first)
    scores_in_place(kernels, frame, scratch, padded)
    if frame[SCORE_CAP]:
        _cap_scores(scratch + frame[AT_SCORES], padded, frame[SCORE_CAP])
    _softmax(
        kernels, scratch + frame[AT_SCORES], scratch + frame[AT_WEIGHTS], padded, limits, window, start,
        simd.load_float(frame[SCALE]), statistics,
    )  # fmt: skip
    weighted_values_in_place(kernels, frame, scratch, padded)
    _merge(state, frame[HEAD_DIM], scratch + frame[AT_OUTPUT], LANES_BYTES, statistics)


@kernel
def _attend_span(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, span: int, window: int, tiles: int, states: int
) -> None:
    """All tiles of lanes over one span; their states lie one after the other at `states`."""
    head_dim = frame[HEAD_DIM]
    end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
    limits = scratch + frame[AT_LIMITS]
    start = span * SPAN
    last = np.int64(simd.load_int32(limits + (tiles * 16 - 1) * 4))
    floor = np.int64(simd.load_int32(limits)) - window
    _gather_span(kernels, frame, scratch, plane, sequence, start, min(SPAN, last - start), end, floor)
    scale = simd.load_float(frame[SCALE])
    statistics, output = scratch + frame[AT_STATISTICS], scratch + frame[AT_OUTPUT]
    for tile in range(0, tiles, 2):
        pair = min(2, tiles - tile)
        keys = min(SPAN, np.int64(simd.load_int32(limits + ((tile + pair) * 16 - 1) * 4)) - start)
        if keys <= 0:
            continue
        keys = (keys + 31) & ~31
        scores(kernels, frame, scratch, tile, pair, keys)
        for member in range(pair):
            if frame[SCORE_CAP]:
                _cap_scores(scratch + frame[AT_SCORES] + member * 64, keys, frame[SCORE_CAP])
            _softmax(
                kernels, scratch + frame[AT_SCORES] + member * 64,
                scratch + frame[AT_WEIGHTS] + member * weights_bytes(kernels), keys, limits + (tile + member) * 64,
                window, start, scale, statistics + member * 128,
            )  # fmt: skip
        weighted_values(kernels, frame, scratch, pair, keys)
        for member in range(pair):
            state = states + (tile + member) * frame[STATE_BYTES]
            _merge(state, head_dim, output + member * 64, LANES_BYTES, statistics + member * 128)


@kernel
def _prepare_lanes(kernels: Any, frame: Any, scratch: int, head: int, row: int, rows: int, tiles: int) -> None:
    """Pack the queries of all lanes of `rows` rows and note up to which key each lane may look."""
    head_dim, group = frame[HEAD_DIM], frame[HEADS] // frame[KV_HEADS]
    limits = scratch + frame[AT_LIMITS]
    for lane in range(tiles * 16):
        # Lanes past the last row look as far as it does; nothing reads their results.
        token = min(lane // group, rows - 1)
        position = simd.load_int32(frame[POSITIONS] + (row + token) * 4)
        simd.store_int32(limits + lane * 4, np.int32(position + 1))
    queries = frame[QUERIES] + head * frame[QUERY_PLANE_BYTES] + row * group * head_dim * query_bytes(kernels)
    for tile in range(tiles):
        source = queries + tile * 16 * head_dim * query_bytes(kernels)
        pack_queries(kernels, source, head_dim, scratch + frame[AT_QUERIES], tile)


@kernel
def _prepare_members(kernels: Any, frame: Any, scratch: int, head: int, members: int, rows: int, tiles: int) -> None:
    """As `_prepare_lanes` for rows anywhere in the batch; a tile holds whole groups, or a group whole tiles."""
    head_dim, group = frame[HEAD_DIM], frame[HEADS] // frame[KV_HEADS]
    limits, size = scratch + frame[AT_LIMITS], query_bytes(kernels)
    together, wide = max(1, 16 // group), (group + 15) & ~15
    plane, gathered = frame[QUERIES] + head * frame[QUERY_PLANE_BYTES], scratch + frame[AT_KEYS]
    for index in range(rows):
        row = np.int64(simd.load_int32(members + index * 4))
        source = plane + row * group * head_dim * size
        target = gathered + (index // together * wide + index % together * group) * head_dim * size
        # May run over into the next member's lanes, which are written after.
        for offset in range(0, group * head_dim * size, 64):
            simd.store_ints(target + offset, simd.load_ints(source + offset))
    for lane in range(tiles * 16):
        index = min(lane // wide * together + min(lane % wide // group, together - 1), rows - 1)
        row = np.int64(simd.load_int32(members + index * 4))
        simd.store_int32(limits + lane * 4, np.int32(simd.load_int32(frame[POSITIONS] + row * 4) + 1))
    for tile in range(tiles):
        pack_queries(kernels, gathered + tile * 16 * head_dim * size, head_dim, scratch + frame[AT_QUERIES], tile)


@kernel
def _partial_state(frame: Any, head: int, slot: int) -> int:
    """Address of the partial state of one head; those of the slots after it follow."""
    tiles = (frame[HEADS] // frame[KV_HEADS] + 15) >> 4
    return frame[PARTIALS] + (head * frame[NUM_PARTIALS] + slot) * tiles * frame[STATE_BYTES]


@kernel
def _lowest_span(frame: Any, row: int, window: int) -> int:
    """The first span that the row looks at: earlier ones end before its window, this one may begin there."""
    return max(0, np.int64(simd.load_int32(frame[POSITIONS] + row * 4)) + 1 - window) // SPAN


@kernel
def attention(kernels: Any, frame: Any, layer: int, counter: int, scratch: int) -> None:
    """This thread's share of one layer: finished rows, and single spans of split decodes left as partial states."""
    group, kv_heads, head_dim = frame[HEADS] // frame[KV_HEADS], frame[KV_HEADS], frame[HEAD_DIM]
    together, wide = max(1, 16 // group), (group + 15) >> 4
    window = simd.load_int64(frame[LAYERS] + (layer * LAYER_WORDS + LAYER_WINDOW) * 8)
    while True:
        item = sync.fetch_add_int64(counter, 1)
        if item >= frame[NUM_TASKS] * kv_heads:
            return
        task, head = frame[TASKS] + (item // kv_heads) * TASK_WORDS * 4, item % kv_heads
        row = np.int64(simd.load_int32(task + TASK_ROW * 4))
        rows = np.int64(simd.load_int32(task + TASK_ROWS * 4))
        sequence = np.int64(simd.load_int32(task + TASK_SEQUENCE * 4))
        span = np.int64(simd.load_int32(task + TASK_SPAN * 4))
        shared = simd.load_int32(task + TASK_SHARED * 4) != 0
        plane = layer * frame[LAYER_BYTES] + head * frame[HEAD_BYTES]
        tiles = (rows + together - 1) // together * wide if shared else (rows * group + 15) >> 4
        states = scratch + frame[AT_STATE]
        if span >= 0:
            states = _partial_state(frame, head, np.int64(simd.load_int32(task + TASK_SLOT * 4)))
        for tile in range(tiles):
            _clear(states + tile * frame[STATE_BYTES], head_dim)
        if shared:
            members = frame[MEMBERS] + row * 4
            row = np.int64(simd.load_int32(members))
            _prepare_members(kernels, frame, scratch, head, members, rows, tiles)
        else:
            _prepare_lanes(kernels, frame, scratch, head, row, rows, tiles)
        first, last = max(span, _lowest_span(frame, row, window)), span
        if span < 0:
            last = np.int64(simd.load_int32(frame[POSITIONS] + (row + rows - 1) * 4)) // SPAN
        in_place = reads_in_place(kernels, frame, tiles)
        for step in range(first, last + 1):
            if in_place:
                _attend_span_in_place(kernels, frame, scratch, plane, sequence, step * SPAN, window, states)
            else:
                _attend_span(kernels, frame, scratch, plane, sequence, step, window, tiles, states)
        if span < 0:
            for tile in range(tiles):
                _store_lanes(kernels, frame, states + tile * frame[STATE_BYTES], row, rows, head, tile, scratch)


@kernel
def combine(kernels: Any, frame: Any, layer: int, rank: int, size: int, scratch: int) -> None:
    """Merge the partial states of this thread's split decodes, in the order of their spans."""
    group, kv_heads, head_dim = frame[HEADS] // frame[KV_HEADS], frame[KV_HEADS], frame[HEAD_DIM]
    window = simd.load_int64(frame[LAYERS] + (layer * LAYER_WORDS + LAYER_WINDOW) * 8)
    state = scratch + frame[AT_STATE]
    for item in range(rank, frame[NUM_DECODES] * kv_heads, size):
        sequence, head = item // kv_heads, item % kv_heads
        first = np.int64(simd.load_int32(frame[PART_STARTS] + sequence * 4))
        last = np.int64(simd.load_int32(frame[PART_STARTS] + sequence * 4 + 4))
        if first == last:
            continue
        # In a shared task others may have looked at spans before this one's window.
        first += _lowest_span(frame, sequence, window)
        for tile in range((group + 15) >> 4):
            _clear(state, head_dim)
            for index in range(first, last):
                entry = frame[PARTS] + index * PART_WORDS * 4
                part = _partial_state(frame, head, np.int64(simd.load_int32(entry + PART_SLOT * 4)))
                part += tile * frame[STATE_BYTES] + np.int64(simd.load_int32(entry + PART_LANE * 4)) * 4
                # Lanes past the group's last take others' numbers; nothing reads them.
                _merge(state, head_dim, part, 64, part + head_dim * 64)
            _store_lanes(kernels, frame, state, sequence, 1, head, tile, scratch)
