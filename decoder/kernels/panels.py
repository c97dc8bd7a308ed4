"""Panels of keys: sixteen rows transposed to [head_dim, 16 keys], element by element as they are stored.

So a product takes sixteen keys as one vector, and few query rows waste no lane. Elements are interleaved within the
128-bit parts of registers; the narrower they are, the fewer steps it takes. With registers of sixteen lanes a whole
cache line of each row is taken at once. Called by `attention_panels.py` and `half_panels.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from decoder.kernels import simd
from decoder.kernels.compiled import function, kernel, made_kernel, variant
from decoder.kernels.registers import VECTORS
from decoder.kernels.sets import Float32Storage, quantized, storage

_I64 = ir.IntType(64)
_LANES = simd.LANES


def _shuffled(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order))


def _interleaving(size: int, width: int, high: bool) -> list[int]:
    """Order of the lower or upper halves of two vectors, element by element, in each part of `width` elements."""
    order = []
    for part in range(0, size, width):
        for element in range(width // 2):
            place = part + element + (width // 2 if high else 0)
            order += [place, place + size]
    return order


def _joined(builder: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        order = list(range(parts[0].type.count * 2))
        parts = [_shuffled(builder, a, b, order) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def transposed(builder: Any, vectors: list[Any]) -> list[Any]:
    """Each 128-bit part of as many vectors as it has elements, transposed: vector c has the c-th element of each."""
    width, size = len(vectors), vectors[0].type.count
    low, high, half = _interleaving(size, width, False), _interleaving(size, width, True), width // 2
    for _ in range(width.bit_length() - 1):
        vectors = [
            _shuffled(builder, vectors[index // 2], vectors[index // 2 + half], high if index % 2 else low)
            for index in range(width)
        ]
    return vectors


def _load(builder: Any, source: Any, stride: Any, row: int, kind: Any) -> Any:
    address = builder.add(source, builder.mul(stride, _I64(row)))
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store_vector(builder: Any, target: Any, offset: int, vector: Any) -> None:
    address = builder.add(target, _I64(offset))
    builder.store(vector, builder.inttoptr(address, vector.type.as_pointer()), align=1)


def _columns(bits: int) -> Any:
    """Columns, one after the other at `target`, of 128 bits of each of sixteen rows that lie `stride` bytes apart."""
    width = 128 // bits
    chunk = ir.VectorType(ir.IntType(bits), width)

    def emit(builder: Any, args: Any) -> None:
        source, stride, target = args
        rows = [_load(builder, source, stride, row, chunk) for row in range(_LANES)]
        vectors = [_joined(builder, rows[first::width]) for first in range(width)]
        for column, vector in enumerate(transposed(builder, vectors)):
            store_vector(builder, target, column * 2 * bits, vector)

    return function(f"columns_{bits}", 3, emit)


def _line_columns(bits: int, asking: bool = False) -> Any:
    """The same of a line of each row: its four 128-bit parts are transposed beside each other.

    With `asking` a fourth operand is the address of as many lines as the panel takes, of which half are asked for.
    """
    width = 128 // bits
    chunk = ir.VectorType(ir.IntType(bits), 4 * width)

    def emit(builder: Any, args: Any) -> None:
        source, stride, target, *ahead = args
        rows = []
        for row in range(_LANES):
            rows.append(_load(builder, source, stride, row, chunk))
            if ahead and row % 2:
                simd._emit_prefetch(builder, builder.add(ahead[0], _I64(row // 2 * 64)))
        groups = [transposed(builder, rows[first : first + width]) for first in range(0, _LANES, width)]
        for column, parts in enumerate(zip(*groups, strict=True)):
            for part, vector in _by_part(builder, parts, width):
                store_vector(builder, target, (part * width + column) * 2 * bits, vector)

    return function(f"line_columns_{bits}{'_asking' * asking}", 3 + asking, emit)


def _by_part(builder: Any, vectors: tuple[Any, ...], width: int) -> list[tuple[int, Any]]:
    """(part, that 128-bit part of each vector, joined) for four parts."""
    size = 4 * width
    whole = list(range(size))

    def places(part: int, vector: int) -> list[int]:
        return [vector * size + part * width + element for element in range(width)]

    if len(vectors) == 1:
        return [(part, _shuffled(builder, *vectors, *vectors, places(part, 0))) for part in range(4)]
    found = []
    for first in (0, 2):
        order = [place for part in (first, first + 1) for vector in range(2) for place in places(part, vector)]
        pairs = [_shuffled(builder, a, b, order) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        for half in range(2):
            part = whole[half * size // 2 : (half + 1) * size // 2]
            if len(pairs) == 1:
                found.append((first + half, _shuffled(builder, *pairs, *pairs, part)))
            else:
                found.append((first + half, _shuffled(builder, *pairs, part + [place + size for place in part])))
    return found


def _panel(bits: int) -> Any:
    columns, width = _columns(bits), 128 // bits
    many = 4 * width if VECTORS >= 32 else width
    wider = _line_columns(bits) if many > width else columns

    @made_kernel(str(bits))
    def panel(source: int, stride: int, head_dim: int, target: int) -> None:
        column = 0
        while column + many <= head_dim:
            wider(source + column * bits // 8, stride, target + column * 2 * bits)
            column += many
        while column < head_dim:
            columns(source + column * bits // 8, stride, target + column * 2 * bits)
            column += width

    return panel


_PANELS: Final = {num_bytes: _panel(num_bytes * 8) for num_bytes in (1, 2, 4)}

# (source, stride, words, target): sixteen rows of 32-bit words, `stride` bytes apart, as [words, 16].
pack_words: Final = _PANELS[4]
_word_columns, _word_lines = _columns(32), _line_columns(32, asking=True)


@kernel
def pack_words_asking(source: int, stride: int, words: int, target: int, ahead: int) -> None:
    """As `pack_words`; meanwhile half of as many bytes as are packed, those at `ahead`, are asked for."""
    column = 0
    while column + 16 <= words:
        _word_lines(source + column * 4, stride, target + column * 64, ahead + column * 32)
        column += 16
    while column < words:
        simd.prefetch(ahead + column * 32)
        simd.prefetch(ahead + column * 32 + 64)
        _word_columns(source + column * 4, stride, target + column * 64)
        column += 4


def pack_panel(kernels: Any, source: int, stride: int, head_dim: int, target: int) -> None:
    """Sixteen rows of stored elements, `stride` bytes apart at `source`, as [head_dim, 16] at `target`."""
    raise NotImplementedError("compiled code only")


@variant(pack_panel)
def _pack_panel(kernels: Any, source: Any, stride: Any, head_dim: Any, target: Any) -> Any:
    panel = _PANELS[1 if quantized(kernels) else 4 if storage(kernels) is Float32Storage else 2]
    return lambda kernels, source, stride, head_dim, target: panel(source, stride, head_dim, target)
