"""How stored bytes are multiplied, by storage: int8 as bytes, fp8 e4m3 as the pairs of bfloat16 that they become.

Called by `byte_tiles.py` and `byte_products.py`.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from llvmlite import ir

from decoder.kernels import byte_dots, byte_pairs, simd
from decoder.kernels.byte_dots import DIGITS
from decoder.kernels.sets import Float8Storage, Int8Storage

_VI32, _VF32 = ir.VectorType(ir.IntType(32), simd.LANES), ir.VectorType(ir.FloatType(), simd.LANES)


class ByteForm(NamedTuple):
    """How bytes of a storage are multiplied.

    most_rows: rows of a tile. sums: digits of a number, each with a sum for each vector. total: what a sum is. terms:
    operands that a vector of words becomes, each for 32 bits of a digit row. keys and values: those operands.
    product(builder, term, spread digits, sum, whether a key's). registers: those that sums of a tile take at most.
    """

    most_rows: int
    sums: int
    total: Any
    terms: int
    keys: Callable[[Any, Any], list[Any]]
    values: Callable[[Any, Any], list[Any]]
    product: Callable[[Any, Any, Any, Any, bool], Any]
    registers: int

    def wide(self, rows: int) -> int:
        """The most vectors of a tile of so many rows."""
        return 4 if rows * self.sums * 4 <= self.registers else 2


def _int8_product(builder: Any, term: Any, digits: Any, total: Any, key: bool) -> Any:
    return byte_dots.emit_dot(builder, *((term, digits) if key else (digits, term)), total)


FORMS: Final[dict[type, ByteForm]] = {
    Int8Storage: ByteForm(
        6, DIGITS, _VI32, 1, lambda builder, words: [byte_dots.emit_offset(builder, words)],
        lambda builder, words: [words], _int8_product, 24,
    ),
    Float8Storage: ByteForm(
        4, 1, _VF32, 2, byte_pairs.emit_pairs, byte_pairs.emit_pairs,
        lambda builder, term, digits, total, key: byte_pairs.emit_product(builder, term, digits, total), 16,
    ),
}  # fmt: skip
"""By storage."""
