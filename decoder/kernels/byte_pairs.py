"""Words of four fp8 e4m3 numbers as pairs of bfloat16, for dot products of pairs: attention over fp8 keys and values.

Every e4m3 number is a bfloat16 one. As in `simd.load_e4m3` numbers are 2**-8 of what is stored, and NaN, which is never
stored, is the number above the largest. Both bytes of sixteen bits are looked up in tables of 128, the sign apart. Of a
word's bytes the first and third are a pair, and the second and fourth. CPUs without VBMI convert by way of float16:
slower, so that no set is chosen for it there, but it can be tried anywhere. Called by `byte_forms.py` and,
for the order of pairs, `attention_bytes_softmax.py`.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from decoder.kernels import dots, simd
from decoder.kernels.simd import FLOATS, LANES

HAS_TABLES: Final = bool(llvm.get_host_cpu_features().get("avx512vbmi", False))
"""Whether the CPU looks bytes up in tables of 128."""

_I32 = ir.IntType(32)
_VI32, _VF32 = ir.VectorType(_I32, LANES), ir.VectorType(ir.FloatType(), LANES)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)


def _numbers() -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The bfloat16 bits of e4m3 numbers without a sign times 2**-8."""
    codes = np.arange(128)
    exponent, fraction = codes >> 3, codes & 7
    values = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10 - 8), fraction * 2.0 ** (-9 - 8))
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


_TABLES: Final = tuple((_numbers() >> shift & 0xFF).astype(int).tolist() for shift in (0, 8))


def _splat(value: int) -> ir.Constant:
    return ir.Constant(_VI32, [value] * LANES)


def _looked_up(builder: Any, words: Any, table: list[int]) -> Any:
    first, second = (ir.Constant(_BYTES, table[half : half + 64]) for half in (0, 64))
    operands = [first, builder.bitcast(words, _BYTES), second]
    return builder.bitcast(simd._call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _BYTES, operands), _VI32)


def _converted(builder: Any, words: Any, byte: int) -> Any:
    """The bfloat16 of one byte of each word, in the lower half of lanes."""
    raw = builder.trunc(builder.lshr(words, _splat(8 * byte)), ir.VectorType(ir.IntType(8), LANES))
    half = builder.bitcast(simd.emit_e4m3_as_f16(builder, raw), ir.VectorType(ir.HalfType(), LANES))
    return builder.lshr(builder.bitcast(builder.fpext(half, _VF32), _VI32), _splat(16))


def emit_pairs(builder: Any, words: Any) -> list[Any]:
    """Two vectors of pairs."""
    if not HAS_TABLES:
        found = [_converted(builder, words, byte) for byte in range(4)]
        return [builder.or_(found[byte], builder.shl(found[byte + 2], _splat(16))) for byte in range(2)]
    low, high = (_looked_up(builder, words, table) for table in _TABLES)
    high = builder.or_(high, builder.and_(words, _splat(0x80808080 - 2**32)))
    evens, odds = _splat(0x00FF00FF), _splat(0xFF00FF00 - 2**32)
    shorts = ir.VectorType(ir.IntType(16), 2 * LANES)
    eights = ir.Constant(shorts, [8] * 2 * LANES)
    upper = builder.bitcast(builder.shl(builder.bitcast(high, shorts), eights), _VI32)
    lower = builder.bitcast(builder.lshr(builder.bitcast(low, shorts), eights), _VI32)
    return [
        builder.or_(builder.and_(low, evens), upper),
        builder.or_(lower, builder.and_(high, odds)),
    ]


def emit_product(builder: Any, pairs: Any, digits: Any, total: Any) -> Any:
    """`total` plus the products of pairs, all int32 lanes."""
    return dots.emit_dot(builder, digits, pairs, total)


def _emit_paired(builder: Any, vector: Any) -> Any:
    order = [4 * (lane // 4) + (0, 2, 1, 3)[lane % 4] for lane in range(LANES)]
    return builder.shuffle_vector(vector, vector, ir.Constant(_VI32, order))


# Sixteen numbers in the order of the pairs that they are multiplied with.
in_pairs = simd._operation(FLOATS, (FLOATS,), _emit_paired)
