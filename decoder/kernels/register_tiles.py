"""Products of a few rows by a few vectors whose sums stay in registers: the inner loop of attention without AMX.

A row's numbers are spread over lanes one by one; each vector is loaded once and used by all rows. Sums are added step
by step, in order, whatever the shape of the tile and of the registers, so a sum does not depend on what is computed
beside it. `float_product` is called by `attention_rows.py`; `run_tiles.py` has those for stored elements.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from llvmlite import ir

from decoder.kernels import simd
from decoder.kernels.compiled import defined, function, kernel
from decoder.kernels.registers import VECTORS

_I64 = ir.IntType(64)
PARTS: Final = 2 if VECTORS < 32 else 1
PART = ir.VectorType(ir.FloatType(), simd.LANES // PARTS)
_FMA: Final = f"llvm.fma.v{PART.count}f32"


def wide(rows: int) -> int:
    """Vectors beside each other in a tile of so many rows: sums take three quarters of the registers at most."""
    return next(count for count in (4, 2, 1) if count == 1 or rows * count <= VECTORS * 3 // 4)


_ROWS: Final = (6, 4, 3, 2, 1)  # of a tile
_WIDE: Final = (1, *(wide(rows) for rows in range(1, 7)))


def _part(builder: Any, vector: Any, part: int) -> Any:
    """Those lanes of a vector that one register holds."""
    first = part * PART.count
    order = ir.Constant(ir.VectorType(ir.IntType(32), PART.count), list(range(first, first + PART.count)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)


def split(builder: Any, vector: Any) -> list[Any]:
    """The parts of a vector, each in a register of its own."""
    return [_part(builder, vector, part) for part in range(PARTS)]


def load_address(builder: Any, entries: Any, index: int) -> Any:
    """The `index`-th address of the list at `entries`."""
    place = builder.add(entries, _I64(8 * index))
    return builder.load(builder.inttoptr(place, _I64.as_pointer()), align=8)


def _splat(builder: Any, address: Any) -> Any:
    return _part(builder, simd._emit_splat_f32(builder, address), 0)


def add_products(
    builder: Any,
    rows: int,
    vectors: int,
    sums: list[Any],
    number: Callable[[int], Any],
    parts_of: Callable[[int], list[Any]],
) -> list[Any]:
    """`sums` [row, vector, part] plus the products of each row's number, spread, with each vector's parts."""
    results: list[Any] = [None] * len(sums)

    def add(row: int, index: int, part: int, x: Any, y: Any) -> None:
        place = (row * vectors + index) * PARTS + part
        results[place] = simd._call(builder, _FMA, PART, [x, y, sums[place]])

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


def add_incoming(phis: list[tuple[Any, Any, Any]], outside: Any, again: Any) -> None:
    """Give each phi its value from before a loop and that from the loop's end."""
    for phi, first, later in phis:
        phi.add_incoming(first, outside)
        phi.add_incoming(later, again)


def zero_sums(rows: int, vectors: int) -> list[Any]:
    """Sums of `rows` by `vectors` vectors, in parts, before the first step."""
    return [ir.Constant(PART, [0.0] * PART.count)] * (rows * vectors * PARTS)


def load_sums(builder: Any, rows: int, vectors: int, c: Any, c_row: Any) -> list[Any]:
    """The sums that `store_sums` has written."""
    return [builder.load(place, align=4) for place in _places(builder, rows, vectors, c, c_row)]


def _places(builder: Any, rows: int, vectors: int, c: Any, c_row: Any) -> list[Any]:
    places = []
    for row, vector, part in itertools.product(range(rows), range(vectors), range(PARTS)):
        offset = builder.add(builder.mul(c_row, _I64(row)), _I64(vector * 64 + part * PART.count * 4))
        places.append(builder.inttoptr(builder.add(c, offset), PART.as_pointer()))
    return places


