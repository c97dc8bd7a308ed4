"""Sixteen-lane vectors inside numba: the two vector types and the few operations the kernels are written in.

Every value is an LLVM vector, so one source runs as AVX-512, as pairs of AVX2 registers or on any other target. An
operation maps to one LLVM instruction or a short fixed sequence: the order of a sum never depends on the target.
Addresses are plain integers; nothing here checks them.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from decoder.kernels.compiled import inlined, intrinsic
from decoder.kernels.halves import CONVERTS_FLOAT16 as CONVERTS_FLOAT16  # known before anything is compiled

LANES: Final = 16

_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_F16 = ir.HalfType()
_F32 = ir.FloatType()
_VI8 = ir.VectorType(_I8, LANES)
_VI16 = ir.VectorType(_I16, LANES)
_VI32 = ir.VectorType(_I32, LANES)
_VF16 = ir.VectorType(_F16, LANES)
_VF32 = ir.VectorType(_F32, LANES)


class FloatVector(types.Type):
    """Numba type of sixteen float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


class IntVector(types.Type):
    """Numba type of sixteen int32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="int32x16")


FLOATS: Final = FloatVector()
INTS: Final = IntVector()


@register_model(FloatVector)
class _FloatModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VF32)


@register_model(IntVector)
class _IntModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VI32)


def _splat_constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _memory_load(result: Any, llvm: Any, align: int) -> Any:
    def declare(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(_pointer(builder, args[0], llvm), align=align)

        return result(types.int64), generate

    return intrinsic(declare)


def _memory_store(value_type: Any, llvm: Any, align: int) -> Any:
    def declare(typingctx: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], _pointer(builder, args[0], llvm), align=align)
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    return intrinsic(declare)


def _operation(result: Any, operands: tuple[Any, ...], emit: Callable[..., Any]) -> Any:
    """An intrinsic of one to four operands whose code is `emit(builder, *operands)`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit(builder, *args)

    if len(operands) == 1:

        def declare_one(typingctx: Any, a: Any) -> Any:
            return result(*operands), generate

        return intrinsic(declare_one)
    if len(operands) == 2:

        def declare_two(typingctx: Any, a: Any, b: Any) -> Any:
            return result(*operands), generate

        return intrinsic(declare_two)

    if len(operands) == 3:

        def declare_three(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
            return result(*operands), generate

        return intrinsic(declare_three)

    def declare_four(typingctx: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return result(*operands), generate

    return intrinsic(declare_four)


def _emit_splat(builder: Any, value: Any, kind: Any = _VF32) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(_VI32, [0] * LANES))


def _emit_load_f32(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, _VF32), align=4)


def _emit_store_f32(builder: Any, address: Any, vector: Any) -> None:
    builder.store(vector, _pointer(builder, address, _VF32), align=4)


def _emit_splat_f32(builder: Any, address: Any) -> Any:
    return _emit_splat(builder, builder.load(_pointer(builder, address, _F32), align=4))


def _emit_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", _VF32, [x, y, z])


def _emit_below_lane(builder: Any, vector: Any, count: Any, fill: Any) -> Any:
    lanes = ir.Constant(_VI32, list(range(LANES)))
    inside = builder.icmp_signed("<", lanes, _emit_splat(builder, builder.trunc(count, _I32), _VI32))
    return builder.select(inside, vector, _emit_splat(builder, fill))


def _emit_from_lane(builder: Any, vector: Any, count: Any, fill: Any) -> Any:
    lanes = ir.Constant(_VI32, list(range(LANES)))
    inside = builder.icmp_signed(">=", lanes, _emit_splat(builder, builder.trunc(count, _I32), _VI32))
    return builder.select(inside, vector, _emit_splat(builder, fill))


def _emit_copy_16_bytes(builder: Any, target: Any, source: Any) -> Any:
    kind = ir.VectorType(_I8, 16)
    builder.store(builder.load(_pointer(builder, source, kind), align=1), _pointer(builder, target, kind), align=1)
    return ir.Constant(ir.IntType(8).as_pointer(), None)


