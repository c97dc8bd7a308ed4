"""Weights as whole numbers in groups: each group of 32 inputs of a column has a scale, with 4 bits an offset too.

A weight is `scale * number + offset`, and a sum over a group is that of numbers times the scale, plus that of inputs
times the offset: a number becomes float32 and is multiplied, and nothing else is done 32 times. A record holds 32
inputs of a pair of column blocks: the blocks' scales, then their offsets if the form has them, as float16, then the
numbers, in lines of sixteen words, one a column; the blocks' lines alternate. Each word has consecutive inputs in its
bytes, with 4 bits four in the lower halves and the next four in the upper ones. The form of a matrix is in the low bits
of its address. Packed by `decoder/models/grouping.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from decoder.kernels import simd
from decoder.kernels.compiled import kernel, made_kernel
from decoder.kernels.grouped_inputs import BYTE_SHIFTS, GROUP
from decoder.kernels.simd import LANES, _operation

LINE_BYTES: Final = LANES * 4
LINE_STEP: Final = 2 * LINE_BYTES  # from a line of a column block to its next one
FORM_BITS: Final = 63  # of an address: matrices begin at cache lines

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VI32, _VF16, _VF32 = (ir.VectorType(kind, LANES) for kind in (_I32, ir.HalfType(), ir.FloatType()))


class GroupedForm(NamedTuple):
    """How numbers of `bits` bits lie. They have no sign: `zero` is taken off each, unless there are offsets."""

    tag: int
    name: str
    bits: int
    zero: int
    offsets: bool

    @property
    def line_inputs(self) -> int:
        """Consecutive inputs of a line."""
        return 32 // self.bits

    @property
    def lines(self) -> int:
        """Lines of 64 bytes of a group of a column block."""
        return GROUP // self.line_inputs

    @property
    def numbers_at(self) -> int:
        """Where the numbers begin in a record."""
        return 2 * LANES * 2 * (2 if self.offsets else 1)

    @property
    def record_bytes(self) -> int:
        """Of one group of a pair of column blocks."""
        return self.numbers_at + 2 * self.lines * 64

    def line_at(self, block: int) -> int:
        """Where the first line of a column block lies in a record. The blocks' lines alternate."""
        return self.numbers_at + block * LINE_BYTES


INT8: Final = GroupedForm(1, "int8", 8, 128, False)
UINT4: Final = GroupedForm(2, "uint4", 4, 0, True)

_INT8_TAG, _INT8_BYTES, _UINT4_BYTES = INT8.tag, INT8.record_bytes, UINT4.record_bytes


@kernel
def record_bytes(weights: int) -> int:
    """Bytes of a record of the matrix at this tagged address."""
    return _INT8_BYTES if weights & FORM_BITS == _INT8_TAG else _UINT4_BYTES


def _emit_half(builder: Any, address: Any) -> Any:
    half = builder.load(builder.inttoptr(address, ir.HalfType().as_pointer()), align=2)
    return builder.fpext(half, ir.FloatType())


_load_half = _operation(types.float32, (types.int64,), _emit_half)


def _column_of(form: GroupedForm) -> Any:
    numbers_at, size, zero, offsets = form.numbers_at, form.record_bytes, np.float32(form.zero), form.offsets
    bits, mask, line_inputs = form.bits, (1 << form.bits) - 1, form.line_inputs

    @made_kernel(form.name)
    def column_of(record: int, block: int, lane: int, groups: int, factor: float, target: int) -> None:
        for _ in range(groups):
            scale = _load_half(record + (block * LANES + lane) * 2)
            offset = _load_half(record + ((2 + block) * LANES + lane) * 2) if offsets else -zero * scale
            start = record + numbers_at + block * LINE_BYTES + lane * 4
            for k in range(GROUP):
                word = np.int64(simd.load_int32(start + k // line_inputs * LINE_STEP))
                shift = (k & 3) * 8 + (k % line_inputs >> 2) * bits
                number = np.float32((word >> shift) & mask)
                simd.store_float(target + k * 4, np.float32(np.float32(number * scale + offset) * factor))
            record, target = record + size, target + GROUP * 4

    return column_of


_int8_column, _uint4_column = _column_of(INT8), _column_of(UINT4)


@kernel
def load_column(weights: int, column: int, depth: int, factor: float, target: int) -> None:
    """The weights [depth] of one column of the matrix at a tagged address, times a float32, as float32 at `target`."""
    groups, size = depth // GROUP, record_bytes(weights)
    record = (weights & ~FORM_BITS) + (column >> 5) * groups * size
    block, lane = (column >> 4) & 1, column & 15
    if weights & FORM_BITS == _INT8_TAG:
        _int8_column(record, block, lane, groups, factor, target)
    else:
        _uint4_column(record, block, lane, groups, factor, target)


def _floats(value: float) -> ir.Constant:
    return ir.Constant(_VF32, [value] * LANES)


def _words(value: int) -> ir.Constant:
    return ir.Constant(_VI32, [value] * LANES)


def load_words(builder: Any, address: Any, offset: int) -> Any:
    """Sixteen words `offset` bytes behind an address."""
    return builder.load(builder.inttoptr(builder.add(address, _I64(offset)), _VI32.as_pointer()), align=4)


def _load_halves(builder: Any, address: Any, offset: int) -> Any:
    place = builder.inttoptr(builder.add(address, _I64(offset)), _VF16.as_pointer())
    return builder.fpext(builder.load(place, align=2), _VF32)


def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of vectors, rounded once."""
    kind = ir.FunctionType(_VF32, [_VF32] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [x, y, z])


def parameters(builder: Any, form: GroupedForm, record: Any, block: int) -> tuple[Any, Any]:
    """Scales and offsets [16] of one group of a column block, as float32."""
    scale = _load_halves(builder, record, block * LANES * 2)
    if form.offsets:
        return scale, _load_halves(builder, record, (2 + block) * LANES * 2)
    return scale, builder.fmul(scale, _floats(-float(form.zero)))


def numbers(builder: Any, form: GroupedForm, words: Any) -> Iterator[Any]:
    """The numbers of a line, input by input, float32 [16] each, times two to the power of their BYTE_SHIFTS."""
    mask = (1 << form.bits) - 1
    for half in range(0, 8, form.bits):
        moved = builder.lshr(words, _words(half)) if half else words
        for place, shift in enumerate(BYTE_SHIFTS):
            if place < 3:
                number = builder.and_(moved, _words(mask << shift))
            else:
                number = builder.lshr(words, _words(24 + half))
                if half + form.bits < 8:
                    number = builder.and_(number, _words(mask))
            yield builder.sitofp(number, _VF32)
