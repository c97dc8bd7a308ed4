"""The product of some rows with one pair of column blocks, per kernel set.

Weights are packed by column blocks of sixteen (`decoder/models/packing.py`), inputs as `rows.store_input` lays them.
The sums of a row are added in the order of k whatever the number of rows, so a row's result never depends on what
shares the step. Called by `linear.py` alone, which gives it room for (ROW_BLOCK + 16) * 128 bytes of sums.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np

from decoder.kernels import amx, simd
from decoder.kernels.compiled import kernel, variant
from decoder.kernels.sets import float32_weights, split_inputs, uses_tiles


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
def _bfloat16_one_row(a: int, depth: int, w: int, c: int) -> None:
    # Even and odd k are summed apart: four sums that need not wait for each other.
    zero = simd.splat(np.float32(0.0))
    e0, o0, e1, o1 = zero, zero, zero, zero
    w1 = w + depth * 32
    for pair in range(depth >> 1):
        v0, v1 = simd.load_ints(w + pair * 64), simd.load_ints(w1 + pair * 64)
        x, y = simd.splat(simd.load_float(a + pair * 8)), simd.splat(simd.load_float(a + pair * 8 + 4))
        e0, o0 = simd.fma(x, simd.low_halves(v0), e0), simd.fma(y, simd.high_halves(v0), o0)
        e1, o1 = simd.fma(x, simd.low_halves(v1), e1), simd.fma(y, simd.high_halves(v1), o1)
    simd.store_floats(c, simd.add(e0, o0))
    simd.store_floats(c + 64, simd.add(e1, o1))


@kernel
def _bfloat16_four_rows(a: int, stride: int, depth: int, w: int, c: int) -> None:
    zero = simd.splat(np.float32(0.0))
    e00, o00, e01, o01, e10, o10, e11, o11 = zero, zero, zero, zero, zero, zero, zero, zero
    e20, o20, e21, o21, e30, o30, e31, o31 = zero, zero, zero, zero, zero, zero, zero, zero
    w1 = w + depth * 32
    for pair in range(depth >> 1):
        words, other = simd.load_ints(w + pair * 64), simd.load_ints(w1 + pair * 64)
        low0, high0, low1, high1 = (
            simd.low_halves(words), simd.high_halves(words), simd.low_halves(other), simd.high_halves(other),
        )  # fmt: skip
        r = a + pair * 8
        x, y = simd.splat(simd.load_float(r)), simd.splat(simd.load_float(r + 4))
        e00, o00 = simd.fma(x, low0, e00), simd.fma(y, high0, o00)
        e01, o01 = simd.fma(x, low1, e01), simd.fma(y, high1, o01)
        x, y = simd.splat(simd.load_float(r + stride)), simd.splat(simd.load_float(r + stride + 4))
        e10, o10 = simd.fma(x, low0, e10), simd.fma(y, high0, o10)
        e11, o11 = simd.fma(x, low1, e11), simd.fma(y, high1, o11)
        x, y = simd.splat(simd.load_float(r + 2 * stride)), simd.splat(simd.load_float(r + 2 * stride + 4))
        e20, o20 = simd.fma(x, low0, e20), simd.fma(y, high0, o20)
        e21, o21 = simd.fma(x, low1, e21), simd.fma(y, high1, o21)
        x, y = simd.splat(simd.load_float(r + 3 * stride)), simd.splat(simd.load_float(r + 3 * stride + 4))
        e30, o30 = simd.fma(x, low0, e30), simd.fma(y, high0, o30)
        e31, o31 = simd.fma(x, low1, e31), simd.fma(y, high1, o31)
    simd.store_floats(c, simd.add(e00, o00))
    simd.store_floats(c + 64, simd.add(e01, o01))
    simd.store_floats(c + 128, simd.add(e10, o10))
    simd.store_floats(c + 192, simd.add(e11, o11))
    simd.store_floats(c + 256, simd.add(e20, o20))
    simd.store_floats(c + 320, simd.add(e21, o21))
    simd.store_floats(c + 384, simd.add(e30, o30))
    simd.store_floats(c + 448, simd.add(e31, o31))


@variant(block_product)
def _block_product(
    kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
) -> Any:
    if float32_weights(kernels):

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
    if not uses_tiles(kernels):

        def bfloat16(
            kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
        ) -> None:
            a = inputs + row * depth * 4
            if rows == 1:
                _bfloat16_one_row(a, depth, weights, sums)
                return
            for part in range(0, rows, 4):
                _bfloat16_four_rows(a + part * depth * 4, depth * 4, depth, weights, sums + part * 128)

        return bfloat16
    if split_inputs(kernels):

        def parts(
            kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
        ) -> None:
            # The two parts of sixteen rows are two row tiles: their sums lie one after the other, and are added last.
            steps = depth >> 5
            wide = steps * 1024
            for part in range(0, rows, 16):
                a, out = inputs + ((row + part) >> 4) * 2 * wide, sums + part * 128
                if once and part == 0:
                    amx.product_2x2_streaming(a, 64, 2048, 1024, weights, 1024, wide, steps, out, 128, 2048, 64)
                else:
                    amx.product_2x2(a, 64, 2048, 1024, weights, 1024, wide, steps, out, 128, 2048, 64)
                for offset in range(0, min(16, rows - part) * 128, 64):
                    low = simd.load_floats(out + 2048 + offset)
                    simd.store_floats(out + offset, simd.add(simd.load_floats(out + offset), low))

        return parts

    def tiles(kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any) -> None:
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
