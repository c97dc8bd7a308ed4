"""Dot products of bytes, and numbers as digits of eight bits: for attention over int8 keys and values.

A float32 row becomes whole numbers of a unit of its own, and those DIGITS digits to the base 256: a sum of products of
such digits with int8 elements is exact in 32 bits, in any order. A word is an int32 lane of four bytes, the first
lowest. CPUs without AVX-512's dot products of bytes (VNNI) multiply and add instead: slower, so that no set is chosen
for it there, but it can be tried anywhere. Called by `byte_forms.py`,
`byte_products.py` and `attention_bytes_softmax.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types

from decoder.kernels import dots, simd
from decoder.kernels.simd import FLOATS, INTS, LANES

_FEATURES: Final = dict(llvm.get_host_cpu_features())
HAS_BYTE_DOTS: Final = bool(_FEATURES.get("avx512vnni") and _FEATURES.get("avx512bw"))
"""Whether the CPU has the instruction, and shuffles of bytes in registers as wide."""

DIGITS: Final = 2
"""Digits of a query's element and of a softmax weight: 16 bits, an error of 2**-16 of the row's largest at most."""

SIGNED_PEAK: Final = np.float32(32600.0)
"""What the largest element of a row of signed numbers is at most: both digits lie in -128 to 127."""

UNSIGNED_PEAK: Final = np.float32(65500.0)
"""The same of numbers that are not negative, whose digits lie in 0 to 255."""

_I32 = ir.IntType(32)
_VI8, _VI32 = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(_I32, LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_VF32 = ir.VectorType(ir.FloatType(), LANES)


def _splat(value: int) -> ir.Constant:
    return ir.Constant(_VI32, [value] * LANES)


def emit_dot(builder: Any, unsigned: Any, signed: Any, total: Any) -> Any:
    """`total` plus the products of four bytes of each lane of `unsigned`, 0 to 255, with those of `signed`."""
    if HAS_BYTE_DOTS:
        operands = [total, builder.bitcast(unsigned, _BYTES), builder.bitcast(signed, _BYTES)]
        return simd._call(builder, "llvm.x86.avx512.vpdpbusd.512", _VI32, operands)
    for byte in range(4):
        left = builder.and_(builder.lshr(unsigned, _splat(8 * byte)), _splat(0xFF))
        right = builder.ashr(builder.shl(signed, _splat(24 - 8 * byte)), _splat(24))
        total = builder.add(total, builder.mul(left, right))
    return total


def emit_number(builder: Any, digits: list[Any]) -> Any:
    """Sums of digits, the lowest first, as the float32 of what they stand for."""
    value = builder.sitofp(digits[-1], _VF32)
    for digit in reversed(digits[:-1]):
        operands = [value, ir.Constant(_VF32, [256.0] * LANES), builder.sitofp(digit, _VF32)]
        value = simd._call(builder, "llvm.fma.v16f32", _VF32, operands)
    return value


def emit_offset(builder: Any, words: Any) -> Any:
    """Signed bytes plus 128, as bytes without a sign."""
    return builder.xor(words, _splat(0x80808080))


def _emit_round(builder: Any, vector: Any) -> Any:
    return builder.fptosi(simd._call(builder, "llvm.rint.v16f32", _VF32, [vector]), _VI32)


def _emit_store_bytes(builder: Any, address: Any, vector: Any) -> Any:
    builder.store(builder.trunc(vector, _VI8), simd._pointer(builder, address, _VI8), align=1)
    return ir.Constant(ir.IntType(8).as_pointer(), None)


def _emit_signed_rest(builder: Any, vector: Any) -> Any:
    return builder.ashr(builder.add(vector, _splat(128)), _splat(8))


def _emit_halves(builder: Any, x: Any, y: Any, upper: bool) -> Any:
    order = [lane + LANES // 2 * upper + other for other in (0, LANES) for lane in range(LANES // 2)]
    return builder.shuffle_vector(x, y, ir.Constant(_VI32, order))


# Rounded to the nearest whole number, half to even.
round_ints = simd._operation(INTS, (FLOATS,), _emit_round)
to_floats = simd._operation(FLOATS, (INTS,), lambda b, x: b.sitofp(x, _VF32))
# The lowest byte of each lane.
store_bytes = simd._operation(types.void, (types.int64, INTS), _emit_store_bytes)
# What is left of whole numbers over 256 when their lowest byte is gone, a signed one or one without a sign.
signed_rest = simd._operation(INTS, (INTS,), _emit_signed_rest)
unsigned_rest = simd._operation(INTS, (INTS,), lambda b, x: b.lshr(x, _splat(8)))
# A number and the sum of the digits one place below it: the number they stand for.
add_digit = simd._operation(
    FLOATS, (FLOATS, INTS),
    lambda b, value, digit: simd._call(
        b, "llvm.fma.v16f32", _VF32, [value, ir.Constant(_VF32, [256.0] * LANES), b.sitofp(digit, _VF32)]
    ),
)  # fmt: skip
# The first eight lanes of two vectors, and the others.
lower_halves = simd._operation(FLOATS, (FLOATS, FLOATS), lambda b, x, y: _emit_halves(b, x, y, False))
upper_halves = simd._operation(FLOATS, (FLOATS, FLOATS), lambda b, x, y: _emit_halves(b, x, y, True))
# Parts of four lanes of two vectors in turn: the first two of each, and the others.
first_parts = dots.first_in_order
last_parts = dots.second_in_order
