"""Register tiles: sums of a few rows by one or two column blocks that stay in vector registers over a run of k.

A tile is one LLVM loop for each of its passes. Tiles of every size add the products of a row in the same order, so
which tile computes a row never shows in its bits. How large a tile may be is decided here, by the registers of the CPU
that the kernels are compiled for. Called by `block_products.py`.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from decoder.kernels.compiled import intrinsic
from decoder.kernels.dots import emit_dot, emit_half
from decoder.kernels.simd import LANES

Part = int
# Every k of float32 weights; the even or the odd ones of bfloat16's pairs of k; both at once, with bfloat16 inputs.
WHOLE, EVEN, ODD, PAIR = range(4)
Pass = tuple[Part, ...]

LINE_BYTES: Final = 64  # of one step of a column block: one k in float32, a pair of k in bfloat16
ROW_BYTES: Final = 128  # of sums: two column blocks

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VI32, _VF32 = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_BYTES = _I8.as_pointer()


class Tile(NamedTuple):
    """The most rows of a tile, its column blocks, and the halves of pairs that each of its passes adds."""

    rows: int
    blocks: int
    pair_passes: tuple[Pass, ...]


# With 32 registers of sixteen lanes: 24 sums of six rows, two column blocks and both halves of pairs, and four of
# weights. Compiled for three such CPUs it spills nothing; it was never timed.
MANY_REGISTERS: Final = Tile(6, 2, ((EVEN, ODD),))
# With sixteen registers of eight lanes: the sums of six rows, a column block and one half take twelve of them, which
# leaves two for weights, one for an input and one for the mask of the upper halves.
FEW_REGISTERS: Final = Tile(6, 1, ((EVEN,), (ODD,)))
_FEATURES: Final = llvm.get_host_cpu_features()
TILE: Final = MANY_REGISTERS if _FEATURES.get("avx512f", False) else FEW_REGISTERS
# Where a step adds one part, not two halves of pairs apart, the same registers hold the sums of twice the rows.
TALL_TILE: Final = TILE._replace(rows=12) if TILE is MANY_REGISTERS else TILE


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _place(builder: Any, start: Any, offset: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(start, [offset]), kind.as_pointer())


def _load_part(builder: Any, start: Any, part: Part) -> Any:
    """A line of a column block as float32: a whole k, or one half of a pair; or as it is, in pairs."""
    if part == WHOLE:
        return builder.load(_place(builder, start, _I64(0), _VF32), align=4)
    words = builder.load(_place(builder, start, _I64(0), _VI32), align=4)
    return words if part == PAIR else emit_half(builder, words, part == ODD)


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    one = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_VI32, [0] * LANES))


def _emit_pass(
    builder: Any, parts: Pass, inputs: list[Any], weights: list[Any], targets: dict[tuple[int, int, Part], Any],
    steps: Any, ahead: list[Any], pace: Any,
) -> None:  # fmt: skip
    """One loop over the steps: loads the sums, adds to them in registers, stores them."""
    input_bytes = 4 if parts in ((WHOLE,), (PAIR,)) else 8
    places = [(row, block, part) for row in range(len(inputs)) for block in range(len(weights)) for part in parts]
    before = {place: builder.load(targets[place], align=4) for place in places}
    entry, loop, done = builder.block, builder.append_basic_block("tile"), builder.append_basic_block("tile_done")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(_I64)
    step.add_incoming(_I64(0), entry)
    totals = {place: builder.phi(_VF32) for place in places}
    now: dict[tuple[int, int, Part], Any] = dict(totals)
    line, moved = builder.mul(step, _I64(LINE_BYTES)), builder.mul(step, pace)
    for pointer in ahead:
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [builder.gep(pointer, [moved]), _I32(0), _I32(3), _I32(1)])
    for part in parts:
        lines = [_load_part(builder, builder.gep(pointer, [line]), part) for pointer in weights]
        first = builder.add(builder.mul(step, _I64(input_bytes)), _I64(4 if part == ODD else 0))
        for row, pointer in enumerate(inputs):
            kind = _I32 if part == PAIR else _F32
            value = _splat(builder, builder.load(_place(builder, pointer, first, kind), align=4))
            for block, weight in enumerate(lines):
                place = (row, block, part)
                if part == PAIR:
                    now[place] = emit_dot(builder, value, weight, now[place])
                else:
                    now[place] = _call(builder, "llvm.fma.v16f32", _VF32, [value, weight, now[place]])
    following = builder.add(step, _I64(1))
    step.add_incoming(following, loop)
    for place, total in totals.items():
        total.add_incoming(before[place], entry)
        total.add_incoming(now[place], loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)
    builder.position_at_end(done)
    for place in places:
        builder.store(now[place], targets[place], align=4)


def row_tile(sizes: Sequence[int], blocks: int, passes: tuple[Pass, ...]) -> Any:
    """An intrinsic that adds the products of some rows (one of `sizes`) with `blocks` column blocks to their sums.

    Operands: rows; address of the first row's inputs at the first k, bytes between rows; address of the weights there,
    bytes between column blocks; number of steps, at least one; address of the sums [row][32], bytes from there to the
    sums of odd k; address of a line to prefetch, and by how many bytes it moves with each step of each pass.
    """

    def declare(
        typingctx: Any, rows: Any, a: Any, stride: Any, w: Any, wide: Any, steps: Any, sums: Any, apart: Any,
        ahead: Any, pace: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rows, *operands = args
            end = builder.append_basic_block("tiles_done")
            choice = builder.switch(rows, end)
            for size in sizes:
                case = builder.append_basic_block(f"rows_{size}")
                choice.add_case(_I64(size), case)
                builder.position_at_end(case)
                _emit_tile(builder, size, blocks, passes, *operands)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 10)), generate

    return intrinsic(declare)


def _emit_tile(
    builder: Any, rows: int, blocks: int, passes: tuple[Pass, ...], a: Any, stride: Any, w: Any, wide: Any, steps: Any,
    sums: Any, apart: Any, ahead: Any, pace: Any,
) -> None:  # fmt: skip
    def pointers(start: Any, distance: Any, count: int) -> list[Any]:
        starts = [builder.add(start, builder.mul(distance, _I64(index))) for index in range(count)]
        return [builder.inttoptr(value, _BYTES) for value in starts]

    even_sums = builder.inttoptr(sums, _BYTES)
    odd_sums = builder.gep(even_sums, [apart])
    for parts in passes:
        targets = {
            (row, block, part): _place(
                builder, odd_sums if part == ODD else even_sums, _I64(row * ROW_BYTES + block * LINE_BYTES), _VF32
            )
            for row in range(rows)
            for block in range(blocks)
            for part in parts
        }
        _emit_pass(
            builder, parts, pointers(a, stride, rows), pointers(w, wide, blocks), targets, steps,
            pointers(ahead, wide, blocks), pace,
        )  # fmt: skip
        ahead = builder.add(ahead, builder.mul(steps, pace))
