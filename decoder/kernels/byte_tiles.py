"""Register tiles of products of stored bytes: a few rows by a few vectors of words, with sums in registers.

A word is an int32 lane of four bytes that are neighbours. A row of numbers is one row or more of digits, and each has
its sums (`byte_forms.py`). Each vector of words is loaded once and used by all rows. Called by
`byte_products.py`.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from llvmlite import ir

from decoder.kernels import byte_dots, simd
from decoder.kernels.byte_dots import DIGITS
from decoder.kernels.byte_forms import ByteForm
from decoder.kernels.compiled import defined, function
from decoder.kernels.register_tiles import add_incoming, load_address

_I64, _I32, _I8 = ir.IntType(64), ir.IntType(32), ir.IntType(8)
_VI32, _VF32 = ir.VectorType(_I32, simd.LANES), ir.VectorType(ir.FloatType(), simd.LANES)
_LINE_BYTES, _PART_BYTES = ir.VectorType(_I8, 4 * simd.LANES), ir.VectorType(_I8, simd.LANES)
_WORDS = ir.VectorType(ir.IntType(16), 2 * simd.LANES)
_LINE: Final = 64
_PLACE: Final = 8  # bytes of an address in a list of runs
_Emit = Callable[[Any, int, int, Any], None]


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _apart(builder: Any, start: Any, distance: Any, count: int) -> list[Any]:
    return [builder.add(start, builder.mul(distance, _I64(index))) for index in range(count)]


def _digit_rows(builder: Any, a: Any, a_row: Any, a_digit: Any, rows: int, digits: int) -> list[Any]:
    """Addresses [row, digit]."""
    return [digit for row in _apart(builder, a, a_row, rows) for digit in _apart(builder, row, a_digit, digits)]


def _spread(builder: Any, address: Any) -> Any:
    return simd._emit_splat(builder, _load(builder, address, _I32), _VI32)


def _added(
    builder: Any, form: ByteForm, places: list[Any], step: Any, terms: list[list[Any]], sums: list[Any], key: bool
) -> list[Any]:
    """`sums` [row, digit, vector] plus products of each digit row's numbers of a step with the vectors' terms."""
    results, vectors = list(sums), len(terms)
    for index, place in enumerate(places):
        first = index * vectors
        for number in range(form.terms):
            offset = builder.add(builder.mul(step, _I64(4 * form.terms)), _I64(4 * number))
            digits = _spread(builder, builder.add(place, offset))
            for vector, words in enumerate(terms):
                total = results[first + vector]
                results[first + vector] = form.product(builder, words[number], digits, total, key)
    return results


def _key_tile(form: ByteForm, asking: bool) -> _Emit:
    """c[rows, vectors * 16] = a[rows, steps] by panels [vector][step][16] of words, as float32 numbers of a's unit.

    `first` is the bytes from a row's start to what its digits' sums begin with, if they are whole numbers: so bytes of
    the panels count as signed. Asking, `ahead` is the address of a list of runs, one for each vector, whose second
    halves are asked for.
    """

    def emit(builder: Any, rows: int, vectors: int, args: Any) -> None:
        a, a_row, a_digit, first, b, b_vector, steps, ahead, c, c_row = args
        places = _digit_rows(builder, a, a_row, a_digit, rows, form.sums)
        b_vectors = _apart(builder, b, b_vector, vectors)
        half = builder.shl(steps, _I64(5))
        wanted = [builder.add(load_address(builder, ahead, vector), half) for vector in range(vectors)] * asking
        begin = [ir.Constant(_VF32, [0.0] * simd.LANES)] * (rows * vectors)
        if form.sums == DIGITS:
            begins = _digit_rows(builder, builder.add(a, first), a_row, _I64(4), rows, form.sums)
            begin = [value for place in begins for value in [_spread(builder, place)] * vectors]
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        step, sums = builder.phi(_I64), [builder.phi(form.total) for _ in begin]
        for start in wanted:
            simd._emit_prefetch(builder, builder.add(start, builder.shl(step, _I64(5))))
        results = sums
        for turn in range(2):
            here = builder.add(step, _I64(turn))
            offset = builder.shl(here, _I64(6))
            terms = [form.keys(builder, _load(builder, builder.add(start, offset), _VI32)) for start in b_vectors]
            results = _added(builder, form, places, here, terms, results, True)
        following = builder.add(step, _I64(2))
        add_incoming([(step, _I64(0), following), *zip(sums, begin, results, strict=True)], before, loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
        builder.position_at_end(after)
        for row, start in enumerate(_apart(builder, c, c_row, rows)):
            for vector in range(vectors):
                found = [results[(row * form.sums + digit) * vectors + vector] for digit in range(form.sums)]
                number = byte_dots.emit_number(builder, found) if form.sums == DIGITS else found[0]
                simd._emit_store_f32(builder, builder.add(start, _I64(vector * _LINE)), number)

    return emit


def _interleaved(builder: Any, x: Any, y: Any, upper: bool) -> Any:
    """Of each 128 bits of two vectors the lower or the upper half of the elements, as neighbours."""
    size = x.type.count
    part = size // 4
    places = [index * part + part // 2 * upper + element for index in range(4) for element in range(part // 2)]
    order = [place + other for place in places for other in (0, size)]
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, size), order))


def _words_of_line(builder: Any, rows: list[Any], halves: tuple[bool, ...]) -> list[Any]:
    """A line of each of four rows as words, an element of all four: two vectors a half (`byte_products.py`)."""
    lines, words = [_load(builder, row, _LINE_BYTES) for row in rows], []
    for half in halves:
        low, high = (
            builder.bitcast(_interleaved(builder, lines[first], lines[first + 1], half), _WORDS) for first in (0, 2)
        )
        words += [builder.bitcast(_interleaved(builder, low, high, part), _VI32) for part in (False, True)]
    return words


def _words_of_part(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen elements of each of four rows as words, in their order."""
    parts = [_load(builder, row, _PART_BYTES) for row in rows]
    wide = list(range(2 * simd.LANES))
    pairs = [
        builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, 32), wide)) for x, y in (parts[:2], parts[2:])
    ]
    order = [16 * row + element for element in range(16) for row in range(4)]
    return [builder.bitcast(builder.shuffle_vector(*pairs, ir.Constant(ir.VectorType(_I32, 64), order)), _VI32)]


