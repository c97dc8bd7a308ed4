"""From scores of one query row to softmax weights as pairs of bfloat16, and their sum: attention by dot products.

Weights are rounded before they are summed, by a dot product with ones: so the weights that values are multiplied with
add up to the sum that they are divided by, and what all keys agree on comes out as it is. A sum over keys is kept in
sixteen parts, by pairs of keys, modulo 32 keys, and these are added last: so it does not depend on which keys around
the row's own were computed. A tile takes all rows' maxima first: the shorter a row's work, the more rows overlap.
Called by `attention_dots.py` alone.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import llvmlite.binding as llvm
import numpy as np

from decoder.kernels import dots, simd
from decoder.kernels.attention_state import NOTHING
from decoder.kernels.compiled import inlined, kernel

_HAS_SHORT: Final = bool(llvm.get_host_cpu_features().get("avx512dq", False))
_power: Final = simd.exp2_short if _HAS_SHORT else simd.exp2


@inlined
def _kept(vector: Any, key: Any, floor: Any, bound: Any, fill: Any) -> Any:
    return simd.from_lane(simd.below_lane(vector, bound - key, fill), floor - key, fill)


@kernel
def row_maximum(row: int, begin: int, keys: int, floor: int, bound: int) -> Any:
    """The largest score of one query row's keys, `floor` to `bound`; those of `begin` to `keys` are at `row`."""
    top, other_top = simd.splat(NOTHING), simd.splat(NOTHING)
    for key in range(begin & ~31, keys, 32):
        low, high = simd.load_floats(row + key * 4), simd.load_floats(row + key * 4 + 64)
        if key + 32 > bound or key < floor:
            low = _kept(low, key, floor, bound, NOTHING)
            high = _kept(high, key + 16, floor, bound, NOTHING)
        top, other_top = simd.maximum(low, top), simd.maximum(high, other_top)
    return simd.reduce_max(simd.maximum(top, other_top))


@kernel
def row_weights(
    row: int, begin: int, keys: int, floor: int, bound: int, scale: float, maximum: float, weights: int
) -> Any:
    """Weights of one query row at `weights`, bfloat16 [key]; returns their sum. `maximum` is that of scaled scores.

    Weights of other keys than the row's are zero, from the multiple of 32 before `begin` to that after `keys`; scores
    there may be anything.
    """
    zero = np.float32(0.0)
    factor, shift = simd.splat(np.float32(scale)), simd.splat(np.float32(-maximum))
    sums, ones = simd.splat(zero), simd.splat_ints(np.int32(dots.ONES))
    for key in range(begin & ~31, keys, 32):
        low = _power(simd.fma(simd.load_floats(row + key * 4), factor, shift))
        high = _power(simd.fma(simd.load_floats(row + key * 4 + 64), factor, shift))
        if key + 32 > bound or key < floor:
            low, high = _kept(low, key, floor, bound, zero), _kept(high, key + 16, floor, bound, zero)
        pairs = dots.round_pairs(low, high)
        simd.store_ints(weights + key * 2, pairs)
        sums = dots.dot(pairs, ones, sums)
    return simd.reduce_add(sums)