def _emit_load_bf16(builder: Any, address: Any) -> Any:
    raw = builder.load(_pointer(builder, address, _VI16), align=2)
    wide = builder.shl(builder.zext(raw, _VI32), _splat_constant(_VI32, 16))
    return builder.bitcast(wide, _VF32)


def _emit_splat_bf16(builder: Any, address: Any) -> Any:
    raw = builder.zext(builder.load(_pointer(builder, address, _I16), align=2), _I32)
    return _emit_splat(builder, builder.bitcast(builder.shl(raw, _I32(16)), _F32))


def _emit_reduce(combine: Callable[..., Any]) -> Callable[..., Any]:
    def emit(builder: Any, vector: Any) -> Any:
        for distance in (8, 4, 2, 1):
            order = [(lane + distance) % LANES for lane in range(LANES)]
            moved = builder.shuffle_vector(vector, ir.Constant(_VF32, ir.Undefined), ir.Constant(_VI32, order))
            vector = combine(builder, vector, moved)
        return builder.extract_element(vector, _I32(0))

    return emit


def _emit_max(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _emit_min(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _emit_keep_under(builder: Any, vector: Any, limits: Any, index: Any, fill: Any) -> Any:
    inside = builder.icmp_signed("<", _emit_splat(builder, index, _VI32), limits)
    return builder.select(inside, vector, _emit_splat(builder, fill))


def _emit_keep_from(builder: Any, vector: Any, floors: Any, index: Any, fill: Any) -> Any:
    inside = builder.icmp_signed(">=", _emit_splat(builder, index, _VI32), floors)
    return builder.select(inside, vector, _emit_splat(builder, fill))


def _emit_round_bf16(builder: Any, vector: Any) -> Any:
    """The bits of sixteen float32 rounded to bfloat16, to nearest even, in the upper half of each lane."""
    bits = builder.bitcast(vector, _VI32)
    odd = builder.and_(builder.lshr(bits, _splat_constant(_VI32, 16)), _splat_constant(_VI32, 1))
    return builder.add(bits, builder.add(odd, _splat_constant(_VI32, 0x7FFF)))


def _emit_rounded_bf16(builder: Any, vector: Any) -> Any:
    bits = builder.and_(_emit_round_bf16(builder, vector), _splat_constant(_VI32, 0xFFFF0000))
    return builder.bitcast(bits, _VF32)


def _emit_store_bf16(builder: Any, address: Any, vector: Any) -> Any:
    high = builder.lshr(_emit_round_bf16(builder, vector), _splat_constant(_VI32, 16))
    builder.store(builder.trunc(high, _VI16), _pointer(builder, address, _VI16), align=2)
    return ir.Constant(ir.IntType(8).as_pointer(), None)


def _emit_load_f16(builder: Any, address: Any) -> Any:
    return builder.fpext(builder.load(_pointer(builder, address, _VF16), align=2), _VF32)


def _emit_clamp(builder: Any, vector: Any, limit: float) -> Any:
    # Comparisons with NaN are false, so NaN stays.
    for sign, value in ((">", limit), ("<", -limit)):
        bound = _splat_constant(_VF32, value)
        vector = builder.select(builder.fcmp_ordered(sign, vector, bound), bound, vector)
    return vector


def _emit_store_f16(builder: Any, address: Any, vector: Any) -> Any:
    # No finite number may become an infinity.
    narrow = builder.fptrunc(_emit_clamp(builder, vector, 65504.0), _VF16)
    builder.store(narrow, _pointer(builder, address, _VF16), align=2)
    return ir.Constant(ir.IntType(8).as_pointer(), None)


def _emit_load_int8(builder: Any, address: Any) -> Any:
    raw = builder.load(_pointer(builder, address, _VI8), align=1)
    return builder.sitofp(builder.sext(raw, _VI32), _VF32)


def _emit_store_int8(builder: Any, address: Any, vector: Any) -> Any:
    # The low bits of x + 1.5 * 2**23 are x rounded to an integer, half to even.
    shifted = builder.fadd(_emit_clamp(builder, vector, 127.0), _splat_constant(_VF32, 12582912.0))
    builder.store(builder.trunc(builder.bitcast(shifted, _VI32), _VI8), _pointer(builder, address, _VI8), align=1)
    return ir.Constant(ir.IntType(8).as_pointer(), None)


def emit_e4m3_as_f16(builder: Any, raw: Any) -> Any:
    """The bits of float16 numbers that are stored e4m3 numbers times 2**-8."""
    # Moved, the bits are those of the smaller number, of a subnormal one too; a moved sign is there twice.
    kind = ir.VectorType(_I16, raw.type.count)
    moved = builder.shl(builder.sext(raw, kind), ir.Constant(kind, [7] * kind.count))
    return builder.and_(moved, ir.Constant(kind, [0xBFFF] * kind.count))


def _emit_load_e4m3(builder: Any, address: Any) -> Any:
    raw = builder.load(_pointer(builder, address, _VI8), align=1)
    return builder.fpext(builder.bitcast(emit_e4m3_as_f16(builder, raw), _VF16), _VF32)


def _emit_store_e4m3(builder: Any, address: Any, vector: Any) -> Any:
    """Half to even: above 2**-6 in the bits of float32, below in steps of 2**-9."""

    def splat(value: int) -> ir.Constant:
        return _splat_constant(_VI32, value)

    bits = builder.bitcast(_emit_clamp(builder, vector, 448.0), _VI32)
    sign = builder.and_(builder.lshr(bits, splat(24)), splat(0x80))
    bits = builder.and_(bits, splat(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(bits, splat(20)), splat(1))
    normal = builder.lshr(builder.add(bits, builder.add(odd, splat(0x7FFFF))), splat(20))
    normal = builder.sub(normal, splat((127 - 7) << 3))
    small = builder.fadd(builder.bitcast(bits, _VF32), _splat_constant(_VF32, 16384.0))
    subnormal = builder.and_(builder.bitcast(small, _VI32), splat(0xF))
    stored = builder.select(builder.icmp_signed("<", bits, splat((127 - 6) << 23)), subnormal, normal)
    stored = builder.trunc(builder.or_(stored, sign), _VI8)
    builder.store(stored, _pointer(builder, address, _VI8), align=1)
    return ir.Constant(ir.IntType(8).as_pointer(), None)


def _emit_e4m3_misfit(builder: Any, vector: Any, scale: Any, inverse: Any, unit: Any) -> Any:
    """See `kv_write/row_scales.py::misfit`, of which this is the CPU's form, bit for bit."""

    def splat(value: int) -> ir.Constant:
        return _splat_constant(_VI32, value)

    bits = builder.bitcast(_emit_clamp(builder, builder.fmul(vector, inverse), 448.0), _VI32)
    odd = builder.and_(builder.lshr(bits, splat(20)), splat(1))
    bits = builder.and_(builder.add(bits, builder.add(odd, splat(0x7FFFF))), splat(0xFFF00000))
    error = builder.fsub(vector, builder.fmul(builder.bitcast(bits, _VF32), scale))
    magic = _splat_constant(_VF32, 12582912.0)
    whole = builder.fsub(builder.fadd(builder.fmul(error, unit), magic), magic)
    return builder.fmul(whole, whole)


def _emit_widened_scale(builder: Any, scale: Any, factor: Any) -> Any:
    """`scale` times `factor` per lane, rounded up to bfloat16."""
    wider = builder.fmul(scale, _emit_splat(builder, factor))
    bits = builder.add(builder.bitcast(wider, _VI32), _splat_constant(_VI32, 0xFFFF))
    return builder.bitcast(builder.and_(bits, _splat_constant(_VI32, 0xFFFF0000)), _VF32)


def _emit_misfit_unit(builder: Any, scale: Any) -> Any:
    """4 over the power of two below `scale`, at most 2**127."""
    exponent = builder.lshr(builder.bitcast(scale, _VI32), _splat_constant(_VI32, 23))
    exponent = builder.sub(_splat_constant(_VI32, 256), exponent)
    most = _splat_constant(_VI32, 254)
    exponent = builder.select(builder.icmp_signed("<", exponent, most), exponent, most)
    return builder.bitcast(builder.shl(exponent, _splat_constant(_VI32, 23)), _VF32)


def _emit_error_rates(builder: Any, bits: Any, most: Any) -> Any:
    """See `kv_write/row_scales.py::error_rates`: powers of two of magnitudes with such bits, over the largest's."""

    def exponent(number: Any) -> Any:
        rounded = builder.add(number, _splat_constant(_VI32, 0x004AFB0D))
        return builder.and_(rounded, _splat_constant(_VI32, 0x7F800000))

    least = _splat_constant(_VI32, (127 - 8) << 23)
    rates = builder.add(builder.sub(exponent(bits), exponent(most)), _splat_constant(_VI32, 127 << 23))
    return builder.bitcast(builder.select(builder.icmp_signed(">", rates, least), rates, least), _VF32)


def _emit_magnitudes(builder: Any, vector: Any, most: Any) -> Any:
    """The larger of `most` and the bits of |vector| per lane: as integers, so that no NaN is lost."""
    bits = builder.and_(builder.bitcast(vector, _VI32), _splat_constant(_VI32, 0x7FFFFFFF))
    return builder.select(builder.icmp_signed(">", bits, most), bits, most)


def _emit_row_scale(builder: Any, most: Any, peak: Any) -> Any:
    """In each lane the scale with which the largest magnitude of all lanes becomes at most `peak`.

    It is a bfloat16 number, rounded up, and at least the smallest normal one; NaN where a magnitude is not finite.
    """
    for distance in (8, 4, 2, 1):
        order = [(lane + distance) % LANES for lane in range(LANES)]
        moved = builder.shuffle_vector(most, ir.Constant(_VI32, ir.Undefined), ir.Constant(_VI32, order))
        most = builder.select(builder.icmp_signed(">", moved, most), moved, most)
    exact = builder.fdiv(builder.bitcast(most, _VF32), _emit_splat(builder, peak))
    bits = builder.add(builder.bitcast(exact, _VI32), _splat_constant(_VI32, 0xFFFF))
    bits = builder.and_(bits, _splat_constant(_VI32, 0xFFFF0000))
    least = _splat_constant(_VI32, 0x00800000)
    bits = builder.select(builder.icmp_signed(">", bits, least), bits, least)
    finite = builder.icmp_signed("<", most, _splat_constant(_VI32, 0x7F800000))
    return builder.bitcast(builder.select(finite, bits, _splat_constant(_VI32, 0x7FC00000)), _VF32)


def _emit_store_scale(builder: Any, address: Any, scale: Any) -> Any:
    bits = builder.bitcast(builder.extract_element(scale, _I32(0)), _I32)
    high = builder.trunc(builder.lshr(bits, _I32(16)), _I16)
    builder.store(high, _pointer(builder, address, _I16), align=2)
    return ir.Constant(ir.IntType(8).as_pointer(), None)


def _emit_store_weight_pair(builder: Any, address: Any, even: Any, odd: Any) -> Any:
    # Attention weights are positive and finite: rounding half up needs no look at the lowest kept bit.
    half = _splat_constant(_VI32, 0x8000)
    low = builder.lshr(builder.add(builder.bitcast(even, _VI32), half), _splat_constant(_VI32, 16))
    high = builder.and_(builder.add(builder.bitcast(odd, _VI32), half), _splat_constant(_VI32, 0xFFFF0000))
    builder.store(builder.or_(low, high), _pointer(builder, address, _VI32), align=4)
    return ir.Constant(ir.IntType(8).as_pointer(), None)


def _emit_above_floor(builder: Any, vector: Any) -> Any:
    # vreduceps with no kept fraction bits, rounding down, quiet.
    arguments = [vector, _I32(9), vector, _I16(-1), _I32(4)]
    return _call(builder, "llvm.x86.avx512.mask.reduce.ps.512", _VF32, arguments)


def _emit_scale_by_floor(builder: Any, vector: Any, exponent: Any) -> Any:
    arguments = [vector, exponent, vector, _I16(-1), _I32(4)]
    return _call(builder, "llvm.x86.avx512.mask.scalef.ps.512", _VF32, arguments)


def _emit_prefetch(builder: Any, address: Any) -> Any:
    pointer = _pointer(builder, address, ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, _I32(0), _I32(3), _I32(1)])
    return ir.Constant(ir.IntType(8).as_pointer(), None)


def _emit_pairs(builder: Any, even: Any, odd: Any) -> Any:
    """Sixteen bfloat16 at two addresses as words: an element of the first and its neighbour of the second."""
    low = builder.zext(builder.load(_pointer(builder, even, _VI16), align=2), _VI32)
    high = builder.zext(builder.load(_pointer(builder, odd, _VI16), align=2), _VI32)
    return builder.or_(low, builder.shl(high, _splat_constant(_VI32, 16)))


def _emit_store_pairs(builder: Any, address: Any, even: Any, odd: Any) -> Any:
    builder.store(_emit_pairs(builder, even, odd), _pointer(builder, address, _VI32), align=4)
    return ir.Constant(ir.IntType(8).as_pointer(), None)


def _load_words(builder: Any, start: Any, stride: Any, row: int) -> Any:
    return builder.load(_pointer(builder, _row(builder, start, stride, row), _VI32), align=4)


def _load_wide_bf16(builder: Any, start: Any, stride: Any, row: int) -> Any:
    return _emit_load_bf16(builder, _row(builder, start, stride, row))


def _load_pairs(builder: Any, start: Any, stride: Any, row: int) -> Any:
    return _emit_pairs(builder, _row(builder, start, stride, 2 * row), _row(builder, start, stride, 2 * row + 1))


def _row(builder: Any, start: Any, stride: Any, row: int) -> Any:
    return builder.add(start, builder.mul(stride, ir.IntType(64)(row)))


def _emit_transpose(builder: Any, rows: list[Any], kind: Any) -> list[Any]:
    """Transpose sixteen vectors by four rounds of perfect shuffles."""
    undefined = None
    low = [lane // 2 + (lane % 2) * LANES for lane in range(LANES)]
    high = [lane // 2 + LANES // 2 + (lane % 2) * LANES for lane in range(LANES)]
    for _ in range(4):
        mixed: list[Any] = [undefined] * LANES
        for index in range(LANES // 2):
            a, b = rows[index], rows[index + LANES // 2]
            mixed[2 * index] = builder.shuffle_vector(a, b, ir.Constant(_VI32, low))
            mixed[2 * index + 1] = builder.shuffle_vector(a, b, ir.Constant(_VI32, high))
        rows = mixed
    return rows


def _transpose(load: Callable[..., Any], kind: Any) -> Any:
    def declare(typingctx: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            i64 = ir.IntType(64)
            start, stride, out, out_stride = args
            rows = [load(builder, start, stride, row) for row in range(LANES)]
            for row, vector in enumerate(_emit_transpose(builder, rows, kind)):
                address = builder.add(out, builder.mul(out_stride, i64(row)))
                builder.store(vector, _pointer(builder, address, kind), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    return intrinsic(declare)


load_floats = _memory_load(FLOATS, _VF32, 4)
store_floats = _memory_store(FLOATS, _VF32, 4)
load_ints = _memory_load(INTS, _VI32, 4)
store_ints = _memory_store(INTS, _VI32, 4)
load_float = _memory_load(types.float32, _F32, 4)
store_float = _memory_store(types.float32, _F32, 4)
load_int32 = _memory_load(types.int32, _I32, 4)
store_int32 = _memory_store(types.int32, _I32, 4)
load_int64 = _memory_load(types.int64, ir.IntType(64), 8)
store_int64 = _memory_store(types.int64, ir.IntType(64), 8)
store_uint16 = _memory_store(types.uint16, _I16, 2)
load_uint16 = _memory_load(types.uint16, _I16, 2)

splat = _operation(FLOATS, (types.float32,), _emit_splat)
splat_ints = _operation(INTS, (types.int32,), lambda b, v: _emit_splat(b, v, _VI32))
add = _operation(FLOATS, (FLOATS, FLOATS), lambda b, x, y: b.fadd(x, y))
sub = _operation(FLOATS, (FLOATS, FLOATS), lambda b, x, y: b.fsub(x, y))
mul = _operation(FLOATS, (FLOATS, FLOATS), lambda b, x, y: b.fmul(x, y))
div = _operation(FLOATS, (FLOATS, FLOATS), lambda b, x, y: b.fdiv(x, y))
fma = _operation(FLOATS, (FLOATS,) * 3, lambda b, x, y, z: _call(b, "llvm.fma.v16f32", _VF32, [x, y, z]))
maximum = _operation(FLOATS, (FLOATS, FLOATS), _emit_max)
minimum = _operation(FLOATS, (FLOATS, FLOATS), _emit_min)
keep_under = _operation(FLOATS, (FLOATS, INTS, types.int32, types.float32), _emit_keep_under)
keep_from = _operation(FLOATS, (FLOATS, INTS, types.int32, types.float32), _emit_keep_from)
below_lane = _operation(FLOATS, (FLOATS, types.int64, types.float32), _emit_below_lane)
from_lane = _operation(FLOATS, (FLOATS, types.int64, types.float32), _emit_from_lane)
reduce_max = _operation(types.float32, (FLOATS,), _emit_reduce(_emit_max))
reduce_add = _operation(types.float32, (FLOATS,), _emit_reduce(lambda b, x, y: b.fadd(x, y)))
# x - floor(x), and x * 2**floor(y), per lane: AVX-512 only.
above_floor = _operation(FLOATS, (FLOATS,), _emit_above_floor)
scale_by_floor = _operation(FLOATS, (FLOATS, FLOATS), _emit_scale_by_floor)
as_ints = _operation(INTS, (FLOATS,), lambda b, x: b.bitcast(x, _VI32))
as_floats = _operation(FLOATS, (INTS,), lambda b, x: b.bitcast(x, _VF32))
add_ints = _operation(INTS, (INTS, INTS), lambda b, x, y: b.add(x, y))
shift_left_23 = _operation(INTS, (INTS,), lambda b, x: b.shl(x, _splat_constant(_VI32, 23)))
low_halves = _operation(FLOATS, (INTS,), lambda b, x: b.bitcast(b.shl(x, _splat_constant(_VI32, 16)), _VF32))
high_halves = _operation(FLOATS, (INTS,), lambda b, x: b.bitcast(b.and_(x, _splat_constant(_VI32, 0xFFFF0000)), _VF32))
splat_bf16 = _operation(FLOATS, (types.int64,), _emit_splat_bf16)
round_bf16 = _operation(FLOATS, (FLOATS,), _emit_rounded_bf16)
load_bf16 = _operation(FLOATS, (types.int64,), _emit_load_bf16)
store_bf16 = _operation(types.void, (types.int64, FLOATS), _emit_store_bf16)
load_f16 = _operation(FLOATS, (types.int64,), _emit_load_f16)
store_f16 = _operation(types.void, (types.int64, FLOATS), _emit_store_f16)
load_int8 = _operation(FLOATS, (types.int64,), _emit_load_int8)
store_int8 = _operation(types.void, (types.int64, FLOATS), _emit_store_int8)
# 2**-8 times the stored number.
load_e4m3 = _operation(FLOATS, (types.int64,), _emit_load_e4m3)
store_e4m3 = _operation(types.void, (types.int64, FLOATS), _emit_store_e4m3)
magnitudes = _operation(INTS, (FLOATS, INTS), _emit_magnitudes)
row_scale = _operation(FLOATS, (INTS, types.float32), _emit_row_scale)
store_scale = _operation(types.void, (types.int64, FLOATS), _emit_store_scale)
# For the choice of a row's scale by its error: `stored_rows.py`.
e4m3_misfit = _operation(FLOATS, (FLOATS,) * 4, _emit_e4m3_misfit)
widened_scale = _operation(FLOATS, (FLOATS, types.float32), _emit_widened_scale)
misfit_unit = _operation(FLOATS, (FLOATS,), _emit_misfit_unit)
error_rates = _operation(FLOATS, (INTS, INTS), _emit_error_rates)
select_less = _operation(
    FLOATS, (types.float32, types.float32, FLOATS, FLOATS),
    lambda b, x, y, yes, no: b.select(b.fcmp_ordered("<", x, y), yes, no),
)  # fmt: skip
store_weight_pair = _operation(types.void, (types.int64, FLOATS, FLOATS), _emit_store_weight_pair)
store_pairs = _operation(types.void, (types.int64, types.int64, types.int64), _emit_store_pairs)
copy_16_bytes = _operation(types.void, (types.int64, types.int64), _emit_copy_16_bytes)
prefetch = _operation(types.void, (types.int64,), _emit_prefetch)
# (source, source stride, target, target stride), strides in bytes: sixteen rows of sixteen 32-bit words.
transpose_words = _transpose(_load_words, _VI32)
# The same for 32 rows of sixteen bfloat16; a word is an element of an even row and its neighbour in the odd row.
transpose_pairs = _transpose(_load_pairs, _VI32)

_ROUND: Final = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer in the low bits


@inlined
def exp2(x: Any) -> Any:
    """2**x per lane; relative error below 3e-7; x is clamped to [-126, 126]; exp2(0) is exactly one."""
    x = minimum(maximum(x, splat(np.float32(-126.0))), splat(np.float32(126.0)))
    shifted = add(x, splat(_ROUND))
    fraction = sub(x, sub(shifted, splat(_ROUND)))
    result = fma(fraction, splat(np.float32(0.00132647458)), splat(np.float32(0.00967152109)))
    result = fma(result, fraction, splat(np.float32(0.0555073378)))
    result = fma(result, fraction, splat(np.float32(0.24022242)))
    result = fma(result, fraction, splat(np.float32(0.693146978)))
    result = fma(result, fraction, splat(np.float32(1.0)))
    return as_floats(add_ints(as_ints(result), shift_left_23(as_ints(shifted))))


@inlined
def soft_cap(x: Any, rate: Any, size: Any) -> Any:
    """size * tanh(x * rate / (2 log2(e))) per lane; the error is below 3e-7 times size."""
    power = add(exp2(mul(x, rate)), splat(np.float32(1.0)))
    return mul(size, sub(splat(np.float32(1.0)), div(splat(np.float32(2.0)), power)))


@inlined
def exp2_short(x: Any) -> Any:
    """2**x per lane for results that are rounded to bfloat16; AVX-512 only.

    The relative error is below 1e-4; exp2_short(0) is exactly one; results below 2**-126 are tiny or zero.
    """
    fraction = above_floor(x)
    result = fma(fraction, splat(np.float32(0.0770673519)), splat(np.float32(0.227644654)))
    result = fma(result, fraction, splat(np.float32(0.695116862)))
    result = fma(result, fraction, splat(np.float32(1.0)))
    return scale_by_floor(result, x)