def _value_tile(form: ByteForm, kind: str) -> _Emit:
    """c[rows, sums, vectors * 16] += a[rows, begin to end] by the same fours of rows of the runs, `b_row` bytes each.

    `skip` is the bytes from a row's start to the elements, `ahead` those in the list to the run to ask for.
    """

    def emit(builder: Any, rows: int, vectors: int, args: Any) -> None:
        a, a_row, a_digit, runs, skip, b_row, begin, end, ahead, c, c_row, c_digit = args
        digit_rows = _digit_rows(builder, a, a_row, a_digit, rows, form.sums)
        places = [
            builder.inttoptr(builder.add(start, _I64(vector * _LINE)), form.total.as_pointer())
            for row in _apart(builder, c, c_row, rows)
            for start in _apart(builder, row, c_digit, form.sums)
            for vector in range(vectors)
        ]
        first, b_step = [builder.load(place, align=4) for place in places], builder.shl(b_row, _I64(2))
        entry, run, loop, over, after = builder.block, *(builder.append_basic_block() for _ in range(4))
        builder.branch(run)

        builder.position_at_end(run)
        start, before = builder.phi(_I64), [builder.phi(form.total) for _ in first]
        place = builder.add(runs, builder.mul(builder.ashr(start, _I64(2)), _I64(_PLACE)))
        here = load_address(builder, place, 0)
        apart = builder.sub(load_address(builder, builder.add(place, ahead), 0), here)
        source = builder.add(builder.add(here, skip), builder.mul(builder.and_(start, _I64(3)), b_step))
        whole = builder.add(builder.or_(start, _I64(3)), _I64(1))
        stop = builder.select(builder.icmp_signed("<", whole, end), whole, end)
        builder.branch(loop)

        builder.position_at_end(loop)
        step, at, sums = builder.phi(_I64), builder.phi(_I64), [builder.phi(form.total) for _ in first]
        rows_at = _apart(builder, at, b_row, 4)
        if kind != "upper":
            for row in rows_at:
                simd._emit_prefetch(builder, builder.add(row, apart))
        if kind == "part":
            words = _words_of_part(builder, rows_at)
        else:
            halves = {"line": (False, True), "lower": (False,), "upper": (True,)}[kind]
            words = _words_of_line(builder, rows_at, halves)
        terms = [form.values(builder, vector) for vector in words]
        results = _added(builder, form, digit_rows, step, terms, sums, False)
        following, further = builder.add(step, _I64(1)), builder.add(at, b_step)
        add_incoming(
            [(step, start, following), (at, source, further), *zip(sums, before, results, strict=True)], run, loop
        )
        builder.cbranch(builder.icmp_signed("<", following, stop), loop, over)

        builder.position_at_end(over)
        add_incoming([(start, begin, stop), *zip(before, first, results, strict=True)], entry, over)
        builder.cbranch(builder.icmp_signed("<", stop, end), run, after)
        builder.position_at_end(after)
        for place, value in zip(places, results, strict=True):
            builder.store(value, place, align=4)

    return emit


def _shaped(emit_tile: _Emit, rows: int, vectors: int, builder: Any, args: Any) -> None:
    emit_tile(builder, rows, vectors, args)


def _tiles(name: str, operands: int, emit_tile: _Emit, shapes: list[tuple[int, int]]) -> Any:
    """An intrinsic of rows, vectors and `operands` more, each shape a function of its own."""

    def emit(builder: Any, args: Any) -> None:
        rows, vectors, *others = args
        done = builder.append_basic_block()
        choice = builder.switch(builder.add(builder.mul(rows, _I64(8)), vectors), done)
        for size, count in shapes:
            case = builder.append_basic_block()
            choice.add_case(_I64(size * 8 + count), case)
            builder.position_at_end(case)
            code = partial(_shaped, emit_tile, size, count)
            builder.call(defined(builder.module, f"{name}_{size}x{count}", operands, code), others)
            builder.branch(done)
        builder.position_at_end(done)

    return function(name, operands + 2, emit)


class Tiles(NamedTuple):
    """The tiles of a form: keys and keys while asking; values of 64 columns at once where the sums of four vectors fit,
    or of the two halves of them; or of sixteen columns."""

    keys: Any
    asking_keys: Any
    line: Any
    lower: Any
    upper: Any
    part: Any


def tiles_of(name: str, form: ByteForm) -> Tiles:
    """The tiles of a form, whose name tells them from another's."""
    rows = range(1, form.most_rows + 1)
    shapes = [(row, count) for row in rows for count in (1, 2, 4) if count <= form.wide(row)]
    keys, asking = (_tiles(f"{name}_keys_{asks}", 10, _key_tile(form, asks), shapes) for asks in (False, True))
    whole = [(row, 4) for row in rows if form.wide(row) == 4]
    halves = [(row, 2) for row in rows if form.wide(row) == 2]
    of_values = {"line": whole, "lower": halves, "upper": halves, "part": [(row, 1) for row in rows]}
    values = [_tiles(f"{name}_{kind}", 12, _value_tile(form, kind), of_values[kind]) for kind in of_values]
    return Tiles(keys, asking, *values)
