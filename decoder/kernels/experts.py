"""A mixture of experts: the router's choice for each row, and the products of each expert with the rows that chose it.

Rows of one expert lie together, from a multiple of ROW_BLOCK on, so that its weights stream past all of them at once. A
row's sums do not depend on which other rows are there, and its experts are added in the order of their numbers: what
shares the step changes nothing. Called by `step.py`, by all threads at once.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

import math
from typing import Any

import numpy as np

from decoder.kernels import simd, sync
from decoder.kernels.block_products import block_product, for_many_rows
from decoder.kernels.compiled import kernel
from decoder.kernels.frame import (
    BRANCH,
    CHOICE_SLOTS,
    CHOICE_WEIGHTS,
    CHOICES,
    CONTROL,
    COUNTER_BYTES,
    COUNTERS,
    EPSILON,
    EXPERT_DOWN_BYTES,
    EXPERT_GATED,
    EXPERT_INNER,
    EXPERT_INPUTS,
    EXPERT_NORMALIZE,
    EXPERT_OUTPUTS,
    EXPERT_ROWS,
    EXPERT_STARTS,
    EXPERT_UP_BYTES,
    EXPERTS,
    EXPERTS_USED,
    GATE_ENDING,
    GATED,
    HIDDEN,
    LAYER_DOWN,
    LAYER_GATE_UP,
    LAYER_POST_NORM,
    LAYER_ROUTER,
    LAYER_SHARED_DOWN,
    LAYER_SHARED_GATE_UP,
    NO_ADAPTER,
    NORMED,
    RESIDUAL,
    ROUTED,
    ROUTER_COLUMNS,
    ROW_BLOCK,
    SCRATCH,
    SCRATCH_BYTES,
    SHARED_INNER,
    SIZE,
    TOKENS,
    WIDTH,
)
from decoder.kernels.linear import STORE, finish, product
from decoder.kernels.rows import normalize, pair_bytes


@kernel
def _choose(frame: Any, row: int) -> None:
    """Note the experts of a row, by number, and their weights: the largest of a softmax over all (Shazeer 2017)."""
    count, used = frame[EXPERTS], frame[EXPERTS_USED]
    logits = frame[ROUTED] + row * frame[ROUTER_COLUMNS] * 4
    choices, weights = frame[CHOICES] + row * used * 4, frame[CHOICE_WEIGHTS] + row * used * 4
    top = simd.load_float(logits)
    for expert in range(1, count):
        top = max(top, simd.load_float(logits + expert * 4))
    total = np.float32(0.0)
    for expert in range(count):
        power = np.float32(math.exp(simd.load_float(logits + expert * 4) - top))
        simd.store_float(logits + expert * 4, power)
        total += power
    chosen = np.float32(0.0)
    for place in range(used):
        best, largest = 0, np.float32(-1.0)
        for expert in range(count):
            power = simd.load_float(logits + expert * 4)
            if power > largest:
                best, largest = expert, power
        simd.store_float(logits + best * 4, np.float32(-1.0))  # taken
        chosen += largest
        # Experts are kept in the order of their numbers.
        at = place
        while at > 0 and np.int64(simd.load_int32(choices + (at - 1) * 4)) > best:
            simd.store_int32(choices + at * 4, simd.load_int32(choices + (at - 1) * 4))
            simd.store_float(weights + at * 4, simd.load_float(weights + (at - 1) * 4))
            at -= 1
        simd.store_int32(choices + at * 4, np.int32(best))
        simd.store_float(weights + at * 4, largest)
    scale = chosen if frame[EXPERT_NORMALIZE] else total
    for place in range(used):
        simd.store_float(weights + place * 4, np.float32(simd.load_float(weights + place * 4) / scale))


@kernel
def _assign(frame: Any) -> None:
    """Give each choice of each row a slot among those of its expert, which begin at a multiple of ROW_BLOCK."""
    count, choices = frame[EXPERTS], frame[TOKENS] * frame[EXPERTS_USED]
    starts, rows = frame[EXPERT_STARTS], frame[EXPERT_ROWS]
    for expert in range(count):
        simd.store_int64(rows + expert * 8, 0)
    for choice in range(choices):
        expert = np.int64(simd.load_int32(frame[CHOICES] + choice * 4))
        place = simd.load_int64(rows + expert * 8)
        simd.store_int32(frame[CHOICE_SLOTS] + choice * 4, np.int32(place))
        simd.store_int64(rows + expert * 8, place + 1)
    start = 0
    for expert in range(count):
        simd.store_int64(starts + expert * 8, start)
        blocks = (simd.load_int64(rows + expert * 8) + ROW_BLOCK - 1) // ROW_BLOCK
        start += blocks * ROW_BLOCK
    for choice in range(choices):
        expert = np.int64(simd.load_int32(frame[CHOICES] + choice * 4))
        slot = np.int64(simd.load_int32(frame[CHOICE_SLOTS] + choice * 4)) + simd.load_int64(starts + expert * 8)
        simd.store_int32(frame[CHOICE_SLOTS] + choice * 4, np.int32(slot))


@kernel
def _products(
    kernels: Any, frame: Any, counter: int, rank: int, ending: int, inputs: int, depth: int, weights: int,
    expert_bytes: int, pairs: int, out: int, columns: int,
) -> None:  # fmt: skip
    """A phase of the step: every expert's product with the rows in its slots."""
    scratch = frame[SCRATCH] + rank * frame[SCRATCH_BYTES]
    one_pair = pair_bytes(kernels, weights, depth)
    grain = max(1, pairs // (frame[SIZE] * 8))
    groups, mine = (pairs + grain - 1) // grain, 0
    phase = frame[COUNTERS] + counter * COUNTER_BYTES
    tasks = groups * frame[EXPERTS]
    while True:
        begin, end = sync.take_tasks(phase, tasks, frame[SIZE], rank)
        if begin == end:
            break
        mine += end - begin
        for task in range(begin, end):
            expert, first_pair = task // groups, (task % groups) * grain
            start = simd.load_int64(frame[EXPERT_STARTS] + expert * 8)
            rows = simd.load_int64(frame[EXPERT_ROWS] + expert * 8)
            for pair in range(first_pair, min(pairs, first_pair + grain)):
                source = weights + expert * expert_bytes + pair * one_pair
                if rows > ROW_BLOCK:
                    source = for_many_rows(kernels, source, depth, scratch)
                for row in range(0, rows, ROW_BLOCK):
                    here = min(ROW_BLOCK, rows - row)
                    block_product(kernels, inputs, start + row, here, depth, source, scratch, rows <= ROW_BLOCK)
                    finish(kernels, ending, scratch, start + row, here, pair, out, columns, 0)
    sync.end_phase(frame[CONTROL], phase, mine, tasks)


@kernel
def mix_experts(kernels: Any, frame: Any, weights: int, counter: int, rank: int, first: int, last: int) -> None:
    """Add the experts' part of a layer to the residual. Rows `first` to `last` are this thread's own.

    Their normalised rows are router inputs already. Uses five counters from `counter` on.
    """
    control, size, hidden, inner = frame[CONTROL], frame[SIZE], frame[HIDDEN], frame[EXPERT_INNER]
    used, epsilon = frame[EXPERTS_USED], simd.load_float(frame[EPSILON])
    product(
        kernels, frame, NO_ADAPTER, counter, rank, STORE, frame[NORMED], frame[TOKENS], hidden,
        simd.load_int64(weights + LAYER_ROUTER * 8), 0, frame[ROUTER_COLUMNS], frame[ROUTED], frame[ROUTER_COLUMNS],
    )  # fmt: skip
    for row in range(first, last):
        _choose(frame, row)
    sync.barrier(control, size)
    if rank == 0:
        _assign(frame)
    sync.barrier(control, size)
    norm = simd.load_int64(weights + LAYER_POST_NORM * 8)
    for row in range(first, last):
        source = frame[RESIDUAL] + row * hidden * 4
        for choice in range(row * used, (row + 1) * used):
            slot = np.int64(simd.load_int32(frame[CHOICE_SLOTS] + choice * 4))
            normalize(kernels, source, norm, hidden, frame[WIDTH], epsilon, frame[EXPERT_INPUTS], slot)
    sync.barrier(control, size)
    _products(
        kernels, frame, counter + 1, rank, frame[GATE_ENDING], frame[EXPERT_INPUTS], hidden,
        simd.load_int64(weights + LAYER_GATE_UP * 8), frame[EXPERT_UP_BYTES], 2 * inner // 32, frame[EXPERT_GATED],
        inner,
    )  # fmt: skip
    _products(
        kernels, frame, counter + 2, rank, STORE, frame[EXPERT_GATED], inner,
        simd.load_int64(weights + LAYER_DOWN * 8), frame[EXPERT_DOWN_BYTES], hidden // 32, frame[EXPERT_OUTPUTS],
        hidden,
    )  # fmt: skip
    shared = simd.load_int64(weights + LAYER_SHARED_GATE_UP * 8)
    if shared:
        tokens, shared_inner = frame[TOKENS], frame[SHARED_INNER]
        product(
            kernels, frame, NO_ADAPTER, counter + 3, rank, frame[GATE_ENDING], frame[NORMED], tokens, hidden, shared, 0,
            2 * shared_inner, frame[GATED], shared_inner,
        )  # fmt: skip
        product(
            kernels, frame, NO_ADAPTER, counter + 4, rank, STORE, frame[GATED], tokens, shared_inner,
            simd.load_int64(weights + LAYER_SHARED_DOWN * 8), 0, hidden, frame[BRANCH], hidden,
        )  # fmt: skip
    for row in range(first, last):
        _add_outputs(frame, row, shared != 0)
    sync.barrier(control, size)


@kernel
def _add_outputs(frame: Any, row: int, shared: bool) -> None:
    """Add the weighted outputs of a row's experts to its residual, after that of the shared one, if there is one."""
    hidden, used = frame[HIDDEN], frame[EXPERTS_USED]
    gate = np.float32(0.0)
    if shared:
        logit = simd.load_float(frame[ROUTED] + (row * frame[ROUTER_COLUMNS] + frame[EXPERTS]) * 4)
        gate = np.float32(1.0 / (1.0 + math.exp(-logit)))
    for column in range(0, hidden, 16):
        total = simd.splat(np.float32(0.0))
        if shared:
            value = simd.load_floats(frame[BRANCH] + (row * hidden + column) * 4)
            total = simd.mul(value, simd.splat(gate))
        for choice in range(row * used, (row + 1) * used):
            slot = np.int64(simd.load_int32(frame[CHOICE_SLOTS] + choice * 4))
            weight = simd.splat(simd.load_float(frame[CHOICE_WEIGHTS] + choice * 4))
            value = simd.load_floats(frame[EXPERT_OUTPUTS] + (slot * hidden + column) * 4)
            total = simd.add(total, simd.mul(value, weight))
        target = frame[RESIDUAL] + (row * hidden + column) * 4
        simd.store_floats(target, simd.add(simd.load_floats(target), total))
