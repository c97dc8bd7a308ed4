"""Products of rows of numbers by int8 and fp8 keys and values that are multiplied as `byte_tiles.py` says.

A row of numbers is, beside int8, DIGITS rows of bytes, the lowest digits first; beside fp8 one of bfloat16 in the order
of `byte_pairs.in_pairs`. Keys come in panels [head_dim / 4][16] of words, each
four elements of a key; values lie where they were stored, and words of them, an element of four keys that are
neighbours, are made in registers. Each 64 columns of values are four vectors, of which the j-th has columns 16 i + 4 j
to 16 i + 4 j + 3 in its i-th part of four lanes; sixteen columns that are left are one vector in their own order.
Called by `attention_bytes.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

from decoder.kernels import byte_dots, simd
from decoder.kernels.byte_dots import DIGITS
from decoder.kernels.byte_forms import FORMS, ByteForm
from decoder.kernels.byte_tiles import Tiles, tiles_of
from decoder.kernels.compiled import inlined_variant, kernel, made_kernel, variant
from decoder.kernels.frame import SPAN
from decoder.kernels.sets import storage

_TOGETHER: Final = 8192  # bytes of rows of values that all tiles take before the next ones: they stay in the cache
_PLACE: Final = 8  # bytes of an address in a list of runs


@kernel
def _rows_at_once(left: int, most: int) -> int:
    """Rows of the next tile, `most` at most, where `left` rows are left: tiles of about one size."""
    parts = (left + most - 1) // most
    return (left + parts - 1) // parts


@kernel
def _vectors_at_once(wide: int, left: int) -> int:
    """Vectors of the next tile of keys."""
    return 4 if min(wide, left) >= 4 else 2 if left >= 2 else 1


def _of_keys(name: str, form: ByteForm, tile: Any) -> Any:
    most, wide = form.most_rows, tuple(form.wide(rows) for rows in range(form.most_rows + 1))

    @made_kernel(name)
    def product(
        a: int, a_row: int, a_digit: int, first: int, rows: int, b: int, b_vector: int, vectors: int, steps: int,
        ahead: int, c: int, c_row: int,
    ) -> None:  # fmt: skip
        vector = 0
        while vector < vectors:
            row, count = 0, _vectors_at_once(wide[_rows_at_once(rows, most)], vectors - vector)
            while row < rows:
                height = _rows_at_once(rows - row, most)
                tile(
                    height, count, a + row * a_row, a_row, a_digit, first, b + vector * b_vector, b_vector, steps,
                    ahead + vector * _PLACE, c + row * c_row + vector * 64, c_row,
                )  # fmt: skip
                row += height
            vector += count

    return product


def _of_values(name: str, form: ByteForm, tiles: Tiles) -> Any:
    most, wide = form.most_rows, tuple(form.wide(rows) for rows in range(form.most_rows + 1))
    line, lower, upper, part = tiles.line, tiles.lower, tiles.upper, tiles.part

    @made_kernel(f"columns_{name}")
    def columns(
        a: int, a_row: int, a_digit: int, height: int, runs: int, b_row: int, vectors: int, begin: int, end: int,
        ahead: int, c: int, c_row: int, c_digit: int,
    ) -> None:  # fmt: skip
        vector = 0
        while vector + 4 <= vectors:
            skip, at = vector * 16, c + vector * 64
            if wide[height] == 4:
                line(height, 4, a, a_row, a_digit, runs, skip, b_row, begin, end, ahead, at, c_row, c_digit)
            else:
                lower(height, 2, a, a_row, a_digit, runs, skip, b_row, begin, end, ahead, at, c_row, c_digit)
                upper(height, 2, a, a_row, a_digit, runs, skip, b_row, begin, end, ahead, at + 128, c_row, c_digit)
            vector += 4
        while vector < vectors:
            skip, at = vector * 16, c + vector * 64
            part(height, 1, a, a_row, a_digit, runs, skip, b_row, begin, end, ahead, at, c_row, c_digit)
            vector += 1

    @made_kernel(f"values_{name}")
    def product(
        a: int, a_row: int, a_digit: int, rows: int, runs: int, b_row: int, vectors: int, begin: int, end: int,
        ahead: int, c: int, c_row: int, c_digit: int,
    ) -> None:  # fmt: skip
        together = SPAN // 4
        while together * 4 * b_row > _TOGETHER and together > 4:
            together >>= 1
        while begin < end:
            stop, row = min(end, (begin // together + 1) * together), 0
            while row < rows:
                height = _rows_at_once(rows - row, most)
                columns(
                    a + row * a_row, a_row, a_digit, height, runs, b_row, vectors, begin, stop, ahead, c + row * c_row,
                    c_row, c_digit,
                )  # fmt: skip
                row += height
            begin = stop

    return product


def _products(name: str, form: ByteForm) -> tuple[Any, Any, Any]:
    tiles = tiles_of(name, form)
    keys, asking = _of_keys(f"{name}_keys", form, tiles.keys), _of_keys(f"{name}_asking", form, tiles.asking_keys)
    return keys, asking, _of_values(name, form, tiles)


_PRODUCTS: Final[dict[type, tuple[Any, Any, Any]]] = {
    kind: _products(kind.__name__, form) for kind, form in FORMS.items()
}


def key_product(
    kernels: Any, a: int, a_row: int, a_digit: int, first: int, rows: int, b: int, b_vector: int, vectors: int,
    steps: int, ahead: int, c: int, c_row: int,
) -> None:  # fmt: skip
    """c[rows, vectors * 16] = a[rows, steps] by panels [vector][step][16] of words, as float32 numbers of a's unit.

    `steps` is even. `first` is the bytes from a row of int8's digits to an int32 for each digit: -128 times the sum of
    the row's. `ahead` is the address of a list of runs of as many bytes as a panel has, one for each: their second
    halves are asked for meanwhile. It is 0 where nothing is to be asked for.
    """
    raise NotImplementedError("compiled code only")


@variant(key_product)
def _key_product(
    kernels: Any, a: Any, a_row: Any, a_digit: Any, first: Any, rows: Any, b: Any, b_vector: Any, vectors: Any,
    steps: Any, ahead: Any, c: Any, c_row: Any,
) -> Any:  # fmt: skip
    plain, asking, _ = _PRODUCTS[storage(kernels)]

    def product(
        kernels: Any, a: Any, a_row: Any, a_digit: Any, first: Any, rows: Any, b: Any, b_vector: Any, vectors: Any,
        steps: Any, ahead: Any, c: Any, c_row: Any,
    ) -> None:  # fmt: skip
        if ahead:
            asking(a, a_row, a_digit, first, rows, b, b_vector, vectors, steps, ahead, c, c_row)
        else:
            plain(a, a_row, a_digit, first, rows, b, b_vector, vectors, steps, ahead, c, c_row)

    return product


def value_product(
    kernels: Any, a: int, a_row: int, a_digit: int, rows: int, runs: int, b_row: int, vectors: int, begin: int,
    end: int, ahead: int, c: int, c_row: int, c_digit: int,
) -> None:  # fmt: skip
    """c[rows, digits, vectors * 16] += a[rows, begin to end] by fours of keys of the runs; begin < end.

    Sums of int8 are whole numbers, those of fp8 float32. `runs` is the
    address of a list of addresses, one for each four fours from 0 on, `b_row` the bytes of a row of values, `ahead` the
    bytes in the list from a run's place to that of the run that is asked for meanwhile.
    """
    raise NotImplementedError("compiled code only")


@variant(value_product)
def _value_product(
    kernels: Any, a: Any, a_row: Any, a_digit: Any, rows: Any, runs: Any, b_row: Any, vectors: Any, begin: Any,
    end: Any, ahead: Any, c: Any, c_row: Any, c_digit: Any,
) -> Any:  # fmt: skip
    _, _, product = _PRODUCTS[storage(kernels)]
    return lambda kernels, a, a_row, a_digit, rows, runs, b_row, vectors, begin, end, ahead, c, c_row, c_digit: product(
        a, a_row, a_digit, rows, runs, b_row, vectors, begin, end, ahead, c, c_row, c_digit
    )


@kernel
def finish_values(
    kernels: Any, sums: int, c_row: int, c_digit: int, row: int, columns: int, unit: float, target: int
) -> None:  # fmt: skip
    """The `row`-th row of sums of `value_product` as float32 [columns] in their order, times `unit`."""
    factor, source, column = simd.splat(unit), sums + row * c_row, 0
    while column + 64 <= columns:
        at, place = source + column * 4, target + column * 4
        a, b = _number(kernels, at, c_digit), _number(kernels, at + 64, c_digit)
        c, d = _number(kernels, at + 128, c_digit), _number(kernels, at + 192, c_digit)
        first, second = byte_dots.first_parts(a, b), byte_dots.first_parts(c, d)
        simd.store_floats(place, simd.mul(byte_dots.lower_halves(first, second), factor))
        simd.store_floats(place + 64, simd.mul(byte_dots.upper_halves(first, second), factor))
        first, second = byte_dots.last_parts(a, b), byte_dots.last_parts(c, d)
        simd.store_floats(place + 128, simd.mul(byte_dots.lower_halves(first, second), factor))
        simd.store_floats(place + 192, simd.mul(byte_dots.upper_halves(first, second), factor))
        column += 64
    while column < columns:
        simd.store_floats(target + column * 4, simd.mul(_number(kernels, source + column * 4, c_digit), factor))
        column += 16


def _number(kernels: Any, at: int, c_digit: int) -> Any:
    """What sixteen sums of each digit stand for."""
    raise NotImplementedError("compiled code only")


@inlined_variant(_number)
def _number_of(kernels: Any, at: Any, c_digit: Any) -> Any:
    if FORMS[storage(kernels)].sums == 1:
        return lambda kernels, at, c_digit: simd.load_floats(at)

    def number(kernels: Any, at: Any, c_digit: Any) -> Any:
        value = byte_dots.to_floats(simd.load_ints(at + (DIGITS - 1) * c_digit))
        for digit in range(DIGITS - 1):
            value = byte_dots.add_digit(value, simd.load_ints(at + (DIGITS - 2 - digit) * c_digit))
        return value

    return number
