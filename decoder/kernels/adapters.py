"""LoRA in the compiled step (Hu et al. 2021): rows with an adapter add B (A x) to the sums of a product, in float32.

`lower` computes A x of every such row before the product; the product's tasks add B to their own sums before the
ending, so that activations and residuals see the whole. The adapters of a step may differ from row to row; a row reads
its own inputs and its own adapter alone, in one order, whatever shares the step.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np

from decoder.kernels import simd, sync
from decoder.kernels.compiled import kernel
from decoder.kernels.frame import (
    ADAPTED_PRODUCTS,
    ADAPTER_DOWN,
    ADAPTER_RANKS,
    ADAPTER_UP,
    ADAPTER_WORDS,
    ADAPTERS,
    CONTROL,
    LOWERED,
    LOWERED_BYTES,
    SIZE,
)
from decoder.kernels.rows import load_input


@kernel
def entry_of(layer: int, product: int) -> int:
    """Where an adapter's table describes a product, in bytes from its beginning."""
    return (layer * ADAPTED_PRODUCTS + product) * ADAPTER_WORDS * 8


@kernel
def _lower_four(kernels: Any, inputs: int, row: int, depth: int, down: int, target: int) -> None:
    first, second = simd.splat(np.float32(0.0)), simd.splat(np.float32(0.0))
    third, fourth = simd.splat(np.float32(0.0)), simd.splat(np.float32(0.0))
    for column in range(0, depth, 16):
        value = load_input(kernels, inputs, row, column, depth)
        at = down + column * 4
        first = simd.fma(value, simd.load_floats(at), first)
        second = simd.fma(value, simd.load_floats(at + depth * 4), second)
        third = simd.fma(value, simd.load_floats(at + depth * 8), third)
        fourth = simd.fma(value, simd.load_floats(at + depth * 12), fourth)
    simd.store_float(target, simd.reduce_add(first))
    simd.store_float(target + 4, simd.reduce_add(second))
    simd.store_float(target + 8, simd.reduce_add(third))
    simd.store_float(target + 12, simd.reduce_add(fourth))


@kernel
def lower(kernels: Any, frame: Any, entry: int, rank: int, inputs: int, rows: int, depth: int) -> None:
    """A x of every row [depth] of `inputs` that has an adapter with this entry, and a barrier. All threads call it.

    Threads share the rows where there are enough of them, else the rows of A.
    """
    size = frame[SIZE]
    by_row = rows >= size
    first, last = (rows * rank // size, rows * (rank + 1) // size) if by_row else (0, rows)
    start, step = (0, 4) if by_row else (rank * 4, size * 4)
    for row in range(first, last):
        table = simd.load_int64(frame[ADAPTERS] + row * 8)
        if table == 0:
            continue
        ranks = simd.load_int64(table + entry + ADAPTER_RANKS * 8)
        down = simd.load_int64(table + entry + ADAPTER_DOWN * 8)
        target = frame[LOWERED] + row * frame[LOWERED_BYTES]
        for index in range(start, ranks, step):
            _lower_four(kernels, inputs, row, depth, down + index * depth * 4, target + index * 4)
    sync.barrier(frame[CONTROL], size)


@kernel
def raise_sums(frame: Any, entry: int, sums: int, row: int, rows: int, pair: int) -> None:
    """Add B (A x) to the sums [rows, 32] of pair `pair` of a product, for the rows that have an adapter there."""
    for index in range(rows):
        table = simd.load_int64(frame[ADAPTERS] + (row + index) * 8)
        if table == 0:
            continue
        ranks = simd.load_int64(table + entry + ADAPTER_RANKS * 8)
        if ranks == 0:
            continue
        up = simd.load_int64(table + entry + ADAPTER_UP * 8) + pair * ranks * 128
        lowered = frame[LOWERED] + (row + index) * frame[LOWERED_BYTES]
        first, second = simd.splat(np.float32(0.0)), simd.splat(np.float32(0.0))
        for place in range(ranks):
            value = simd.splat(simd.load_float(lowered + place * 4))
            first = simd.fma(value, simd.load_floats(up + place * 128), first)
            second = simd.fma(value, simd.load_floats(up + place * 128 + 64), second)
        target = sums + index * 128
        simd.store_floats(target, simd.add(simd.load_floats(target), first))
        simd.store_floats(target + 64, simd.add(simd.load_floats(target + 64), second))
