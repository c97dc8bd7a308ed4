"""Queries, and softmax weights times the scales of values, of one row, as they are multiplied with stored bytes.

As `attention_softmax.py`, whose sums these are. A weight times its value's scale is a whole number of the row's unit,
which is so large that none is above UNSIGNED_PEAK, in digits; beside fp8 it is rounded to bfloat16. Which keys around
the row's own were computed says nothing. A tile takes each step for all rows: the shorter a row's work, the more rows
overlap. Called by `attention_bytes.py` and, for queries, `attention_forms.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import byte_dots, byte_pairs, simd
from decoder.kernels.attention_state import NOTHING
from decoder.kernels.byte_dots import DIGITS, SIGNED_PEAK, UNSIGNED_PEAK
from decoder.kernels.compiled import inlined, inlined_variant, kernel, variant
from decoder.kernels.frame import CAP_SIZE_OFFSET, SPAN
from decoder.kernels.sets import Float8Storage, storage

CONSTANTS: Final = 16  # bytes at the end of a query's digits: what their sums begin with, then the query's unit


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
def query_pairs(source: int, columns: int, target: int) -> None:
    """A float32 row rounded to bfloat16, in pairs."""
    for column in range(0, columns, 16):
        vector = byte_pairs.in_pairs(simd.load_floats(source + column * 4))
        simd.store_bf16(target + column * 2, vector)


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


@kernel
def weight_pairs(row: int, begin: int, keys: int, weights: int) -> None:
    """As `weight_digits`, weights rounded to bfloat16, in pairs."""
    for key in range(begin & ~15, keys, 16):
        vector = byte_pairs.in_pairs(simd.load_floats(row + key * 4))
        simd.store_bf16(weights + key * 2, vector)


def take_queries(kernels: Any, source: int, head_dim: int, lanes: int, target: int) -> None:
    """Take in `lanes` float32 query rows as they are multiplied."""
    raise NotImplementedError("compiled code only")


@variant(take_queries)
def _take_queries(kernels: Any, source: Any, head_dim: Any, lanes: Any, target: Any) -> Any:
    if storage(kernels) is Float8Storage:

        def pairs(kernels: Any, source: Any, head_dim: Any, lanes: Any, target: Any) -> None:
            for lane in range(lanes):
                query_pairs(source + lane * head_dim * 4, head_dim, target + lane * head_dim * 4)

        return pairs

    def digits(kernels: Any, source: Any, head_dim: Any, lanes: Any, target: Any) -> None:
        for lane in range(lanes):
            row = target + lane * head_dim * 4
            constants = row + head_dim * 4 - CONSTANTS
            unit = query_digits(source + lane * head_dim * 4, head_dim, row, constants)
            simd.store_float(constants + 12, unit)

    return digits


def query_unit_of(kernels: Any, row: int, head_dim: int) -> float:
    """What the numbers of a query are multiples of."""
    raise NotImplementedError("compiled code only")


@inlined_variant(query_unit_of)
def _query_unit_of(kernels: Any, row: Any, head_dim: Any) -> Any:
    if storage(kernels) is Float8Storage:
        return lambda kernels, row, head_dim: np.float32(1.0)
    return lambda kernels, row, head_dim: simd.load_float(row + head_dim * 4 - 4)


def lay_out_weights(kernels: Any, row: int, begin: int, keys: int, unit: float, weights: int) -> float:
    """Weights of one row as they are multiplied; returns what they are multiples of."""
    raise NotImplementedError("compiled code only")


@variant(lay_out_weights)
def _lay_out_weights_of(kernels: Any, row: Any, begin: Any, keys: Any, unit: Any, weights: Any) -> Any:
    if storage(kernels) is Float8Storage:

        def pairs(kernels: Any, row: Any, begin: Any, keys: Any, unit: Any, weights: Any) -> Any:
            weight_pairs(row, begin, keys, weights)
            return np.float32(1.0)

        return pairs

    def digits(kernels: Any, row: Any, begin: Any, keys: Any, unit: Any, weights: Any) -> Any:
        weight_digits(row, begin, keys, unit, weights, SPAN)
        return unit

    return digits
