"""Products of a few rows by a few vectors whose sums stay in registers: the inner loop of attention without AMX.

A row's numbers are spread over lanes one by one; each vector is loaded once, widened where it is stored narrow, and
used by all rows. Sums are added step by step, in order, whatever the shape of the tile and of the registers, so a sum
does not depend on what is computed beside it. Called by `attention_rows.py` and `attention_alone.py`; products over
rows that lie in runs, apart from each other, are `run_tiles.py`'s.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from decoder.kernels import simd
from decoder.kernels.compiled import function, kernel, made_kernel, variant
from decoder.kernels.registers import VECTORS
from decoder.kernels.sets import Bfloat16Storage, Float8Storage, Float16Storage, Float32Storage, Int8Storage, storage

_I64 = ir.IntType(64)
PARTS: Final = 2 if VECTORS < 32 else 1
_PART = ir.VectorType(ir.FloatType(), simd.LANES // PARTS)
_FMA: Final = f"llvm.fma.v{_PART.count}f32"


def wide(rows: int) -> int:
    """Vectors beside each other in a tile of so many rows: sums take three quarters of the registers at most."""
    return next(count for count in (4, 2, 1) if count == 1 or rows * count <= VECTORS * 3 // 4)


def _part(builder: Any, vector: Any, part: int) -> Any:
    """Those lanes of a vector that one register holds."""
    first = part * _PART.count
    order = ir.Constant(ir.VectorType(ir.IntType(32), _PART.count), list(range(first, first + _PART.count)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)


def _splat(builder: Any, address: Any) -> Any:
    return _part(builder, simd._emit_splat_f32(builder, address), 0)


def add_products(
    builder: Any, rows: int, vectors: int, sums: list[Any], number: Callable[[int], Any], vector: Callable[[int], Any]
) -> list[Any]:
    """`sums` [row, vector, part] plus the products of each row's number, spread, with each vector."""
    results: list[Any] = [None] * len(sums)

    def parts_of(index: int) -> list[Any]:
        loaded = vector(index)
        return [_part(builder, loaded, part) for part in range(PARTS)]

    def add(row: int, index: int, part: int, x: Any, y: Any) -> None:
        place = (row * vectors + index) * PARTS + part
        results[place] = simd._call(builder, _FMA, _PART, [x, y, sums[place]])

    # The fewer operands are held, the others come one by one: both do not fit beside the sums.
    if rows > vectors * PARTS:
        held = [parts_of(index) for index in range(vectors)]
        for row in range(rows):
            x = _splat(builder, number(row))
            for index, part in itertools.product(range(vectors), range(PARTS)):
                add(row, index, part, x, held[index][part])
    else:
        numbers = [_splat(builder, number(row)) for row in range(rows)]
        for index in range(vectors):
            for part, y in enumerate(parts_of(index)):
                for row, x in enumerate(numbers):
                    add(row, index, part, x, y)
    return results


def zero_sums(rows: int, vectors: int) -> list[Any]:
    """Sums of `rows` by `vectors` vectors, in parts, before the first step."""
    return [ir.Constant(_PART, [0.0] * _PART.count)] * (rows * vectors * PARTS)


def store_sums(builder: Any, rows: int, vectors: int, sums: list[Any], c: Any, c_row: Any) -> None:
    """Write sums [row, vector, part] as rows of float32 at `c`, `c_row` bytes apart."""
    for place, (row, vector, part) in enumerate(itertools.product(range(rows), range(vectors), range(PARTS))):
        offset = builder.add(builder.mul(c_row, _I64(row)), _I64(vector * 64 + part * _PART.count * 4))
        pointer = builder.inttoptr(builder.add(c, offset), _PART.as_pointer())
        builder.store(sums[place], pointer, align=4)


