"""Panels of keys: sixteen rows transposed to [head_dim, 16 keys], element by element as they are stored.

So a product takes sixteen keys as one vector, and few query rows waste no lane. Elements are interleaved within the
128-bit parts of registers; the narrower they are, the fewer steps it takes. Called by `attention_rows.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from decoder.kernels import simd
from decoder.kernels.compiled import function, made_kernel, variant
from decoder.kernels.sets import Float32Storage, quantized, storage

_I64 = ir.IntType(64)
_LANES = simd.LANES


def _interleaving(width: int, high: bool) -> ir.Constant:
    """Order of the lower or upper halves of two vectors, element by element, in each part of `width` elements."""
    order = []
    for part in range(0, _LANES, width):
        for element in range(width // 2):
            place = part + element + (width // 2 if high else 0)
            order += [place, place + _LANES]
    return ir.Constant(simd._VI32, order)


def _joined(builder: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        size = parts[0].type.count * 2
        order = ir.Constant(ir.VectorType(ir.IntType(32), size), list(range(size)))
        parts = [builder.shuffle_vector(a, b, order) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _columns(bits: int) -> Any:
    """Columns, one after the other at `target`, of 128 bits of each of sixteen rows that lie `stride` bytes apart."""
    width = 128 // bits
    chunk = ir.VectorType(ir.IntType(bits), width)

    def emit(builder: Any, args: Any) -> None:
        source, stride, target = args

        def load(row: int) -> Any:
            address = builder.add(source, builder.mul(stride, _I64(row)))
            return builder.load(builder.inttoptr(address, chunk.as_pointer()), align=1)

        vectors = [_joined(builder, [load(row) for row in range(first, _LANES, width)]) for first in range(width)]
        low, high, half = _interleaving(width, False), _interleaving(width, True), width // 2
        for _ in range(width.bit_length() - 1):
            vectors = [
                builder.shuffle_vector(vectors[index // 2], vectors[index // 2 + half], high if index % 2 else low)
                for index in range(width)
            ]
        for column, vector in enumerate(vectors):
            address = builder.add(target, _I64(column * 2 * bits))
            builder.store(vector, builder.inttoptr(address, vector.type.as_pointer()), align=1)

    return function(f"columns_{bits}", 3, emit)


def _panel(bits: int) -> Any:
    columns, width = _columns(bits), 128 // bits

    @made_kernel(str(bits))
    def panel(source: int, stride: int, head_dim: int, target: int) -> None:
        for column in range(0, head_dim, width):
            columns(source + column * bits // 8, stride, target + column * 2 * bits)

    return panel


_PANELS: Final = {num_bytes: _panel(num_bytes * 8) for num_bytes in (1, 2, 4)}


def pack_panel(kernels: Any, source: int, stride: int, head_dim: int, target: int) -> None:
    """Sixteen rows of stored elements, `stride` bytes apart at `source`, as [head_dim, 16] at `target`."""
    raise NotImplementedError("compiled code only")


@variant(pack_panel)
def _pack_panel(kernels: Any, source: Any, stride: Any, head_dim: Any, target: Any) -> Any:
    panel = _PANELS[1 if quantized(kernels) else 4 if storage(kernels) is Float32Storage else 2]
    return lambda kernels, source, stride, head_dim, target: panel(source, stride, head_dim, target)
