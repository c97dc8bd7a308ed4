"""Products of a few rows by stored elements that are read from memory once: keys in panels, values in runs of rows.

Tiles as those of `register_tiles.py`, whose vectors are widened where they are loaded. While they compute they ask,
line by line and at the same pace, for runs that are read later, so that memory and arithmetic overlap. Sums are added
step by step, in order. Called by `attention_alone.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from llvmlite import ir

from decoder.kernels import simd
from decoder.kernels.compiled import kernel, made_kernel, variant
from decoder.kernels.frame import SPAN
from decoder.kernels.half_panels import FORMS, half_tile, packed_by_halves
from decoder.kernels.register_tiles import (
    PARTS,
    add_incoming,
    add_products,
    load_address,
    load_sums,
    rows_at_once,
    split,
    store_sums,
    tiles,
    vectors_at_once,
    zero_sums,
)
from decoder.kernels.sets import Bfloat16Storage, Float8Storage, Float16Storage, Float32Storage, Int8Storage, storage

_I64 = ir.IntType(64)
_Load = Callable[[Any, Any], Any]
_PLACE: Final = 8  # bytes of an address in a list of runs
_LINE: Final = 64
_TOGETHER: Final = 8192  # bytes of values that all tiles take before the next ones, if they are 32 keys at least
_TURN: Final = 4  # steps of a panel that are one turn of a loop
_LOADS: Final[dict[type, tuple[_Load, int]]] = {
    Float32Storage: (simd._emit_load_f32, 4),
    Bfloat16Storage: (simd._emit_load_bf16, 2),
    Float16Storage: (simd._emit_load_f16, 2),
    Int8Storage: (simd._emit_load_int8, 1),
    Float8Storage: (simd._emit_load_e4m3, 1),
}


def _moved(builder: Any, starts: list[Any], offset: Any, index: int) -> Any:
    return builder.add(starts[index], offset)


def _loaded(builder: Any, load: _Load, starts: list[Any], offset: Any, index: int) -> list[Any]:
    return split(builder, load(builder, builder.add(starts[index], offset)))


def _panel_tile(load: _Load, size: int) -> Callable[[Any, int, int, Any], None]:
    """c[rows, vectors * 16] = a[rows, steps] by panels [vector][step][16], `size` bytes an element.

    `ahead` is the address of a list of runs, one for each vector, of as many bytes as its panel.
    """

    def emit(builder: Any, rows: int, vectors: int, args: Any) -> None:
        a, a_row, b, b_vector, steps, ahead, c, c_row = args
        a_rows = [builder.add(a, builder.mul(a_row, _I64(row))) for row in range(rows)]
        b_vectors = [builder.add(b, builder.mul(b_vector, _I64(vector))) for vector in range(vectors)]
        wanted = [load_address(builder, ahead, vector) for vector in range(vectors)]
        first = zero_sums(rows, vectors)
        before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
        builder.branch(loop)
        builder.position_at_end(loop)
        step, results = builder.phi(_I64), [builder.phi(value.type) for value in first]
        sums, apart = results, _TURN // size  # steps of one line
        for turn in range(_TURN):
            here = builder.add(step, _I64(turn))
            x, y = builder.shl(here, _I64(2)), builder.mul(here, _I64(16 * size))
            for vector in range(turn % apart, vectors, apart):  # each asks for a line, in turns
                line = builder.sub(y, _I64(turn % apart * 16 * size))
                simd._emit_prefetch(builder, builder.add(wanted[vector], line))
            number, vector_of = partial(_moved, builder, a_rows, x), partial(_loaded, builder, load, b_vectors, y)
            results = add_products(builder, rows, vectors, results, number, vector_of)
        following = builder.add(step, _I64(_TURN))
        add_incoming([(step, _I64(0), following), *zip(sums, first, results, strict=True)], before, loop)
        builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
        builder.position_at_end(after)
        store_sums(builder, rows, vectors, results, c, c_row)

    return emit


def _run_tile(load: _Load, size: int) -> Callable[[Any, int, int, Any], None]:
    """c[rows, vectors * 16] = a[rows, begin to end] by the same steps of the runs, `size` bytes an element.

    Where registers are few, the sums go on from those at `c`. `skip` is the bytes from a run's start to the vectors,
    `ahead` those in the list to the run to ask for.
    """

    def emit(builder: Any, rows: int, vectors: int, args: Any) -> None:
        a, a_row, runs, skip, b_step, begin, end, ahead, c, c_row = args
        a_rows = [builder.add(a, builder.mul(a_row, _I64(row))) for row in range(rows)]
        first = load_sums(builder, rows, vectors, c, c_row) if PARTS > 1 else zero_sums(rows, vectors)
        entry, run, loop, over, after = builder.block, *(builder.append_basic_block() for _ in range(4))
        builder.branch(run)

        builder.position_at_end(run)
        start, before = builder.phi(_I64), [builder.phi(value.type) for value in first]
        place = builder.add(runs, builder.mul(builder.ashr(start, _I64(4)), _I64(_PLACE)))
        here = load_address(builder, place, 0)
        apart = builder.sub(load_address(builder, builder.add(place, ahead), 0), here)
        inside = builder.mul(builder.and_(start, _I64(15)), b_step)
        source = builder.add(builder.add(here, skip), inside)
        whole = builder.add(builder.or_(start, _I64(15)), _I64(1))
        stop = builder.select(builder.icmp_signed("<", whole, end), whole, end)
        builder.branch(loop)

        builder.position_at_end(loop)
        step, address, sums = builder.phi(_I64), builder.phi(_I64), [builder.phi(value.type) for value in first]
        for offset in range(0, vectors * 16 * size, _LINE):
            simd._emit_prefetch(builder, builder.add(builder.add(address, apart), _I64(offset)))
        results = add_products(
            builder, rows, vectors, sums,
            lambda row: builder.add(a_rows[row], builder.shl(step, _I64(2))),
            lambda vector: split(builder, load(builder, builder.add(address, _I64(vector * 16 * size)))),
        )  # fmt: skip
        following, further = builder.add(step, _I64(1)), builder.add(address, b_step)
        add_incoming(
            [(step, start, following), (address, source, further), *zip(sums, before, results, strict=True)], run, loop
        )
        builder.cbranch(builder.icmp_signed("<", following, stop), loop, over)

        builder.position_at_end(over)
        add_incoming([(start, begin, stop), *zip(before, first, results, strict=True)], entry, over)
        builder.cbranch(builder.icmp_signed("<", stop, end), run, after)
        builder.position_at_end(after)
        store_sums(builder, rows, vectors, results, c, c_row)

    return emit


def _of_panels(name: str, emit_tile: Callable[[Any, int, int, Any], None]) -> Any:
    tile = tiles(f"panels_{name}", 8, emit_tile)

    @made_kernel(name)
    def product(
        a: int, a_row: int, rows: int, b: int, b_vector: int, vectors: int, steps: int, ahead: int, c: int, c_row: int
    ) -> None:
        row = 0
        while row < rows:
            height, vector = rows_at_once(rows - row), 0
            while vector < vectors:
                count = vectors_at_once(height, vectors - vector)
                tile(
                    height, count, a + row * a_row, a_row, b + vector * b_vector, b_vector, steps,
                    ahead + vector * _PLACE, c + row * c_row + vector * 64, c_row,
                )  # fmt: skip
                vector += count
            row += height

    return product


def _of_runs(load: _Load, size: int) -> Any:
    tile = tiles(f"runs_{load.__name__}", 10, _run_tile(load, size))

    @made_kernel(load.__name__)
    def product(
        a: int, a_row: int, rows: int, runs: int, b_step: int, vectors: int, begin: int, end: int, ahead: int, c: int,
        c_row: int,
    ) -> None:  # fmt: skip
        together = _keys_of_all_tiles(vectors * 16 * size)
        if PARTS > 1:
            _clear_rows(c, c_row, rows, vectors)
        while begin < end:
            stop, row = min(end, (begin // together + 1) * together), 0
            while row < rows:
                height, vector = rows_at_once(rows - row), 0
                while vector < vectors:
                    count = vectors_at_once(height, vectors - vector)
                    tile(
                        height, count, a + row * a_row, a_row, runs, vector * 16 * size, b_step, begin, stop, ahead,
                        c + row * c_row + vector * 64, c_row,
                    )  # fmt: skip
                    vector += count
                row += height
            begin = stop

    return product


@kernel
def _keys_of_all_tiles(row_bytes: int) -> int:
    """Keys of values that all tiles take before the next ones, a power of two: their lines stay in the cache.

    With registers of sixteen lanes tiles are so wide that each takes whole lines, of the whole span.
    """
    if PARTS == 1:
        return SPAN
    keys = SPAN
    while keys * row_bytes > _TOGETHER and keys > 32:
        keys >>= 1
    return keys


@kernel
def _clear_rows(c: int, c_row: int, rows: int, vectors: int) -> None:
    """Zeros for `rows` rows of `vectors` vectors."""
    for row in range(rows):
        for vector in range(vectors):
            simd.store_floats(c + row * c_row + vector * 64, simd.splat(np.float32(0.0)))


_PANELS: Final = {
    kind: _of_panels(load.__name__, _panel_tile(load, size))
    for kind, (load, size) in _LOADS.items()
    if not packed_by_halves(kind)
} | {
    kind: _of_panels(f"halves_{kind.__name__}", half_tile(form))
    for kind, form in FORMS.items()
    if packed_by_halves(kind)
}
_RUNS: Final = {kind: _of_runs(*load) for kind, load in _LOADS.items()}


def product_of_panels(
    kernels: Any, a: int, a_row: int, rows: int, b: int, b_vector: int, vectors: int, steps: int, ahead: int, c: int,
    c_row: int,
) -> None:  # fmt: skip
    """c[rows, vectors * 16] = a[rows, steps] by panels [vector][step][16] of stored elements, without their scales.

    `steps` is a multiple of four. `ahead` is the address of a list of addresses, one for each vector: as many bytes
    there as the vector's panel has are asked for meanwhile.
    """
    raise NotImplementedError("compiled code only")


@variant(product_of_panels)
def _product_of_panels(
    kernels: Any, a: Any, a_row: Any, rows: Any, b: Any, b_vector: Any, vectors: Any, steps: Any, ahead: Any, c: Any,
    c_row: Any,
) -> Any:  # fmt: skip
    product = _PANELS[storage(kernels)]
    return lambda kernels, a, a_row, rows, b, b_vector, vectors, steps, ahead, c, c_row: product(
        a, a_row, rows, b, b_vector, vectors, steps, ahead, c, c_row
    )


def product_of_runs(
    kernels: Any, a: int, a_row: int, rows: int, runs: int, b_step: int, vectors: int, begin: int, end: int, ahead: int,
    c: int, c_row: int,
) -> None:  # fmt: skip
    """c[rows, vectors * 16] = a[rows, begin to end] by stored elements, without their scales, of the runs of sixteen.

    begin < end. `runs` is the address of a list of addresses, one for each sixteen steps from step 0 on; those of whole
    runs before `begin` are not read. `ahead` is the bytes in it from a run's place to that of the run that is asked for
    meanwhile.
    """
    raise NotImplementedError("compiled code only")


@variant(product_of_runs)
def _product_of_runs(
    kernels: Any, a: Any, a_row: Any, rows: Any, runs: Any, b_step: Any, vectors: Any, begin: Any, end: Any, ahead: Any,
    c: Any, c_row: Any,
) -> Any:  # fmt: skip
    product = _RUNS[storage(kernels)]
    return lambda kernels, a, a_row, rows, runs, b_step, vectors, begin, end, ahead, c, c_row: product(
        a, a_row, rows, runs, b_step, vectors, begin, end, ahead, c, c_row
    )
