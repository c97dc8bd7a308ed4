"""From scores of one query row to softmax weights as digits of whole numbers, with the scales of values in them.

As `attention_softmax.py`, whose sums these are. A weight times its value's scale is a whole number of the row's unit,
which is so large that none is above UNSIGNED_PEAK. Which keys around the row's own were computed says nothing. A tile
takes each step for all rows: the shorter a row's work, the more rows overlap.
Called by `attention_bytes.py` alone.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np

from decoder.kernels import byte_dots, simd
from decoder.kernels.attention_state import NOTHING
from decoder.kernels.byte_dots import DIGITS, SIGNED_PEAK, UNSIGNED_PEAK
from decoder.kernels.compiled import inlined, kernel
from decoder.kernels.frame import CAP_SIZE_OFFSET


@inlined
def _kept(vector: Any, key: Any, floor: Any, bound: Any, fill: Any) -> Any:
    return simd.from_lane(simd.below_lane(vector, bound - key, fill), floor - key, fill)


@kernel
def query_digits(source: int, columns: int, target: int, first: int) -> float:
    """Digits [digit, columns] of a float32 row, and at `first` -128 times the sum of each's; returns the row's unit.

    The unit is NaN where a number is not finite.
    """
    most = simd.splat_ints(np.int32(0))
    for column in range(0, columns, 16):
        most = simd.magnitudes(simd.load_floats(source + column * 4), most)
    unit = simd.row_scale(most, SIGNED_PEAK)
    inverse = simd.div(simd.splat(np.float32(1.0)), unit)
    for digit in range(DIGITS):
        simd.store_int32(first + digit * 4, np.int32(0))
    for column in range(0, columns, 16):
        number = byte_dots.round_ints(simd.mul(simd.load_floats(source + column * 4), inverse))
        for digit in range(DIGITS):
            rest = byte_dots.signed_rest(number)
            byte_dots.store_bytes(target + digit * columns + column, number)
            lowest = simd.fma(simd.splat(np.float32(-256.0)), byte_dots.to_floats(rest), byte_dots.to_floats(number))
            total = np.int32(simd.reduce_add(lowest))
            simd.store_int32(first + digit * 4, np.int32(simd.load_int32(first + digit * 4) - total * 128))
            number = rest
    return simd.reduce_max(unit)


@kernel
def scale_scores(
    row: int, begin: int, keys: int, floor: int, bound: int, scales: int, unit: float, cap: int
) -> Any:  # fmt: skip
    """Multiply scores of `begin` to `keys`, whole vectors, by the keys' scales and the query's unit, and cap them where
    `cap` is not 0; returns the largest of those of `floor` <= key < `bound`, which are the row's."""
    factor, top, rate, size = simd.splat(unit), simd.splat(NOTHING), simd.splat(NOTHING), simd.splat(NOTHING)
    if cap:
        rate, size = simd.splat(simd.load_float(cap)), simd.splat(simd.load_float(cap + CAP_SIZE_OFFSET))
    for key in range(begin & ~15, keys, 16):
        vector = simd.mul(simd.mul(simd.load_floats(row + key * 4), factor), simd.load_floats(scales + key * 4))
        if cap:
            vector = simd.soft_cap(vector, rate, size)
        simd.store_floats(row + key * 4, vector)
        if key + 16 > bound or key < floor:
            vector = _kept(vector, key, floor, bound, NOTHING)
        top = simd.maximum(vector, top)
    return simd.reduce_max(top)


@kernel
def scaled_weights(
    row: int, begin: int, keys: int, floor: int, bound: int, scale: float, maximum: float, scales: int, total: int
) -> Any:  # fmt: skip
    """In place of scores the row's softmax weights times the scales of values, and zero for keys that are not the
    row's; writes the sum of the weights by themselves and returns the unit, NaN where a scale is.

    `maximum` is that of scaled scores.
    """
    zero = np.float32(0.0)
    factor, shift = simd.splat(np.float32(scale)), simd.splat(np.float32(-maximum))
    sums, most = simd.splat(zero), simd.splat_ints(np.int32(0))
    for key in range(begin & ~15, keys, 16):
        vector = simd.exp2(simd.fma(simd.load_floats(row + key * 4), factor, shift))
        scaled = simd.mul(vector, simd.load_floats(scales + key * 4))
        if key + 16 > bound or key < floor:
            vector, scaled = _kept(vector, key, floor, bound, zero), _kept(scaled, key, floor, bound, zero)
        sums = simd.add(sums, vector)
        most = simd.magnitudes(scaled, most)
        simd.store_floats(row + key * 4, scaled)
    simd.store_float(total, simd.reduce_add(sums))
    return simd.reduce_max(simd.row_scale(most, UNSIGNED_PEAK))


@kernel
def weight_digits(row: int, begin: int, keys: int, unit: float, weights: int, digit_bytes: int) -> None:
    """Digits [digit, key] of weights of `begin` to `keys`, whole vectors, `digit_bytes` apart."""
    inverse = simd.div(simd.splat(np.float32(1.0)), simd.splat(unit))
    for key in range(begin & ~15, keys, 16):
        number = byte_dots.round_ints(simd.mul(simd.load_floats(row + key * 4), inverse))
        for digit in range(DIGITS):
            byte_dots.store_bytes(weights + digit * digit_bytes + key, number)
            number = byte_dots.unsigned_rest(number)
