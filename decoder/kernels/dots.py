"""Dot products of pairs of bfloat16, and the rounding of float32 to pairs: one instruction each where the CPU has it.

Other CPUs take two float32 products, one after the other, and round in whole numbers: slower, so that no set is chosen
for it there, but it can be tried anywhere. A pair is an int32 lane, its first element in the lower half. Called by
`row_tiles.py` and by attention.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import llvmlite.binding as llvm
from llvmlite import ir

from decoder.kernels import simd
from decoder.kernels.simd import FLOATS, INTS, LANES

HAS_DOTS: Final = bool(llvm.get_host_cpu_features().get("avx512bf16", False))
"""Whether the CPU has the instructions."""

ONES: Final = 0x3F803F80
"""A pair of ones."""

_VI16, _VI32 = ir.VectorType(ir.IntType(16), 2 * LANES), ir.VectorType(ir.IntType(32), LANES)
_VF32 = ir.VectorType(ir.FloatType(), LANES)


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_Bfloat16(), 2 * LANES)


def emit_half(builder: Any, words: Any, upper: bool) -> Any:
    """The bfloat16 in one half of each int32 lane, as float32."""
    if upper:
        return builder.bitcast(builder.and_(words, ir.Constant(_VI32, [0xFFFF0000] * LANES)), _VF32)
    return builder.bitcast(builder.shl(words, ir.Constant(_VI32, [16] * LANES)), _VF32)


def emit_dot(builder: Any, value: Any, words: Any, total: Any) -> Any:
    """`total` plus the products of pairs: bfloat16 in the halves of `value` and `words`, int32 lanes."""
    if HAS_DOTS:
        operands = [total, builder.bitcast(value, _PAIRS), builder.bitcast(words, _PAIRS)]
        return simd._call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VF32, operands)
    for upper in (False, True):
        operands = [emit_half(builder, value, upper), emit_half(builder, words, upper), total]
        total = simd._call(builder, "llvm.fma.v16f32", _VF32, operands)
    return total


def _emit_round_pairs(builder: Any, first: Any, second: Any) -> Any:
    if HAS_DOTS:
        pairs = simd._call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _PAIRS, [second, first])
        return builder.bitcast(pairs, _VI32)
    low, high = (_narrow(builder, vector) for vector in (first, second))
    return builder.bitcast(_shuffled(builder, low, high, list(range(2 * LANES))), _VI32)


def _narrow(builder: Any, vector: Any) -> Any:
    upper = builder.lshr(simd._emit_round_bf16(builder, vector), ir.Constant(_VI32, [16] * LANES))
    return builder.trunc(upper, ir.VectorType(ir.IntType(16), LANES))


def _shuffled(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order))


def emit_interleave(builder: Any, a: Any, b: Any, upper: bool) -> Any:
    """Of each 128 bits of two vectors of 32 bfloat16 the lower or the upper four, as pairs of neighbours."""
    places = [8 * part + 4 * upper + element for part in range(4) for element in range(4)]
    order = [place + other for place in places for other in (0, 2 * LANES)]
    return builder.bitcast(_shuffled(builder, builder.bitcast(a, _VI16), builder.bitcast(b, _VI16), order), _VI32)


def _emit_in_order(builder: Any, lower: Any, upper: Any, second: bool) -> Any:
    places = [part * 4 + element for part in range(4) for element in range(4)]
    order = [place + other for part in range(4) for other in (0, LANES) for place in places[4 * part : 4 * part + 4]]
    return _shuffled(builder, lower, upper, order[LANES:] if second else order[:LANES])


# (pairs, pairs, total): `emit_dot`.
dot = simd._operation(FLOATS, (INTS, INTS, FLOATS), emit_dot)
# Two vectors of float32 rounded to nearest even as 32 bfloat16 in their order: pairs of neighbours.
round_pairs = simd._operation(INTS, (FLOATS, FLOATS), _emit_round_pairs)
interleave_lower = simd._operation(INTS, (INTS, INTS), lambda b, x, y: emit_interleave(b, x, y, False))
interleave_upper = simd._operation(INTS, (INTS, INTS), lambda b, x, y: emit_interleave(b, x, y, True))
# What two vectors that stand for `interleave_lower` and `interleave_upper` say of the first sixteen elements, and of
# the others.
first_in_order = simd._operation(FLOATS, (FLOATS, FLOATS), lambda b, x, y: _emit_in_order(b, x, y, False))
second_in_order = simd._operation(FLOATS, (FLOATS, FLOATS), lambda b, x, y: _emit_in_order(b, x, y, True))
