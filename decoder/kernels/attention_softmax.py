"""From scores of one query row, whole vectors of keys, to softmax weights: scales, soft cap, mask, powers of two.

A sum over keys is kept in sixteen parts, by key modulo sixteen, and these are added last, in a fixed order: so it does
not depend on which keys around the row's own were computed. Called by `attention_rows.py` alone.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np

from decoder.kernels import simd
from decoder.kernels.attention_state import NOTHING
from decoder.kernels.compiled import kernel, variant
from decoder.kernels.frame import CAP_SIZE_OFFSET
from decoder.kernels.sets import quantized


@kernel
def cap_row(row: int, begin: int, keys: int, cap: int) -> None:
    """Replace scores by their soft caps, scaled for powers of two (Gemma 2, 2024, section 2)."""
    rate, size = simd.splat(simd.load_float(cap)), simd.splat(simd.load_float(cap + CAP_SIZE_OFFSET))
    for offset in range((begin & ~15) * 4, keys * 4, 64):
        simd.store_floats(row + offset, simd.soft_cap(simd.load_floats(row + offset), rate, size))


def multiply_row(kernels: Any, row: int, begin: int, keys: int, scales: int) -> None:
    """Multiply `begin` to `keys` of a row, whole vectors, by the scales beside them, if there are any."""
    raise NotImplementedError("compiled code only")


@variant(multiply_row)
def _multiply_row(kernels: Any, row: Any, begin: Any, keys: Any, scales: Any) -> Any:
    if not quantized(kernels):
        return lambda kernels, row, begin, keys, scales: None

    def multiply(kernels: Any, row: Any, begin: Any, keys: Any, scales: Any) -> None:
        for offset in range((begin & ~15) * 4, keys * 4, 64):
            vector = simd.mul(simd.load_floats(row + offset), simd.load_floats(scales + offset))
            simd.store_floats(row + offset, vector)

    return multiply


@kernel
def softmax(row: int, begin: int, keys: int, floor: int, bound: int, scale: float, maximum: int, total: int) -> None:
    """Weights of one query row in place of its scores; writes their maximum, base 2, and their sum.

    Scores of `begin` to `keys` are there, in whole vectors; the row uses those of `floor` <= key < `bound`.
    """
    nothing, zero = NOTHING, np.float32(0.0)
    top = simd.splat(nothing)
    for key in range(begin & ~15, keys, 16):
        vector = simd.load_floats(row + key * 4)
        if key + 16 > bound or key < floor:
            vector = simd.from_lane(simd.below_lane(vector, bound - key, nothing), floor - key, nothing)
        top = simd.maximum(vector, top)
    highest = np.float32(simd.reduce_max(top) * np.float32(scale))
    factor, shift = simd.splat(np.float32(scale)), simd.splat(np.float32(-highest))
    sums = simd.splat(zero)
    for key in range(begin & ~15, keys, 16):
        vector = simd.exp2(simd.fma(simd.load_floats(row + key * 4), factor, shift))
        if key + 16 > bound or key < floor:
            vector = simd.from_lane(simd.below_lane(vector, bound - key, zero), floor - key, zero)
        sums = simd.add(sums, vector)
        simd.store_floats(row + key * 4, vector)
    simd.store_float(maximum, highest)
    simd.store_float(total, simd.reduce_add(sums))
