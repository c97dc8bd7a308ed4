"""Matrix products with packed weights: one block product per kernel set, one task loop, three endings.

Weights are packed by column blocks of sixteen (`decoder/models/packing.py`). The sums of a row are added in the order
of k whatever the number of rows, so a row's result never depends on what shares the step.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import amx, simd, sync
from decoder.kernels.compiled import kernel, variant
from decoder.kernels.frame import ROW_BLOCK, AmxKernels
from decoder.kernels.rows import activation, is_float32, silu_multiply, store_values

STORE: Final = 0  # out[row] = sums
ADD: Final = 1  # out[row] += sums
GATE: Final = 2  # next input[row] = silu(even column block) * odd column block

_PANEL_ROWS: Final = 512  # rows whose inputs stay in the second-level cache while the weights stream past


def is_amx(kernels: Any) -> bool:
    """Whether a numba type is that of the AMX kernels."""
    return getattr(kernels, "instance_class", None) is AmxKernels


def block_product(
    kernels: Any, inputs: int, row: int, rows: int, depth: int, weights: int, sums: int, once: bool
) -> None:
    """`rows` rows (at most 32) from `row` (a multiple of 32) by one pair of column blocks, into sums [32, 32].

    `once` says that no other rows follow, so that the weights stream from memory.
    """
    raise NotImplementedError("compiled code only")


@kernel
def _float32_one_row(a: int, depth: int, w: int, c: int) -> None:
    c0 = simd.splat(np.float32(0.0))
    c1 = simd.splat(np.float32(0.0))
    w1 = w + depth * 64
    for k in range(depth):
        x = simd.splat(simd.load_float(a + k * 4))
        c0 = simd.fma(x, simd.load_floats(w + k * 64), c0)
        c1 = simd.fma(x, simd.load_floats(w1 + k * 64), c1)
    simd.store_floats(c, c0)
    simd.store_floats(c + 64, c1)


@kernel
def _float32_four_rows(a: int, stride: int, depth: int, w: int, c: int) -> None:
    zero = simd.splat(np.float32(0.0))
    c00, c01, c10, c11, c20, c21, c30, c31 = zero, zero, zero, zero, zero, zero, zero, zero
    w1 = w + depth * 64
    for k in range(depth):
        v0, v1 = simd.load_floats(w + k * 64), simd.load_floats(w1 + k * 64)
        x = simd.splat(simd.load_float(a + k * 4))
        c00, c01 = simd.fma(x, v0, c00), simd.fma(x, v1, c01)
        x = simd.splat(simd.load_float(a + stride + k * 4))
        c10, c11 = simd.fma(x, v0, c10), simd.fma(x, v1, c11)
        x = simd.splat(simd.load_float(a + 2 * stride + k * 4))
        c20, c21 = simd.fma(x, v0, c20), simd.fma(x, v1, c21)
        x = simd.splat(simd.load_float(a + 3 * stride + k * 4))
        c30, c31 = simd.fma(x, v0, c30), simd.fma(x, v1, c31)
    simd.store_floats(c, c00)
    simd.store_floats(c + 64, c01)
    simd.store_floats(c + 128, c10)
    simd.store_floats(c + 192, c11)
    simd.store_floats(c + 256, c20)
    simd.store_floats(c + 320, c21)
    simd.store_floats(c + 384, c30)
    simd.store_floats(c + 448, c31)


@kernel
def _bfloat16_row_pair(a: int, tiles: int, w: int, c: int) -> None:
    # Two rows of one tile column; even and odd k are summed apart, as the AMX and dot-product units pair them.
    zero = simd.splat(np.float32(0.0))
    e0, o0, e1, o1 = zero, zero, zero, zero
    for tile in range(tiles):
        for pair in range(16):
            words = simd.load_ints(w + tile * 1024 + pair * 64)
            low, high = simd.low_halves(words), simd.high_halves(words)
            x = a + tile * 1024 + pair * 4
            e0 = simd.fma(simd.splat_bf16(x), low, e0)
            o0 = simd.fma(simd.splat_bf16(x + 2), high, o0)
            e1 = simd.fma(simd.splat_bf16(x + 64), low, e1)
            o1 = simd.fma(simd.splat_bf16(x + 66), high, o1)
    simd.store_floats(c, simd.add(e0, o0))
    simd.store_floats(c + 128, simd.add(e1, o1))


@variant(block_product)
def _block_product(
    kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
) -> Any:
    if is_float32(kernels):

        def float32(
            kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
        ) -> None:
            a = inputs + row * depth * 4
            if rows == 1:
                _float32_one_row(a, depth, weights, sums)
                return
            for part in range(0, rows, 4):
                _float32_four_rows(a + part * depth * 4, depth * 4, depth, weights, sums + part * 128)

        return float32
    if is_amx(kernels):

        def tiles(
            kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
        ) -> None:
            steps = depth >> 5
            wide = steps * 1024
            a = inputs + (row >> 4) * wide
            if rows <= 16:
                amx.product_1x2_streaming(a, 64, 1024, wide, weights, 1024, wide, steps, sums, 128, 2048, 64)
            elif once:
                amx.product_2x2_streaming(a, 64, 1024, wide, weights, 1024, wide, steps, sums, 128, 2048, 64)
            else:
                amx.product_2x2(a, 64, 1024, wide, weights, 1024, wide, steps, sums, 128, 2048, 64)

        return tiles

    def bfloat16(
        kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
    ) -> None:
        steps = depth >> 5
        for part in range(0, rows, 2):
            a = inputs + ((row + part) >> 4) * steps * 1024 + (part & 15) * 64
            _bfloat16_row_pair(a, steps, weights, sums + part * 128)
            _bfloat16_row_pair(a, steps, weights + steps * 1024, sums + part * 128 + 64)

    return bfloat16


@kernel
def _finish(kernels: Any, ending: int, sums: int, row: int, rows: int, pair: int, out: int, columns: int) -> None:
    for index in range(rows):
        source = sums + index * 128
        first, second = simd.load_floats(source), simd.load_floats(source + 64)
        if ending == GATE:
            target = activation(kernels, out, row + index, pair * 16, columns)
            store_values(kernels, target, silu_multiply(first, second))
            continue
        target = out + ((row + index) * columns + pair * 32) * 4
        if ending == ADD:
            first = simd.add(first, simd.load_floats(target))
            second = simd.add(second, simd.load_floats(target + 64))
        simd.store_floats(target, first)
        simd.store_floats(target + 64, second)


@kernel
def linear(
    kernels: Any, counter: int, size: int, scratch: int, ending: int, inputs: int, rows: int, depth: int,
    weights: int, pairs: int, weight_pair_bytes: int, out: int, columns: int,
) -> None:  # fmt: skip
    """This thread's share of `inputs [rows, depth] @ weights` with `pairs` pairs of column blocks.

    Tasks are taken from the shared counter. `columns` is the row length of `out`.
    """
    panels = (rows + _PANEL_ROWS - 1) // _PANEL_ROWS
    grain = max(1, pairs // (size * 32))
    groups = (pairs + grain - 1) // grain
    while True:
        task = sync.fetch_add_int64(counter, 1)
        if task >= panels * groups:
            return
        first_row = (task // groups) * _PANEL_ROWS
        last_row = min(rows, first_row + _PANEL_ROWS)
        first_pair = (task % groups) * grain
        for pair in range(first_pair, min(pairs, first_pair + grain)):
            for row in range(first_row, last_row, ROW_BLOCK):
                here = min(ROW_BLOCK, last_row - row)
                block_product(
                    kernels, inputs, row, here, depth, weights + pair * weight_pair_bytes, scratch, rows <= ROW_BLOCK
                )
                _finish(kernels, ending, scratch, row, here, pair, out, columns)