def _tile(rows: int, vectors: int, load: Callable[[Any, Any], Any]) -> Any:
    """c[rows, vectors * 16] = a[rows, steps] by b[steps, vectors * 16]; at least one step.

    Operands: a, bytes between rows (a step is a float32); b, bytes between steps, between vectors; number of steps; c
    (float32), bytes between rows.
    """

    def emit(builder: Any, args: Any) -> None:
        a, a_row, b, b_step, b_vector, steps, c, c_row = args
        a_rows = [builder.add(a, builder.mul(a_row, _I64(row))) for row in range(rows)]
        b_vectors = [builder.add(b, builder.mul(b_vector, _I64(vector))) for vector in range(vectors)]
        first = zero_sums(rows, vectors)
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        step, offset = builder.phi(_I64), builder.phi(_I64)
        sums = [builder.phi(_PART) for _ in first]
        results = add_products(
            builder, rows, vectors, sums,
            lambda row: builder.add(a_rows[row], builder.shl(step, _I64(2))),
            lambda vector: load(builder, builder.add(b_vectors[vector], offset)),
        )  # fmt: skip
        following = builder.add(step, _I64(1))
        for phi, start, end in (
            (step, _I64(0), following), (offset, _I64(0), builder.add(offset, b_step)),
            *zip(sums, first, results, strict=True),
        ):  # fmt: skip
            phi.add_incoming(start, before)
            phi.add_incoming(end, loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
        builder.position_at_end(after)
        store_sums(builder, rows, vectors, results, c, c_row)

    return function(f"tile_{rows}x{vectors}_{load.__name__}", 8, emit)


def _looped(rows: int, load: Callable[[Any, Any], Any]) -> Any:
    """The same for any number of vectors."""
    count = wide(rows)
    many, one = _tile(rows, count, load), _tile(rows, 1, load)

    @made_kernel(f"{rows}_{load.__name__}")
    def product(
        a: int, a_row: int, b: int, b_step: int, b_vector: int, vectors: int, steps: int, c: int, c_row: int
    ) -> None:
        vector = 0
        while vector + count <= vectors:
            many(a, a_row, b + vector * b_vector, b_step, b_vector, steps, c + vector * 64, c_row)
            vector += count
        while vector < vectors:
            one(a, a_row, b + vector * b_vector, b_step, b_vector, steps, c + vector * 64, c_row)
            vector += 1

    return product


@kernel
def rows_at_once(left: int) -> int:
    """Rows of the next tile, 6, 4, 3, 2 or 1, where `left` rows are left."""
    if left == 6 or left > 8:
        return 6
    if left == 4 or left > 6:
        return 4
    return min(left, 3)


def _any_rows(load: Callable[[Any, Any], Any]) -> Any:
    """The same for any number of rows: `rows` by `vectors`."""
    six, four, three, two, one = (_looped(rows, load) for rows in (6, 4, 3, 2, 1))

    @made_kernel(f"{load.__name__}")
    def product(
        a: int, a_row: int, rows: int, b: int, b_step: int, b_vector: int, vectors: int, steps: int, c: int, c_row: int
    ) -> None:
        row = 0
        while row < rows:
            size, x, y = rows_at_once(rows - row), a + row * a_row, c + row * c_row
            if size == 6:
                six(x, a_row, b, b_step, b_vector, vectors, steps, y, c_row)
            elif size == 4:
                four(x, a_row, b, b_step, b_vector, vectors, steps, y, c_row)
            elif size == 3:
                three(x, a_row, b, b_step, b_vector, vectors, steps, y, c_row)
            elif size == 2:
                two(x, a_row, b, b_step, b_vector, vectors, steps, y, c_row)
            else:
                one(x, a_row, b, b_step, b_vector, vectors, steps, y, c_row)
            row += size

    return product


LOADS: Final[dict[type, Callable[[Any, Any], Any]]] = {
    Float32Storage: simd._emit_load_f32,
    Bfloat16Storage: simd._emit_load_bf16,
    Float16Storage: simd._emit_load_f16,
    Int8Storage: simd._emit_load_int8,
    Float8Storage: simd._emit_load_e4m3,
}
_STORED: Final = {kind: _any_rows(load) for kind, load in LOADS.items()}
float_product = _STORED[Float32Storage]


def stored_product(
    kernels: Any, a: int, a_row: int, rows: int, b: int, b_step: int, b_vector: int, vectors: int, steps: int, c: int,
    c_row: int,
) -> None:  # fmt: skip
    """c[rows, vectors * 16] = a[rows, steps] by elements as keys and values are stored, without their scales."""
    raise NotImplementedError("compiled code only")


@variant(stored_product)
def _stored_product(
    kernels: Any, a: Any, a_row: Any, rows: Any, b: Any, b_step: Any, b_vector: Any, vectors: Any, steps: Any, c: Any,
    c_row: Any,
) -> Any:  # fmt: skip
    product = _STORED[storage(kernels)]
    return lambda kernels, a, a_row, rows, b, b_step, b_vector, vectors, steps, c, c_row: product(
        a, a_row, rows, b, b_step, b_vector, vectors, steps, c, c_row
    )
