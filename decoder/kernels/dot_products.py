"""Products of rows by keys and by values in pairs of bfloat16, for attention by dot products.

Keys come in panels [head_dim / 2][16], a pair being two elements of a key. A pair of values is an element of two keys
that are neighbours, and lies at a pair of neighbouring weights. Each 32 elements of values are two vectors, in the
order of `dots.interleave_lower` and `_upper`, and sixteen that are left are one in their own order: so are the sums.
Called by `attention_dots.py` and `attention_dots_alone.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Final

from decoder.kernels import dots, simd
from decoder.kernels.compiled import kernel
from decoder.kernels.dot_tiles import asking_tile, packed_tile, run_tile
from decoder.kernels.frame import SPAN
from decoder.kernels.register_tiles import rows_at_once

_COLUMN: Final = SPAN // 2 * 64  # bytes of one vector of all pairs of a span's keys
_TOGETHER: Final = 8192  # bytes of rows of values that all tiles take before the next ones: they stay in the cache
_PLACE: Final = 8  # bytes of an address in a list of runs


@kernel
def vectors_at_once(left: int) -> int:
    """Vectors of the next tile where `left` are left."""
    return 4 if left >= 4 else 2 if left >= 2 else 1


@kernel
def panel_product(
    a: int, a_row: int, rows: int, b: int, b_vector: int, vectors: int, steps: int, c: int, c_row: int
) -> None:
    """c[rows, vectors * 16] = a[rows, steps] by panels [vector][step][16] of pairs, `b_vector` bytes apart."""
    vector = 0
    while vector < vectors:
        count, row = vectors_at_once(vectors - vector), 0
        while row < rows:
            height = rows_at_once(rows - row)
            packed_tile(
                height, count, a + row * a_row, a_row, b + vector * b_vector, 64, b_vector, steps,
                c + row * c_row + vector * 64, c_row,
            )  # fmt: skip
            row += height
        vector += count


@kernel
def asking_product(
    a: int, a_row: int, rows: int, b: int, b_vector: int, vectors: int, steps: int, ahead: int, c: int, c_row: int
) -> None:
    """As `panel_product`, `steps` even. `ahead` is the address of a list of runs of as many bytes as a panel has, one
    for each: their second halves are asked for meanwhile."""
    vector = 0
    while vector < vectors:
        count, row = vectors_at_once(vectors - vector), 0
        while row < rows:
            height = rows_at_once(rows - row)
            asking_tile(
                height, count, a + row * a_row, a_row, b + vector * b_vector, b_vector, steps,
                ahead + vector * _PLACE, c + row * c_row + vector * 64, c_row,
            )  # fmt: skip
            row += height
        vector += count


@kernel
def pack_pair(even: int, odd: int, head_dim: int, pair: int, target: int) -> None:
    """Two rows of values, the `pair`-th pair of a span's keys, as what `value_product` takes.

    Vectors that a tile takes together lie beside each other, those of the next pair behind them.
    """
    vector, vectors = 0, head_dim >> 4
    while vector < vectors:
        count = vectors_at_once(vectors - vector)
        place = target + vector * _COLUMN + pair * count * 64
        if count == 1:
            simd.store_pairs(place, even + vector * 32, odd + vector * 32)
        for line in range(0, count & ~1, 2):
            offset = (vector + line) * 32
            first, second = simd.load_ints(even + offset), simd.load_ints(odd + offset)
            simd.store_ints(place + line * 64, dots.interleave_lower(first, second))
            simd.store_ints(place + line * 64 + 64, dots.interleave_upper(first, second))
        vector += count


@kernel
def value_product(
    a: int, a_row: int, rows: int, b: int, vectors: int, begin: int, end: int, c: int, c_row: int
) -> None:
    """c[rows, vectors * 16] = a[rows, begin to end] by the same pairs of keys of values as `pack_pair` packs them."""
    vector = 0
    while vector < vectors:
        count, row = vectors_at_once(vectors - vector), 0
        while row < rows:
            height = rows_at_once(rows - row)
            packed_tile(
                height, count, a + row * a_row + begin * 4, a_row, b + vector * _COLUMN + begin * count * 64,
                count * 64, 64, end - begin, c + row * c_row + vector * 64, c_row,
            )  # fmt: skip
            row += height
        vector += count


@kernel
def run_product(
    a: int, a_row: int, rows: int, runs: int, b_step: int, vectors: int, begin: int, end: int, ahead: int, c: int,
    c_row: int,
) -> None:  # fmt: skip
    """c[rows, vectors * 16] += a[rows, begin to end] by the same pairs of rows of values of the runs, begin < end.

    `runs` is the address of a list of addresses, one for each eight pairs from pair 0 on, `b_step` the bytes of a pair
    of rows, `ahead` the bytes in the list from a run's place to that of the run that is asked for meanwhile.
    """
    together = SPAN
    while together * b_step > _TOGETHER and together > 8 and vectors > 4:
        together >>= 1
    while begin < end:
        stop, row = min(end, (begin // together + 1) * together), 0
        while row < rows:
            height, vector = rows_at_once(rows - row), 0
            while vector < vectors:
                count = vectors_at_once(vectors - vector)
                run_tile(
                    height, count, a + row * a_row, a_row, runs, vector * 32, b_step, begin, stop, ahead,
                    c + row * c_row + vector * 64, c_row,
                )  # fmt: skip
                vector += count
            row += height
        begin = stop
