"""The scale of a row of keys or values that is stored as int8 or e4m3, and how much the error of each column counts.

The least scale is the row's largest magnitude over that of the element type, rounded up to bfloat16. A key in e4m3 has
the best of sixteen: an error is as bad as queries are large there, which the weights of their norm say where they have
one. Whatever computes them finds the same scales (`kv_write/row_scales.py`, bit for bit). Called by `stored_rows.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import simd
from decoder.kernels.compiled import inlined, kernel

INT8_PEAK: Final = np.float32(127.0)
E4M3_PEAK: Final = np.float32(448.0)


@inlined
def scale_of(source: Any, head_dim: Any, peak: Any) -> Any:
    """The least scale, in all lanes, of a float32 row whose elements are at most `peak` times it."""
    most = simd.splat_ints(np.int32(0))
    for column in range(0, head_dim, 16):
        most = simd.magnitudes(simd.load_floats(source + column * 4), most)
    return simd.row_scale(most, peak)


@inlined
def fitted_scale(source: Any, head_dim: Any, rates: Any) -> Any:
    """Of the scale for e4m3 and of it times 17/16 to 31/16 that with the least squared error of the row, the first of
    equals. Errors times their columns' rates are counted in whole units of a quarter of the scale's power of two, so
    that the sum is exact."""
    least = scale_of(source, head_dim, E4M3_PEAK)
    unit = simd.misfit_unit(least)
    scale, error = least, np.float32(np.inf)
    for sixteenths in range(16):
        tried = simd.widened_scale(least, np.float32(1.0) + np.float32(sixteenths) * np.float32(0.0625))
        inverse = simd.div(simd.splat(np.float32(1.0)), tried)
        total = simd.splat(np.float32(0.0))
        for column in range(0, head_dim, 16):
            counted = simd.mul(unit, simd.load_floats(rates + column * 4))
            misfit = simd.e4m3_misfit(simd.load_floats(source + column * 4), tried, inverse, counted)
            total = simd.add(total, misfit)
        found = simd.reduce_add(total)
        scale = simd.select_less(found, error, tried, scale)
        error = min(error, found)
    return scale


@kernel
def _note_pairs(norm: int, head_dim: int, half: int, target: int) -> None:
    """For each column the larger magnitude of a norm's weights for it and for the column that it is rotated with."""
    nothing = simd.splat_ints(np.int32(0))
    for column in range(0, head_dim, 16):
        simd.store_ints(target + column * 4, simd.magnitudes(simd.load_floats(norm + column * 4), nothing))
    if half & 15:
        for column in range(half):
            low, high = target + column * 4, target + (half + column) * 4
            most = max(simd.load_int32(low), simd.load_int32(high))
            simd.store_int32(low, most)
            simd.store_int32(high, most)
        return
    for column in range(0, half, 16):
        low, high = target + column * 4, target + (half + column) * 4
        most = simd.magnitudes(simd.load_floats(low), simd.load_ints(high))
        simd.store_ints(low, most)
        simd.store_ints(high, most)


@kernel
def lay_out_rates(norm: int, head_dim: int, half: int, target: int) -> None:
    """How much the error of each column of a key counts, float32 [head_dim]: the size of queries there, by their norm's
    weights, as a power of two of at most 1. Without a norm (0) all count alike."""
    if not norm:
        for column in range(0, head_dim, 16):
            simd.store_floats(target + column * 4, simd.splat(np.float32(1.0)))
        return
    _note_pairs(norm, head_dim, half, target)
    most = simd.splat_ints(np.int32(0))
    for column in range(0, head_dim, 16):
        most = simd.magnitudes(simd.load_floats(target + column * 4), most)
    most = simd.as_ints(simd.splat(simd.reduce_max(simd.as_floats(most))))
    for column in range(0, head_dim, 16):
        simd.store_floats(target + column * 4, simd.error_rates(simd.load_ints(target + column * 4), most))
