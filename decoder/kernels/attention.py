"""Paged attention for prefill and decode: exact softmax over spans of keys, read through the block tables.

One arithmetic for both: keys are taken in spans that start at absolute multiples of SPAN; a span gives (maximum,
sum, weighted values) per query lane, and spans are merged in order (online softmax, Milakov and Gimelshein 2018;
split keys as in Flash-Decoding 2023). So a chunked prefill, a one-shot prefill and a decode agree bit for bit.
A lane is one (token, query head of the group); sixteen lanes are a tile. A lane's sums do not depend on its place, so
decodes whose tables share a span's blocks read it once, lanes of all of them in the tiles of one task
(`attention_plan.py` finds them). Spans are computed by `attention_rows.py`, or with AMX by `attention_tiles.py`. Slots
past a sequence's end are never used in a sum.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import simd, sync
from decoder.kernels.attention_alone import expect
from decoder.kernels.attention_forms import attend_span, clear, finished_lines, merge, take_queries
from decoder.kernels.compiled import kernel
from decoder.kernels.frame import (
    AT_KEYS,
    AT_LIMITS,
    AT_QUERIES,
    AT_STATE,
    CONTROL,
    HEAD_BYTES,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
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
    SIZE,
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
)
from decoder.kernels.rows import query_bytes, store_input

_TASKS: Final = 8  # for each thread: from so many on a thread takes all heads of one at once


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
    lines = finished_lines(kernels, frame, state, inverse, min(16, rows * group - tile * 16), scratch)
    for lane in range(tile * 16, min(tile * 16 + 16, rows * group)):
        first_column = (head * group + lane % group) * head_dim
        for column in range(0, head_dim, 16):
            value = simd.load_floats(lines + ((lane - tile * 16) * head_dim + column) * 4)
            store_input(kernels, frame[MIXED], row + lane // group, first_column + column, frame[MIXED_COLUMNS], value)


@kernel
def _prepare_lanes(kernels: Any, frame: Any, scratch: int, head: int, row: int, rows: int, tiles: int) -> None:
    """Pack the queries of all lanes of `rows` rows and note up to which key each lane may look."""
    head_dim, group = frame[HEAD_DIM], frame[HEADS] // frame[KV_HEADS]
    limit = scratch + frame[AT_LIMITS]
    end = limit + tiles * 64
    for token in range(rows):
        position = simd.load_int32(frame[POSITIONS] + (row + token) * 4)
        # Lanes past the last row look as far as it does; nothing reads their results.
        last = limit + group * 4 if token < rows - 1 else end
        while limit < last:
            simd.store_int32(limit, np.int32(position + 1))
            limit += 4
    queries = frame[QUERIES] + head * frame[QUERY_PLANE_BYTES] + row * group * head_dim * query_bytes(kernels)
    for tile in range(tiles):
        source = queries + tile * 16 * head_dim * query_bytes(kernels)
        lanes = min(16, rows * group - tile * 16)
        take_queries(kernels, source, head_dim, lanes, scratch + frame[AT_QUERIES], tile)


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
        source = gathered + tile * 16 * head_dim * size
        take_queries(kernels, source, head_dim, 16, scratch + frame[AT_QUERIES], tile)


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
def _first_span(frame: Any, task: int, window: int) -> int:
    """The first span that a task reads."""
    row = np.int64(simd.load_int32(task + TASK_ROW * 4))
    if simd.load_int32(task + TASK_SHARED * 4) != 0:
        row = np.int64(simd.load_int32(frame[MEMBERS] + row * 4))
    return max(np.int64(simd.load_int32(task + TASK_SPAN * 4)), _lowest_span(frame, row, window))


@kernel
def _expect_item(frame: Any, layer: int, item: int, window: int, scratch: int) -> None:
    """Tell the form what this thread is likely to read after its last span: what the task of `item` begins with."""
    kv_heads = frame[KV_HEADS]
    if item >= frame[NUM_TASKS] * kv_heads:
        expect(frame, scratch, 0, 0, -1)
        return
    task = frame[TASKS] + (item // kv_heads) * TASK_WORDS * 4
    plane = layer * frame[LAYER_BYTES] + (item % kv_heads) * frame[HEAD_BYTES]
    sequence = np.int64(simd.load_int32(task + TASK_SEQUENCE * 4))
    expect(frame, scratch, plane, sequence, _first_span(frame, task, window) * SPAN)


@kernel
def _attend(kernels: Any, frame: Any, layer: int, item: int, following: int, window: int, scratch: int) -> None:
    """One head of one task. `following` is the item that this thread is likely to have next."""
    group, kv_heads, head_dim = frame[HEADS] // frame[KV_HEADS], frame[KV_HEADS], frame[HEAD_DIM]
    together, wide = max(1, 16 // group), (group + 15) >> 4
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
        lanes = 16 if shared else min(16, rows * group - tile * 16)
        clear(kernels, states + tile * frame[STATE_BYTES], head_dim, lanes)
    if shared:
        members = frame[MEMBERS] + row * 4
        row = np.int64(simd.load_int32(members))
        _prepare_members(kernels, frame, scratch, head, members, rows, tiles)
    else:
        _prepare_lanes(kernels, frame, scratch, head, row, rows, tiles)
    first, last = _first_span(frame, task, window), span
    if span < 0:
        last = np.int64(simd.load_int32(frame[POSITIONS] + (row + rows - 1) * 4)) // SPAN
    for step in range(first, last + 1):
        if step < last:
            expect(frame, scratch, plane, sequence, (step + 1) * SPAN)
        else:
            _expect_item(frame, layer, following, window, scratch)
        attend_span(kernels, frame, scratch, plane, sequence, step, window, shared, rows, tiles, states)
    if span < 0:
        for tile in range(tiles):
            _store_lanes(kernels, frame, states + tile * frame[STATE_BYTES], row, rows, head, tile, scratch)


@kernel
def attention(kernels: Any, frame: Any, layer: int, counter: int, scratch: int) -> None:
    """A phase of the step: finished rows of one layer, and single spans of split decodes left as partial states."""
    kv_heads = frame[KV_HEADS]
    window = simd.load_int64(frame[LAYERS] + (layer * LAYER_WORDS + LAYER_WINDOW) * 8)
    # Heads of a task lie side by side: where tasks are many, a thread takes all of them.
    heads = kv_heads if frame[NUM_TASKS] >= _TASKS * frame[SIZE] else 1
    items, mine = frame[NUM_TASKS] * kv_heads, 0
    while True:
        begin = sync.take_next(counter) * heads
        if begin >= items:
            break
        mine += heads
        for item in range(begin, begin + heads):
            following = item + 1 if item + 1 < begin + heads else simd.load_int64(counter) * heads
            _attend(kernels, frame, layer, item, following, window, scratch)
    sync.end_phase(frame[CONTROL], counter, mine, items)


@kernel
def _combine_head(kernels: Any, frame: Any, sequence: int, head: int, window: int, scratch: int) -> None:
    """Merge the partial states of one head of a decode, if it was split."""
    group, head_dim, state = frame[HEADS] // frame[KV_HEADS], frame[HEAD_DIM], scratch + frame[AT_STATE]
    first = np.int64(simd.load_int32(frame[PART_STARTS] + sequence * 4))
    last = np.int64(simd.load_int32(frame[PART_STARTS] + sequence * 4 + 4))
    if first == last:
        return
    # In a shared task others may have looked at spans before this one's window.
    first += _lowest_span(frame, sequence, window)
    for tile in range((group + 15) >> 4):
        clear(kernels, state, head_dim, min(16, group - tile * 16))
        for index in range(first, last):
            entry = frame[PARTS] + index * PART_WORDS * 4
            part = _partial_state(frame, head, np.int64(simd.load_int32(entry + PART_SLOT * 4)))
            lane = np.int64(simd.load_int32(entry + PART_LANE * 4))
            lanes = min(16, group - tile * 16)
            merge(kernels, frame, state, part + tile * frame[STATE_BYTES], lane, lanes, scratch)
        _store_lanes(kernels, frame, state, sequence, 1, head, tile, scratch)


@kernel
def combine(kernels: Any, frame: Any, layer: int, rank: int, counter: int, scratch: int) -> None:
    """A phase of the step: the partial states of split decodes, merged in the order of their spans."""
    kv_heads = frame[KV_HEADS]
    window = simd.load_int64(frame[LAYERS] + (layer * LAYER_WORDS + LAYER_WINDOW) * 8)
    items, mine = frame[NUM_DECODES] * kv_heads, 0
    while True:
        begin, end = sync.take_tasks(counter, items, frame[SIZE], rank)
        if begin == end:
            break
        mine += end - begin
        for item in range(begin, end):
            _combine_head(kernels, frame, item // kv_heads, item % kv_heads, window, scratch)
    sync.end_phase(frame[CONTROL], counter, mine, items)