def store_sums(builder: Any, rows: int, vectors: int, sums: list[Any], c: Any, c_row: Any) -> None:
    """Write sums [row, vector, part] as rows of float32 at `c`, `c_row` bytes apart."""
    for value, place in zip(sums, _places(builder, rows, vectors, c, c_row), strict=True):
        builder.store(value, place, align=4)


def tiles(name: str, operands: int, emit_tile: Callable[[Any, int, int, Any], None]) -> Any:
    """An intrinsic of rows, vectors (`wide(rows)` or 1) and `operands` more, whose tiles `emit_tile` makes.

    Each shape is a function of its own: `emit_tile(builder, rows, vectors, operands)`.
    """

    def emit(builder: Any, args: Any) -> None:
        rows, vectors, *others = args
        done = builder.append_basic_block()
        choice = builder.switch(builder.add(builder.mul(rows, _I64(8)), vectors), done)
        for shape in sorted({(size, count) for size in _ROWS for count in (wide(size), 1)}):
            case = builder.append_basic_block()
            choice.add_case(_I64(shape[0] * 8 + shape[1]), case)
            builder.position_at_end(case)
            tile = f"{name}_{shape[0]}x{shape[1]}"
            builder.call(defined(builder.module, tile, operands, partial(_emit_shape, emit_tile, shape)), others)
            builder.branch(done)
        builder.position_at_end(done)

    return function(name, operands + 2, emit)


def _emit_shape(emit_tile: Callable[..., None], shape: tuple[int, int], builder: Any, args: Any) -> None:
    emit_tile(builder, *shape, args)


@kernel
def rows_at_once(left: int) -> int:
    """Rows of the next tile, one of _ROWS, where `left` rows are left."""
    if left == 6 or left > 8:
        return 6
    if left == 4 or left > 6:
        return 4
    return min(left, 3)


@kernel
def vectors_at_once(rows: int, left: int) -> int:
    """Vectors of the next tile of so many rows, where `left` vectors are left."""
    return _WIDE[rows] if _WIDE[rows] <= left else 1


def _emit_tile(builder: Any, rows: int, vectors: int, args: Any) -> None:
    """c[rows, vectors * 16] = a[rows, steps] by b[steps, vectors * 16], float32; at least one step."""
    a, a_row, b, b_step, b_vector, steps, c, c_row = args
    a_rows = [builder.add(a, builder.mul(a_row, _I64(row))) for row in range(rows)]
    b_vectors = [builder.add(b, builder.mul(b_vector, _I64(vector))) for vector in range(vectors)]
    first = zero_sums(rows, vectors)
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    step, offset = builder.phi(_I64), builder.phi(_I64)
    sums = [builder.phi(value.type) for value in first]
    results = add_products(
        builder, rows, vectors, sums,
        lambda row: builder.add(a_rows[row], builder.shl(step, _I64(2))),
        lambda vector: split(builder, simd._emit_load_f32(builder, builder.add(b_vectors[vector], offset))),
    )  # fmt: skip
    following = builder.add(step, _I64(1))
    further = builder.add(offset, b_step)
    add_incoming(
        [(step, _I64(0), following), (offset, _I64(0), further), *zip(sums, first, results, strict=True)], before, loop
    )
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
    builder.position_at_end(after)
    store_sums(builder, rows, vectors, results, c, c_row)


_tile = tiles("tile", 8, _emit_tile)


@kernel
def float_product(
    a: int, a_row: int, rows: int, b: int, b_step: int, b_vector: int, vectors: int, steps: int, c: int, c_row: int
) -> None:
    """c[rows, vectors * 16] = a[rows, steps] by b[steps, vectors * 16], float32; at least one step.

    `a_row` and `c_row` are bytes between rows, `b_step` and `b_vector` between steps and between vectors.
    """
    row = 0
    while row < rows:
        size, vector = rows_at_once(rows - row), 0
        while vector < vectors:
            count = vectors_at_once(size, vectors - vector)
            _tile(
                size, count, a + row * a_row, a_row, b + vector * b_vector, b_step, b_vector, steps,
                c + row * c_row + vector * 64, c_row,
            )  # fmt: skip
            vector += count
        row += size
