"""Products of a few rows with weights in groups, whose numbers become float32 in registers or lie in a panel.

The numbers of a group are multiplied and added input by input, in order; then the group's sum times its scale, and the
sum of its inputs times its offset, are added to what the groups before have given. So a row's bits do not depend on the
tile in which it is computed, nor on where the tile reads numbers from. Called by `grouped_products.py`.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from llvmlite import ir

from decoder.kernels import simd
from decoder.kernels.compiled import defined, function
from decoder.kernels.grouped_inputs import GROUP, INPUT_BYTES, SUMS_AT
from decoder.kernels.grouped_weights import LINE_STEP, GroupedForm, fma, load_words, numbers, parameters
from decoder.kernels.register_tiles import add_incoming
from decoder.kernels.row_tiles import LINE_BYTES, ROW_BYTES

_I64, _F32 = ir.IntType(64), ir.FloatType()
_VF32 = ir.VectorType(_F32, simd.LANES)
_ZERO = ir.Constant(_VF32, [0.0] * simd.LANES)
_AHEAD: Final = 4096  # bytes by which weights are asked for before they are read
PANEL_GROUP_BYTES: Final = (GROUP + 2) * LINE_BYTES  # of a column block in a panel: numbers, scales, offsets
_SCALE_AT: Final = GROUP * LINE_BYTES
_UNROLLED: Final = 4  # inputs of a panel in one turn of a loop

Body = Callable[[Any, list[Any]], list[Any]]
Code = Callable[[Any, Any], None]


def _loop(builder: Any, count: Any, carried: list[Any], body: Body) -> list[Any]:
    """`body(index, carried)`, which gives what is carried on, `count` times and at least once."""
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    index, phis = builder.phi(_I64), [builder.phi(value.type) for value in carried]
    results = body(index, phis)
    following = builder.add(index, _I64(1))
    values = [(index, _I64(0), following), *zip(phis, carried, results, strict=True)]
    add_incoming(values, before, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    return results


def _at(builder: Any, start: Any, index: Any, step: Any) -> Any:
    return builder.add(start, builder.mul(index, _I64(step) if isinstance(step, int) else step))


def _behind(builder: Any, start: Any, offset: int) -> Any:
    return builder.add(start, _I64(offset))


def _ask(builder: Any, form: GroupedForm, record: Any) -> None:
    """Prefetch the scales and offsets of a record ahead."""
    for line in range(0, form.numbers_at, LINE_BYTES):
        simd._emit_prefetch(builder, _behind(builder, record, line + _AHEAD))


def _line(builder: Any, form: GroupedForm, address: Any, block: int) -> Any:
    simd._emit_prefetch(builder, _behind(builder, address, form.line_at(block) + _AHEAD))
    return load_words(builder, address, form.line_at(block))


def _add(builder: Any, inputs: list[Any], columns: Sequence[Any], sums: list[Any]) -> list[Any]:
    """`sums` [row, block] plus the products of each row's input with each block's numbers."""
    spread = [simd._emit_splat_f32(builder, address) for address in inputs]
    places = itertools.product(range(len(inputs)), range(len(columns)))
    return [fma(builder, spread[row], columns[block], sums[index]) for index, (row, block) in enumerate(places)]


def _finish_group(
    builder: Any, inputs: list[Any], of_blocks: list[tuple[Any, Any]], targets: list[Any], sums: list[Any]
) -> None:
    """Add a group's `sums` to what lies at `targets` [row, block]. `inputs` are addresses of the rows' groups."""
    for row, group in enumerate(inputs):
        halves = [simd._emit_splat_f32(builder, _behind(builder, group, SUMS_AT + half)) for half in (0, 4)]
        whole = builder.fadd(*halves)
        for block, (scale, offset) in enumerate(of_blocks):
            index = row * len(of_blocks) + block
            total = fma(builder, sums[index], scale, simd._emit_load_f32(builder, targets[index]))
            simd._emit_store_f32(builder, targets[index], fma(builder, whole, offset, total))


def _targets(builder: Any, c: Any, rows: int, blocks: Sequence[int]) -> list[Any]:
    places = itertools.product(range(rows), blocks)
    return [_behind(builder, c, row * ROW_BYTES + block * LINE_BYTES) for row, block in places]


def _emit_words(form: GroupedForm, rows: int, blocks: tuple[int, ...], builder: Any, args: Any) -> None:
    """Add the products with these column blocks, from where they lie, to the sums of `rows` rows."""
    a, a_row, w, groups, c = args
    targets = _targets(builder, c, rows, blocks)
    starts = [_at(builder, a, a_row, _I64(row)) for row in range(rows)]

    def group(index: Any, carried: list[Any]) -> list[Any]:
        record = _at(builder, w, index, form.record_bytes)
        inputs = [_at(builder, start, index, INPUT_BYTES) for start in starts]
        _ask(builder, form, record)

        def line(number: Any, sums: list[Any]) -> list[Any]:
            address = _at(builder, record, number, LINE_STEP)
            first = [_at(builder, start, number, form.line_inputs * 4) for start in inputs]
            lines = [numbers(builder, form, _line(builder, form, address, block)) for block in blocks]
            for place, columns in enumerate(zip(*lines, strict=True)):
                sums = _add(builder, [_behind(builder, at, place * 4) for at in first], columns, sums)
            return sums

        sums = _loop(builder, _I64(form.lines), [_ZERO] * len(targets), line)
        _finish_group(builder, inputs, [parameters(builder, form, record, it) for it in blocks], targets, sums)
        return []

    _loop(builder, groups, [], group)


def _emit_panel_rows(blocks: int, rows: int, builder: Any, args: Any) -> None:
    """Add the products with `blocks` column blocks of a panel to the sums of `rows` rows."""
    a, a_row, panel, wide, groups, c = args
    targets = _targets(builder, c, rows, range(blocks))
    starts = [_at(builder, a, a_row, _I64(row)) for row in range(rows)]
    panels = [_at(builder, panel, wide, _I64(block)) for block in range(blocks)]

    def group(index: Any, carried: list[Any]) -> list[Any]:
        inputs = [_at(builder, start, index, INPUT_BYTES) for start in starts]
        of_blocks = [_at(builder, start, index, PANEL_GROUP_BYTES) for start in panels]

        def some(number: Any, sums: list[Any]) -> list[Any]:
            first = [_at(builder, start, number, _UNROLLED * 4) for start in inputs]
            lines = [_at(builder, start, number, _UNROLLED * LINE_BYTES) for start in of_blocks]
            for place in range(_UNROLLED):
                columns = [simd._emit_load_f32(builder, _behind(builder, line, place * LINE_BYTES)) for line in lines]
                sums = _add(builder, [_behind(builder, at, place * 4) for at in first], columns, sums)
            return sums

        sums = _loop(builder, _I64(GROUP // _UNROLLED), [_ZERO] * len(targets), some)
        scales = [
            tuple(simd._emit_load_f32(builder, _behind(builder, it, _SCALE_AT + part)) for part in (0, LINE_BYTES))
            for it in of_blocks
        ]
        _finish_group(builder, inputs, scales, targets, sums)
        return []

    _loop(builder, groups, [], group)


def _emit_panel(form: GroupedForm, block: int, builder: Any, args: Any) -> None:
    w, groups, target = args

    def group(index: Any, carried: list[Any]) -> list[Any]:
        record, out = _at(builder, w, index, form.record_bytes), _at(builder, target, index, PANEL_GROUP_BYTES)

        def line(number: Any, carried: list[Any]) -> list[Any]:
            words = _line(builder, form, _at(builder, record, number, LINE_STEP), block)
            first = _at(builder, out, number, form.line_inputs * LINE_BYTES)
            for place, vector in enumerate(numbers(builder, form, words)):
                simd._emit_store_f32(builder, _behind(builder, first, place * LINE_BYTES), vector)
            return []

        _loop(builder, _I64(form.lines), [], line)
        for part, vector in enumerate(parameters(builder, form, record, block)):
            simd._emit_store_f32(builder, _behind(builder, out, _SCALE_AT + part * LINE_BYTES), vector)
        return []

    _loop(builder, groups, [], group)


def _choice(name: str, operands: int, cases: dict[int, list[tuple[str, Code]]]) -> Any:
    """An intrinsic whose first operand says which functions are called with the others."""

    def emit(builder: Any, args: Any) -> None:
        which, *others = args
        done = builder.append_basic_block()
        choice = builder.switch(which, done)
        for value, functions in cases.items():
            case = builder.append_basic_block()
            choice.add_case(_I64(value), case)
            builder.position_at_end(case)
            for part, code in functions:
                builder.call(defined(builder.module, f"{name}_{part}", operands - 1, code), others)
            builder.branch(done)
        builder.position_at_end(done)

    return function(name, operands, emit)


def rows_of_words(form: GroupedForm, most: int) -> Any:
    """An intrinsic: rows (1 to `most`); address of inputs, bytes between rows; weights, groups; sums [row, 32].

    One row passes both column blocks at once, more of them one after the other.
    """
    cases: dict[int, list[tuple[str, Code]]] = {}
    for rows in range(1, most + 1):
        parts = ((0, 1),) if rows == 1 else ((0,), (1,))
        cases[rows] = [(f"{rows}_{blocks[0]}", partial(_emit_words, form, rows, blocks)) for blocks in parts]
    return _choice(f"rows_of_{form.name}_{most}", 6, cases)


def rows_of_panel(most: int, blocks: int) -> Any:
    """An intrinsic: rows (1 to `most`); address of inputs, bytes between rows; panel, bytes between its column blocks,
    groups; sums [row, 32]."""
    cases: dict[int, list[tuple[str, Code]]] = {
        rows: [(str(rows), partial(_emit_panel_rows, blocks, rows))] for rows in range(1, most + 1)
    }
    return _choice(f"rows_of_panel_{most}x{blocks}", 7, cases)


def make_panel(form: GroupedForm) -> Any:
    """An intrinsic: column block (0 or 1); weights, groups; the panel, [group, PANEL_GROUP_BYTES]."""
    cases: dict[int, list[tuple[str, Code]]] = {
        block: [(str(block), partial(_emit_panel, form, block))] for block in range(2)
    }
    return _choice(f"panel_of_{form.name}", 4, cases)
