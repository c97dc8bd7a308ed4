"""Inputs of products with weights in groups: 32 numbers of a row, and behind them the sums of each half of the 32.

Numbers of weights are read where they lie in a word (`grouped_weights.py`), up to 2**16 times as large; the inputs that
they are multiplied with are as much smaller, which is exact above 2**-110. Called by `rows.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from decoder.kernels import simd
from decoder.kernels.compiled import kernel

GROUP: Final = 32  # inputs, and weights of a column that share a scale
INPUT_BYTES: Final = 144  # of a group of a row
SUMS_AT: Final = GROUP * 4
BYTE_SHIFTS: Final = (0, 8, 16, 0)  # how far up in a word the numbers of four consecutive inputs lie when they are read


def _moved(sign: int) -> Any:
    factors = ir.Constant(
        ir.VectorType(ir.FloatType(), simd.LANES), [2.0 ** (sign * shift) for shift in BYTE_SHIFTS] * 4
    )
    return simd._operation(simd.FLOATS, (simd.FLOATS,), lambda builder, vector: builder.fmul(vector, factors))


_down, _up = _moved(-1), _moved(1)


@kernel
def _place(base: int, row: int, column: int, columns: int) -> int:
    return base + (row * (columns // GROUP) + column // GROUP) * INPUT_BYTES


@kernel
def store_group_input(base: int, row: int, column: int, columns: int, vector: Any) -> None:
    """Sixteen elements from `column` on, a multiple of 16, and their sum."""
    group, half = _place(base, row, column, columns), column & 16
    simd.store_floats(group + half * 4, _down(vector))
    simd.store_float(group + SUMS_AT + half // 4, simd.reduce_add(vector))


@kernel
def load_group_input(base: int, row: int, column: int, columns: int) -> Any:
    """Sixteen elements as they were stored."""
    return _up(simd.load_floats(_place(base, row, column, columns) + (column & 16) * 4))
