"""Products of a few rows by vectors that lie in runs of sixteen steps, each run at an address of its own.

What `register_tiles.py` does for vectors that lie together, with sums that stay in registers from the first run to the
last: values of a span are summed so, where they lie in their blocks. While a run is read, the run that comes some
places later in the list is asked for, line by line, at the same pace: memory and arithmetic overlap. Sums are added
step by step, in order. Called by `attention_alone.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from decoder.kernels import simd
from decoder.kernels.compiled import function, made_kernel, variant
from decoder.kernels.register_tiles import LOADS, add_products, rows_at_once, store_sums, wide, zero_sums
from decoder.kernels.sets import Float8Storage, Float32Storage, Int8Storage, storage

_I64 = ir.IntType(64)
_PLACE: Final = 8  # bytes of an address in a list of runs
_LINE: Final = 64


def _load_address(builder: Any, place: Any) -> Any:
    return builder.load(builder.inttoptr(place, _I64.as_pointer()), align=8)


def _tile(rows: int, vectors: int, load: Callable[[Any, Any], Any], size: int) -> Any:
    """c[rows, vectors * 16] = a[rows, begin to end] by the same steps of the runs, `size` bytes an element.

    Operands: a, bytes between rows (a step is a float32; the first is step 0, whatever `begin`); address of the list of
    runs; bytes from a run's start to the vectors; bytes between steps; begin and end, begin < end; bytes in the list
    from a run's place to that of the run to ask for; c (float32), bytes between rows.
    """

    def emit(builder: Any, args: Any) -> None:
        a, a_row, runs, skip, b_step, begin, end, ahead, c, c_row = args
        a_rows = [builder.add(a, builder.mul(a_row, _I64(row))) for row in range(rows)]
        entry, run, loop = builder.block, builder.append_basic_block(), builder.append_basic_block()
        over, after = builder.append_basic_block(), builder.append_basic_block()
        first = zero_sums(rows, vectors)
        builder.branch(run)

        builder.position_at_end(run)
        start = builder.phi(_I64)
        before = [builder.phi(value.type) for value in first]
        place = builder.add(runs, builder.mul(builder.ashr(start, _I64(4)), _I64(_PLACE)))
        here = _load_address(builder, place)
        apart = builder.sub(_load_address(builder, builder.add(place, ahead)), here)
        inside = builder.mul(builder.and_(start, _I64(15)), b_step)
        source = builder.add(builder.add(here, skip), inside)
        whole = builder.add(builder.or_(start, _I64(15)), _I64(1))
        stop = builder.select(builder.icmp_signed("<", whole, end), whole, end)
        builder.branch(loop)

        builder.position_at_end(loop)
        step, address = builder.phi(_I64), builder.phi(_I64)
        sums = [builder.phi(value.type) for value in first]
        for vector in range(vectors):
            if vector * 16 * size % _LINE == 0:
                wanted = builder.add(builder.add(address, apart), _I64(vector * 16 * size))
                simd._emit_prefetch(builder, wanted)
        results = add_products(
            builder, rows, vectors, sums,
            lambda row: builder.add(a_rows[row], builder.shl(step, _I64(2))),
            lambda vector: load(builder, builder.add(address, _I64(vector * 16 * size))),
        )  # fmt: skip
        following, further = builder.add(step, _I64(1)), builder.add(address, b_step)
        builder.cbranch(builder.icmp_signed("<", following, stop), loop, over)

        builder.position_at_end(over)
        builder.cbranch(builder.icmp_signed("<", stop, end), run, after)
        for phi, outside, again in ((start, begin, stop), *zip(before, first, results, strict=True)):
            phi.add_incoming(outside, entry)
            phi.add_incoming(again, over)
        for phi, outside, again in (
            (step, start, following), (address, source, further), *zip(sums, before, results, strict=True)
        ):  # fmt: skip
            phi.add_incoming(outside, run)
            phi.add_incoming(again, loop)
        builder.position_at_end(after)
        store_sums(builder, rows, vectors, results, c, c_row)

    return function(f"runs_{rows}x{vectors}_{load.__name__}", 10, emit)


def _looped(rows: int, load: Callable[[Any, Any], Any], size: int) -> Any:
    """The same for any number of vectors."""
    count = wide(rows)
    many, one = _tile(rows, count, load, size), _tile(rows, 1, load, size)

    @made_kernel(f"{rows}_{load.__name__}")
    def product(
        a: int, a_row: int, runs: int, b_step: int, vectors: int, begin: int, end: int, ahead: int, c: int, c_row: int
    ) -> None:
        vector = 0
        while vector + count <= vectors:
            many(a, a_row, runs, vector * 16 * size, b_step, begin, end, ahead, c + vector * 64, c_row)
            vector += count
        while vector < vectors:
            one(a, a_row, runs, vector * 16 * size, b_step, begin, end, ahead, c + vector * 64, c_row)
            vector += 1

    return product


def _any_rows(load: Callable[[Any, Any], Any], size: int) -> Any:
    """The same for any number of rows: `rows` by `vectors`."""
    six, four, three, two, one = (_looped(rows, load, size) for rows in (6, 4, 3, 2, 1))

    @made_kernel(load.__name__)
    def product(
        a: int, a_row: int, rows: int, runs: int, b_step: int, vectors: int, begin: int, end: int, ahead: int, c: int,
        c_row: int,
    ) -> None:  # fmt: skip
        row = 0
        while row < rows:
            size, x, y = rows_at_once(rows - row), a + row * a_row, c + row * c_row
            if size == 6:
                six(x, a_row, runs, b_step, vectors, begin, end, ahead, y, c_row)
            elif size == 4:
                four(x, a_row, runs, b_step, vectors, begin, end, ahead, y, c_row)
            elif size == 3:
                three(x, a_row, runs, b_step, vectors, begin, end, ahead, y, c_row)
            elif size == 2:
                two(x, a_row, runs, b_step, vectors, begin, end, ahead, y, c_row)
            else:
                one(x, a_row, runs, b_step, vectors, begin, end, ahead, y, c_row)
            row += size
            ahead = 0  # the first rows have asked for all

    return product


_BYTES: Final[dict[type, int]] = {Float32Storage: 4, Int8Storage: 1, Float8Storage: 1}
_RUNS: Final = {kind: _any_rows(load, _BYTES.get(kind, 2)) for kind, load in LOADS.items()}


def product_of_runs(
    kernels: Any, a: int, a_row: int, rows: int, runs: int, b_step: int, vectors: int, begin: int, end: int, ahead: int,
    c: int, c_row: int,
) -> None:  # fmt: skip
    """c[rows, vectors * 16] = a[rows, begin to end] by stored elements, without their scales, of the runs of sixteen.

    `runs` is the address of a list of addresses, one for each sixteen steps from step 0 on; those of whole runs before
    `begin` are not read. `ahead` is the bytes in it from a run's place to that of the run that is asked for meanwhile.
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
