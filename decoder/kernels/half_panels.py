"""Panels of keys for registers of eight lanes: packed by whole registers, and a product takes them half by half.

Sixteen rows of one or two bytes an element are taken in 32 bytes at a time, and elements are interleaved within the two
128-bit parts of a register. So a register of the panel holds one step of some keys, and beside it the step one part
further on: nothing is moved between the parts, and the product loads what it widens from either. fp8 elements become
float16 ones of the same value times 2**-8 before they are interleaved. Used by `attention_alone.py` and `run_tiles.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from llvmlite import ir

from decoder.kernels import simd
from decoder.kernels.compiled import function, made_kernel, variant
from decoder.kernels.panels import pack_panel, store_vector, transposed
from decoder.kernels.register_tiles import (
    PART,
    PARTS,
    add_incoming,
    add_products,
    load_address,
    store_sums,
    zero_sums,
)
from decoder.kernels.sets import Bfloat16Storage, Float8Storage, Float16Storage, Int8Storage, storage
from decoder.kernels.stored_rows import stored_bytes

_I64 = ir.IntType(64)
_LINE: Final = 64
_REGISTER: Final = 32
CHUNK: Final = 16 * _REGISTER  # bytes of a panel that 32 packed bytes of sixteen rows become


class _Form(NamedTuple):
    """How elements of a storage lie in a panel: bytes of a stored and of a packed one, how a packed one is loaded."""

    stored: int
    packed: int
    load: Callable[[Any, Any], Any]


def _load(kind: Any, widen: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def load(builder: Any, address: Any) -> Any:
        vector = ir.VectorType(kind, PART.count)
        return widen(builder, builder.load(builder.inttoptr(address, vector.as_pointer()), align=1))

    return load


def _widen_bf16(builder: Any, raw: Any) -> Any:
    words = ir.VectorType(ir.IntType(32), PART.count)
    return builder.bitcast(builder.shl(builder.zext(raw, words), ir.Constant(words, [16] * PART.count)), PART)


def _widen_int8(builder: Any, raw: Any) -> Any:
    return builder.sitofp(builder.sext(raw, ir.VectorType(ir.IntType(32), PART.count)), PART)


_load_f16 = _load(ir.HalfType(), lambda builder, raw: builder.fpext(raw, PART))
FORMS: Final[dict[type, _Form]] = {
    Float16Storage: _Form(2, 2, _load_f16),
    Bfloat16Storage: _Form(2, 2, _load(ir.IntType(16), _widen_bf16)),
    Int8Storage: _Form(1, 1, _load(ir.IntType(8), _widen_int8)),
    Float8Storage: _Form(1, 2, _load_f16),
}
"""Storages whose keys are packed this way, where registers have eight lanes."""


def packed_by_halves(kind: type) -> bool:
    """Whether panels of keys of a storage are packed and multiplied by halves of registers on this CPU."""
    return PARTS == 2 and kind in FORMS


def _load_rows(builder: Any, form: _Form, source: Any, stride: Any, first: int, count: int, size: int) -> list[Any]:
    """`size` elements of each of `count` rows from the `first` on, as they are packed."""
    kind = ir.VectorType(ir.IntType(8 * form.stored), size)
    rows = []
    for row in range(first, first + count):
        address = builder.add(source, builder.mul(stride, _I64(row)))
        vector = builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)
        rows.append(simd.emit_e4m3_as_f16(builder, vector) if form.packed > form.stored else vector)
    return rows


def _chunk(name: str, form: _Form, halves: int) -> Any:
    """A chunk of a panel, of 32 packed bytes of each row, or of the first 16 where `halves` is 1."""
    width = 16 // form.packed

    def emit(builder: Any, args: Any) -> None:
        source, stride, target = args
        for first in range(0, simd.LANES, width):
            rows = _load_rows(builder, form, source, stride, first, width, halves * width)
            for column, vector in enumerate(transposed(builder, rows)):
                store_vector(builder, target, (first + column) * _REGISTER, vector)

    return function(f"chunk_{name}_{halves}", 3, emit)


def _packed(name: str, form: _Form) -> Any:
    whole, half = _chunk(name, form, 2), _chunk(name, form, 1)
    size, stored = 32 // form.packed, form.stored

    @made_kernel(name)
    def pack(source: int, stride: int, head_dim: int, target: int) -> None:
        column = 0
        while column + size <= head_dim:
            whole(source + column * stored, stride, target)
            target += CHUNK
            column += size
        if column < head_dim:
            half(source + column * stored, stride, target)

    return pack


_PACKED: Final = {kind: _packed(kind.__name__, form) for kind, form in FORMS.items()}


def half_tile(form: _Form) -> Callable[[Any, int, int, Any], None]:
    """As `run_tiles._panel_tile`, of panels that were packed here."""
    width = 16 // form.packed
    shift = width.bit_length() - 1
    apart = _LINE // (16 * form.stored)  # steps of one line

    def emit(builder: Any, rows: int, vectors: int, args: Any) -> None:
        a, a_row, b, b_vector, steps, ahead, c, c_row = args
        a_rows = [builder.add(a, builder.mul(a_row, _I64(row))) for row in range(rows)]
        wanted = [load_address(builder, ahead, vector) for vector in range(vectors)]
        first = zero_sums(rows, vectors)
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        step, results = builder.phi(_I64), [builder.phi(value.type) for value in first]
        sums = results
        # Two turns of a loop read one chunk, the lower and the upper parts of its registers.
        upper = builder.shl(builder.and_(builder.lshr(step, _I64(shift)), _I64(1)), _I64(4))
        chunk = builder.add(b, builder.add(builder.mul(builder.lshr(step, _I64(shift + 1)), _I64(CHUNK)), upper))
        starts = [builder.add(chunk, builder.mul(b_vector, _I64(vector))) for vector in range(vectors)]
        for turn in range(width):
            here = builder.add(step, _I64(turn))
            x = builder.shl(here, _I64(2))
            for vector in range(turn % apart, vectors, apart):  # each asks for a line, in turns
                line = builder.mul(builder.sub(here, _I64(turn % apart)), _I64(16 * form.stored))
                simd._emit_prefetch(builder, builder.add(wanted[vector], line))
            results = add_products(
                builder, rows, vectors, results, partial(_number, builder, a_rows, x),
                partial(_parts, builder, form, starts, turn),
            )  # fmt: skip
        following = builder.add(step, _I64(width))
        add_incoming([(step, _I64(0), following), *zip(sums, first, results, strict=True)], before, loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
        builder.position_at_end(after)
        store_sums(builder, rows, vectors, results, c, c_row)

    return emit


def _number(builder: Any, starts: list[Any], offset: Any, row: int) -> Any:
    return builder.add(starts[row], offset)


def _parts(builder: Any, form: _Form, starts: list[Any], turn: int, vector: int) -> list[Any]:
    """Sixteen keys of one step: by eights in registers of their own, or beside each other where a part has them all."""
    apart = PART.count * (_REGISTER if form.packed == 2 else 1)
    offsets = [turn * _REGISTER + part * apart for part in range(PARTS)]
    return [form.load(builder, builder.add(starts[vector], _I64(offset))) for offset in offsets]


def pack_keys(kernels: Any, source: int, stride: int, head_dim: int, target: int) -> None:
    """Sixteen rows of stored elements, `stride` bytes apart at `source`, as a panel for `product_of_panels`."""
    raise NotImplementedError("compiled code only")


@variant(pack_keys)
def _pack_keys(kernels: Any, source: Any, stride: Any, head_dim: Any, target: Any) -> Any:
    if packed_by_halves(storage(kernels)):
        pack = _PACKED[storage(kernels)]
        return lambda kernels, source, stride, head_dim, target: pack(source, stride, head_dim, target)
    return lambda kernels, source, stride, head_dim, target: pack_panel(kernels, source, stride, head_dim, target)


def panel_bytes(kernels: Any, head_dim: int) -> int:
    """Bytes of a panel that `pack_keys` makes."""
    raise NotImplementedError("compiled code only")


@variant(panel_bytes)
def _panel_bytes(kernels: Any, head_dim: Any) -> Any:
    if packed_by_halves(storage(kernels)):
        size = 32 // FORMS[storage(kernels)].packed
        return lambda kernels, head_dim: (head_dim + size - 1) // size * CHUNK
    return lambda kernels, head_dim: head_dim * 16 * stored_bytes(kernels)
