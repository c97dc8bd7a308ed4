"""Matrix products with packed weights: one block product per kernel set, one task loop, five endings.

Weights are packed by column blocks of sixteen (`decoder/models/packing.py`); `block_products.py` multiplies. A row's
result never depends on what shares the step.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

from decoder.kernels import simd, sync
from decoder.kernels.adapters import lower, raise_sums
from decoder.kernels.block_products import block_product, for_many_rows
from decoder.kernels.compiled import kernel, variant
from decoder.kernels.frame import (
    ADAPTERS,
    CAP_SIZE_OFFSET,
    CONTROL,
    COUNTER_BYTES,
    COUNTERS,
    LOGIT_CAP,
    NO_ADAPTER,
    ROW_BLOCK,
    SCRATCH,
    SCRATCH_BYTES,
    SIZE,
)
from decoder.kernels.rows import gelu_multiply, pair_bytes, silu_multiply, store_input
from decoder.kernels.sets import grouped_weights, uses_tiles

STORE: Final = 0  # out[row] = sums
ADD: Final = 1  # out[row] += sums
GATE: Final = 2  # next input[row] = silu(even column block) * odd column block
GATE_GELU: Final = 3  # the same with the tanh approximation of GELU
CAPPED: Final = 4  # out[row] = soft cap of sums

_GROUP_BYTES: Final = 200 << 10  # of weights, that stay in the second-level cache beside a panel's inputs
_TASKS: Final = 16  # for each thread, at least: the last one that runs keeps the others waiting


@kernel
def finish(
    kernels: Any, ending: int, sums: int, row: int, rows: int, pair: int, out: int, columns: int, cap: int
) -> None:
    """Write the sums [rows, 32] of a block product to their place, by one of the endings."""
    for index in range(rows):
        source = sums + index * 128
        first, second = simd.load_floats(source), simd.load_floats(source + 64)
        if ending == GATE:
            store_input(kernels, out, row + index, pair * 16, columns, silu_multiply(first, second))
            continue
        if ending == GATE_GELU:
            store_input(kernels, out, row + index, pair * 16, columns, gelu_multiply(first, second))
            continue
        target = out + ((row + index) * columns + pair * 32) * 4
        if ending == ADD:
            first = simd.add(first, simd.load_floats(target))
            second = simd.add(second, simd.load_floats(target + 64))
        elif ending == CAPPED:
            rate, size = simd.splat(simd.load_float(cap)), simd.splat(simd.load_float(cap + CAP_SIZE_OFFSET))
            first, second = simd.soft_cap(first, rate, size), simd.soft_cap(second, rate, size)
        simd.store_floats(target, first)
        simd.store_floats(target + 64, second)


@kernel
def add_bias(sums: int, rows: int, bias: int) -> None:
    """Add 32 numbers at `bias` to each of the sums [rows, 32] of a block product."""
    first, second = simd.load_floats(bias), simd.load_floats(bias + 64)
    for index in range(rows):
        target = sums + index * 128
        simd.store_floats(target, simd.add(simd.load_floats(target), first))
        simd.store_floats(target + 64, simd.add(simd.load_floats(target + 64), second))


def blocking(kernels: Any) -> Any:
    """(rows of a panel of inputs, most pairs of column blocks that pass it together)."""
    raise NotImplementedError("compiled code only")


@variant(blocking)
def _blocking(kernels: Any) -> Any:
    # Panel and group lie in the second-level cache together, so that neither comes anew for each part of the other.
    # Tiles multiply so fast that weights must come once for as many rows as may be.
    rows, pairs = (512, 1) if uses_tiles(kernels) else (128, 4)
    if grouped_weights(kernels):
        pairs = 1  # it is widened, and lies behind the sums while a panel of rows passes
    return lambda kernels: (rows, pairs)


@kernel
def _pairs_together(rows: int, panels: int, pairs: int, most: int, pair_bytes: int, size: int) -> int:
    """Pairs of column blocks of one task."""
    if rows <= ROW_BLOCK:
        return max(1, pairs // (size * 32))
    group = max(1, min(most, _GROUP_BYTES // pair_bytes))
    while group > 1 and panels * ((pairs + group - 1) // group) < _TASKS * size:
        group >>= 1
    return group


@kernel
def linear(
    kernels: Any, frame: Any, adapted: int, counter: int, rank: int, size: int, scratch: int, ending: int, inputs: int,
    rows: int, depth: int, weights: int, bias: int, pairs: int, weight_pair_bytes: int, out: int, columns: int,
    cap: int,
) -> None:  # fmt: skip
    """A phase of the step: `inputs [rows, depth] @ weights` with `pairs` pairs of column blocks.

    Tasks are taken from the phase's counter. `columns` is the row length of `out`; `cap` is read by CAPPED alone. A
    `bias`, float32 in the order of the weights' columns, is added before the ending; 0 is none.
    `adapted` is the entry of the product in an adapter's table where rows of the step may have one, else NO_ADAPTER.
    """
    panel, most = blocking(kernels)
    panels = (rows + panel - 1) // panel
    grain = _pairs_together(rows, panels, pairs, most, weight_pair_bytes, size)
    groups, mine = (pairs + grain - 1) // grain, 0
    while True:
        begin, end = sync.take_tasks(counter, panels * groups, size, rank)
        if begin == end:
            break
        mine += end - begin
        for task in range(begin, end):
            first_row = (task // groups) * panel
            last_row = min(rows, first_row + panel)
            first_pair = (task % groups) * grain
            start = weights + first_pair * weight_pair_bytes
            if last_row - first_row > ROW_BLOCK:
                start = for_many_rows(kernels, start, depth, scratch)
            for row in range(first_row, last_row, ROW_BLOCK):
                for pair in range(first_pair, min(pairs, first_pair + grain)):
                    source = start + (pair - first_pair) * weight_pair_bytes
                    here = min(ROW_BLOCK, last_row - row)
                    block_product(kernels, inputs, row, here, depth, source, scratch, rows <= ROW_BLOCK)
                    if adapted != NO_ADAPTER:
                        raise_sums(frame, adapted, scratch, row, here, pair)
                    if bias:
                        add_bias(scratch, here, bias + pair * 128)
                    finish(kernels, ending, scratch, row, here, pair, out, columns, cap)
    sync.end_phase(frame[CONTROL], counter, mine, panels * groups)


@kernel
def product(
    kernels: Any, frame: Any, entry: int, counter: int, rank: int, ending: int, inputs: int, rows: int, depth: int,
    weights: int, bias: int, columns: int, out: int, out_columns: int,
) -> None:  # fmt: skip
    """`linear` with the frame's scratch memory. `entry` is that in an adapter's table."""
    adapted = entry if frame[ADAPTERS] else NO_ADAPTER
    if adapted != NO_ADAPTER:
        lower(kernels, frame, adapted, rank, inputs, rows, depth)
    scratch = frame[SCRATCH] + rank * frame[SCRATCH_BYTES]
    linear(
        kernels, frame, adapted, frame[COUNTERS] + counter * COUNTER_BYTES, rank, frame[SIZE], scratch, ending, inputs,
        rows, depth, weights, bias, columns // 32, pair_bytes(kernels, weights, depth), out, out_columns,
        frame[LOGIT_CAP],
    )  # fmt: skip
