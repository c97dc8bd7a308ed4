"""Products of rows of digits by int8 keys and values, for attention by dot products of bytes.

A row of numbers is DIGITS rows of bytes, the lowest digits first. Keys come in panels [head_dim / 4][16] of words, each
four elements of a key; values lie where they were stored, and words of them, an element of four keys that are
neighbours, are made in registers. Each 64 columns of values are four vectors, of which the j-th has columns 16 i + 4 j
to 16 i + 4 j + 3 in its i-th part of four lanes; sixteen columns that are left are one vector in their own order.
Called by `attention_bytes.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Final

from decoder.kernels import byte_dots, simd
from decoder.kernels.byte_dots import DIGITS
from decoder.kernels.byte_tiles import (
    MOST_ROWS,
    WIDE,
    asking_key_tile,
    key_tile,
    line_tile,
    lower_tile,
    part_tile,
    upper_tile,
)
from decoder.kernels.compiled import kernel
from decoder.kernels.frame import SPAN

_TOGETHER: Final = 8192  # bytes of rows of values that all tiles take before the next ones: they stay in the cache
_PLACE: Final = 8  # bytes of an address in a list of runs


@kernel
def _rows_at_once(left: int) -> int:
    """Rows of the next tile where `left` rows are left: tiles of about one size."""
    parts = (left + MOST_ROWS - 1) // MOST_ROWS
    return (left + parts - 1) // parts


@kernel
def _vectors_at_once(rows: int, left: int) -> int:
    """Vectors of the next tile of keys."""
    if left >= 4 and WIDE[rows] >= 4:
        return 4
    return 2 if left >= 2 else 1


@kernel
def key_product(
    a: int, a_row: int, a_digit: int, first: int, rows: int, b: int, b_vector: int, vectors: int, steps: int, c: int,
    c_row: int,
) -> None:  # fmt: skip
    """c[rows, vectors * 16] = a[rows, steps] by panels [vector][step][16] of words, as float32 numbers of a's unit.

    `steps` is even. `first` is the bytes from a row of digits to an int32 for each digit: -128 times the sum of the
    row's.
    """
    vector = 0
    while vector < vectors:
        row, count = 0, 0
        while row < rows:
            height = _rows_at_once(rows - row)
            if row == 0:
                count = _vectors_at_once(height, vectors - vector)
            key_tile(
                height, count, a + row * a_row, a_row, a_digit, first, b + vector * b_vector, b_vector, steps, 0,
                c + row * c_row + vector * 64, c_row,
            )  # fmt: skip
            row += height
        vector += count


@kernel
def asking_key_product(
    a: int, a_row: int, a_digit: int, first: int, rows: int, b: int, b_vector: int, vectors: int, steps: int,
    ahead: int, c: int, c_row: int,
) -> None:  # fmt: skip
    """As `key_product`. `ahead` is the address of a list of runs of as many bytes as a panel has, one for each: their
    second halves are asked for meanwhile."""
    vector = 0
    while vector < vectors:
        row, count = 0, 0
        while row < rows:
            height = _rows_at_once(rows - row)
            if row == 0:
                count = _vectors_at_once(height, vectors - vector)
            asking_key_tile(
                height, count, a + row * a_row, a_row, a_digit, first, b + vector * b_vector, b_vector, steps,
                ahead + vector * _PLACE, c + row * c_row + vector * 64, c_row,
            )  # fmt: skip
            row += height
        vector += count


@kernel
def _value_columns(
    a: int, a_row: int, a_digit: int, height: int, runs: int, b_row: int, vectors: int, begin: int, end: int,
    ahead: int, c: int, c_row: int, c_digit: int,
) -> None:  # fmt: skip
    """One tile's rows by all columns of the same fours of keys."""
    vector = 0
    while vector + 4 <= vectors:
        skip, target = vector * 16, c + vector * 64
        if WIDE[height] == 4:
            line_tile(
                height, 4, a, a_row, a_digit, runs, skip, b_row, begin, end, ahead, target, c_row, c_digit
            )  # fmt: skip
        else:
            lower_tile(height, 2, a, a_row, a_digit, runs, skip, b_row, begin, end, ahead, target, c_row, c_digit)
            upper_tile(
                height, 2, a, a_row, a_digit, runs, skip, b_row, begin, end, ahead, target + 128, c_row, c_digit
            )  # fmt: skip
        vector += 4
    while vector < vectors:
        part_tile(
            height, 1, a, a_row, a_digit, runs, vector * 16, b_row, begin, end, ahead, c + vector * 64, c_row, c_digit
        )  # fmt: skip
        vector += 1


@kernel
def value_product(
    a: int, a_row: int, a_digit: int, rows: int, runs: int, b_row: int, vectors: int, begin: int, end: int, ahead: int,
    c: int, c_row: int, c_digit: int,
) -> None:  # fmt: skip
    """c[rows, digits, vectors * 16] += a[rows, begin to end] by fours of keys of the runs, int32; begin < end.

    `runs` is the address of a list of addresses, one for each four fours from 0 on, `b_row` the bytes of a row of
    values, `ahead` the bytes in the list from a run's place to that of the run that is asked for meanwhile.
    """
    together = SPAN // 4
    while together * 4 * b_row > _TOGETHER and together > 4:
        together >>= 1
    while begin < end:
        stop, row = min(end, (begin // together + 1) * together), 0
        while row < rows:
            height = _rows_at_once(rows - row)
            _value_columns(
                a + row * a_row, a_row, a_digit, height, runs, b_row, vectors, begin, stop, ahead, c + row * c_row,
                c_row, c_digit,
            )  # fmt: skip
            row += height
        begin = stop


@kernel
def finish_values(sums: int, c_row: int, c_digit: int, row: int, columns: int, unit: float, target: int) -> None:
    """The `row`-th row of sums of `value_product` as float32 [columns] in their order, times `unit`."""
    factor, source, column = simd.splat(unit), sums + row * c_row, 0
    while column + 64 <= columns:
        at, place = source + column * 4, target + column * 4
        a, b = _number(at, c_digit), _number(at + 64, c_digit)
        c, d = _number(at + 128, c_digit), _number(at + 192, c_digit)
        first, second = byte_dots.first_parts(a, b), byte_dots.first_parts(c, d)
        simd.store_floats(place, simd.mul(byte_dots.lower_halves(first, second), factor))
        simd.store_floats(place + 64, simd.mul(byte_dots.upper_halves(first, second), factor))
        first, second = byte_dots.last_parts(a, b), byte_dots.last_parts(c, d)
        simd.store_floats(place + 128, simd.mul(byte_dots.lower_halves(first, second), factor))
        simd.store_floats(place + 192, simd.mul(byte_dots.upper_halves(first, second), factor))
        column += 64
    while column < columns:
        simd.store_floats(target + column * 4, simd.mul(_number(source + column * 4, c_digit), factor))
        column += 16


@kernel
def _number(at: int, c_digit: int) -> object:
    """What sixteen sums of each digit stand for."""
    value = byte_dots.to_floats(simd.load_ints(at + (DIGITS - 1) * c_digit))
    for digit in range(DIGITS - 1):
        value = byte_dots.add_digit(value, simd.load_ints(at + (DIGITS - 2 - digit) * c_digit))
    return value
