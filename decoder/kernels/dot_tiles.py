"""Register tiles of dot products: a few rows by a few vectors of pairs of bfloat16, whose sums stay in registers.

A row's pairs are spread over lanes one by one; each vector of pairs is loaded once and used by all rows. Sums are added
pair by pair, in order, whatever the shape of the tile, so a sum does not depend on what is computed beside it. Tiles
take 1, 2, 3, 4 or 6 rows and 1, 2 or 4 vectors, their first two operands. Called by `dot_products.py`.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from llvmlite import ir

from decoder.kernels import simd
from decoder.kernels.compiled import defined, function
from decoder.kernels.dots import emit_dot, emit_interleave
from decoder.kernels.register_tiles import add_incoming, load_address

_I64, _I32 = ir.IntType(64), ir.IntType(32)
_VI16, _VI32 = ir.VectorType(ir.IntType(16), simd.LANES), ir.VectorType(_I32, simd.LANES)
_VF32 = ir.VectorType(ir.FloatType(), simd.LANES)
_ROWS: Final = (1, 2, 3, 4, 6)  # of a tile: what `rows_at_once` gives
_VECTORS: Final = (1, 2, 4)
_LINE: Final = 64
_PLACE: Final = 8  # bytes of an address in a list of runs
_Emit = Callable[[Any, int, int, Any], None]


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


def _apart(builder: Any, start: Any, distance: Any, count: int) -> list[Any]:
    return [builder.add(start, builder.mul(distance, _I64(index))) for index in range(count)]


def _places(builder: Any, rows: int, vectors: int, c: Any, c_row: Any) -> list[Any]:
    return [
        builder.inttoptr(builder.add(start, _I64(vector * _LINE)), _VF32.as_pointer())
        for start in _apart(builder, c, c_row, rows)
        for vector in range(vectors)
    ]


def _add_dots(builder: Any, a_rows: list[Any], offset: Any, words: list[Any], sums: list[Any]) -> list[Any]:
    """`sums` [row, vector] plus the products of each row's pair with each vector's."""
    results = []
    for row, start in enumerate(a_rows):
        pair = simd._emit_splat(builder, _load(builder, builder.add(start, offset), _I32), _VI32)
        for vector, word in enumerate(words):
            results.append(emit_dot(builder, pair, word, sums[row * len(words) + vector]))
    return results


def _store(builder: Any, places: list[Any], sums: list[Any]) -> None:
    for place, value in zip(places, sums, strict=True):
        builder.store(value, place, align=4)


def _packed_tile(builder: Any, rows: int, vectors: int, args: Any) -> None:
    """c[rows, vectors * 16] = a[rows, steps] by b[steps, vectors * 16], of pairs; at least one step."""
    a, a_row, b, b_step, b_vector, steps, c, c_row = args
    a_rows, b_vectors = _apart(builder, a, a_row, rows), _apart(builder, b, b_vector, vectors)
    first = [ir.Constant(_VF32, [0.0] * simd.LANES)] * (rows * vectors)
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    step, offset, sums = builder.phi(_I64), builder.phi(_I64), [builder.phi(_VF32) for _ in first]
    words = [_load(builder, builder.add(start, offset), _VI32) for start in b_vectors]
    results = _add_dots(builder, a_rows, builder.shl(step, _I64(2)), words, sums)
    following = builder.add(step, _I64(1))
    add_incoming(
        [
            (step, _I64(0), following),
            (offset, _I64(0), builder.add(offset, b_step)),
            *zip(sums, first, results, strict=True),
        ],
        before, loop,
    )  # fmt: skip
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
    builder.position_at_end(after)
    _store(builder, _places(builder, rows, vectors, c, c_row), results)


def _asking_tile(builder: Any, rows: int, vectors: int, args: Any) -> None:
    """c[rows, vectors * 16] = a[rows, steps] by panels [vector][step][16], of pairs; `steps` is even.

    `ahead` is the address of a list of runs, one for each vector, whose second halves are asked for: a line each two
    steps.
    """
    a, a_row, b, b_vector, steps, ahead, c, c_row = args
    a_rows, b_vectors = _apart(builder, a, a_row, rows), _apart(builder, b, b_vector, vectors)
    half = builder.shl(steps, _I64(5))
    wanted = [builder.add(load_address(builder, ahead, vector), half) for vector in range(vectors)]
    first = [ir.Constant(_VF32, [0.0] * simd.LANES)] * (rows * vectors)
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    step, sums = builder.phi(_I64), [builder.phi(_VF32) for _ in first]
    results, line = sums, builder.shl(step, _I64(5))
    for start in wanted:
        simd._emit_prefetch(builder, builder.add(start, line))
    for turn in range(2):
        here = builder.add(step, _I64(turn))
        words = [_load(builder, builder.add(start, builder.shl(here, _I64(6))), _VI32) for start in b_vectors]
        results = _add_dots(builder, a_rows, builder.shl(here, _I64(2)), words, results)
    following = builder.add(step, _I64(2))
    add_incoming([(step, _I64(0), following), *zip(sums, first, results, strict=True)], before, loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
    builder.position_at_end(after)
    _store(builder, _places(builder, rows, vectors, c, c_row), results)


def _words_of_rows(builder: Any, even: Any, odd: Any, vectors: int) -> list[Any]:
    """Two rows of bfloat16 as vectors of pairs."""
    if vectors == 1:
        low, high = (builder.zext(_load(builder, row, _VI16), _VI32) for row in (even, odd))
        return [builder.or_(low, builder.shl(high, ir.Constant(_VI32, [16] * simd.LANES)))]
    words = []
    for line in range(vectors // 2):
        first, second = (_load(builder, builder.add(row, _I64(line * _LINE)), _VI32) for row in (even, odd))
        words += [emit_interleave(builder, first, second, upper) for upper in (False, True)]
    return words


def _run_tile(builder: Any, rows: int, vectors: int, args: Any) -> None:
    """c[rows, vectors * 16] += a[rows, begin to end] by the same pairs of rows of the runs, `b_step` bytes a pair.

    `skip` is the bytes from a row's start to the vectors, `ahead` those in the list to the run to ask for.
    """
    a, a_row, runs, skip, b_step, begin, end, ahead, c, c_row = args
    a_rows, places = _apart(builder, a, a_row, rows), _places(builder, rows, vectors, c, c_row)
    first, b_row = [builder.load(place, align=4) for place in places], builder.ashr(b_step, _I64(1))
    entry, run, loop, over, after = builder.block, *(builder.append_basic_block() for _ in range(4))
    builder.branch(run)

    builder.position_at_end(run)
    start, before = builder.phi(_I64), [builder.phi(_VF32) for _ in first]
    place = builder.add(runs, builder.mul(builder.ashr(start, _I64(3)), _I64(_PLACE)))
    here = load_address(builder, place, 0)
    apart = builder.sub(load_address(builder, builder.add(place, ahead), 0), here)
    inside = builder.mul(builder.and_(start, _I64(7)), b_step)
    source = builder.add(builder.add(here, skip), inside)
    whole = builder.add(builder.or_(start, _I64(7)), _I64(1))
    stop = builder.select(builder.icmp_signed("<", whole, end), whole, end)
    builder.branch(loop)

    builder.position_at_end(loop)
    step, even, sums = builder.phi(_I64), builder.phi(_I64), [builder.phi(_VF32) for _ in first]
    odd = builder.add(even, b_row)
    for row in (even, odd):
        for offset in range(0, vectors * 32, _LINE):
            simd._emit_prefetch(builder, builder.add(builder.add(row, apart), _I64(offset)))
    words = _words_of_rows(builder, even, odd, vectors)
    results = _add_dots(builder, a_rows, builder.shl(step, _I64(2)), words, sums)
    following, further = builder.add(step, _I64(1)), builder.add(even, b_step)
    add_incoming(
        [(step, start, following), (even, source, further), *zip(sums, before, results, strict=True)], run, loop
    )
    builder.cbranch(builder.icmp_signed("<", following, stop), loop, over)

    builder.position_at_end(over)
    add_incoming([(start, begin, stop), *zip(before, first, results, strict=True)], entry, over)
    builder.cbranch(builder.icmp_signed("<", stop, end), run, after)
    builder.position_at_end(after)
    _store(builder, places, results)


def _shaped(emit_tile: _Emit, rows: int, vectors: int, builder: Any, args: Any) -> None:
    emit_tile(builder, rows, vectors, args)


def _tiles(name: str, operands: int, emit_tile: _Emit) -> Any:
    """An intrinsic of rows, vectors and `operands` more, each shape a function of its own."""

    def emit(builder: Any, args: Any) -> None:
        rows, vectors, *others = args
        done = builder.append_basic_block()
        choice = builder.switch(builder.add(builder.mul(rows, _I64(8)), vectors), done)
        for size in _ROWS:
            for count in _VECTORS:
                case = builder.append_basic_block()
                choice.add_case(_I64(size * 8 + count), case)
                builder.position_at_end(case)
                code = partial(_shaped, emit_tile, size, count)
                builder.call(defined(builder.module, f"{name}_{size}x{count}", operands, code), others)
                builder.branch(done)
        builder.position_at_end(done)

    return function(name, operands + 2, emit)


packed_tile = _tiles("dots_packed", 8, _packed_tile)
asking_tile = _tiles("dots_asking", 8, _asking_tile)
run_tile = _tiles("dots_runs", 10, _run_tile)
