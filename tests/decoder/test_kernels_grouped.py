"""Products with weights in groups: those of the float32 weights they stand for, and a row's bits are its own alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.kernels import frame, sets, simd
from decoder.kernels.block_products import block_product, for_many_rows
from decoder.kernels.compiled import entry
from decoder.kernels.grouped_inputs import INPUT_BYTES
from decoder.kernels.grouped_products import panel_bytes
from decoder.kernels.grouped_tiles import PANEL_GROUP_BYTES, make_panel, rows_of_panel
from decoder.kernels.grouped_weights import INT8, UINT4, GroupedForm, load_column
from decoder.kernels.rows import load_input, store_input
from decoder.models.grouping import Grouped, pack_groups, quantize
from decoder.models.packing import Memory
from decoder.models.workspace import aligned

FORMS = pytest.mark.parametrize("form", (INT8, UINT4), ids=lambda form: form.name)
KERNELS = sets.GroupedKernels()
ROWS = 64
DEPTH = 608  # nineteen groups: four whole panels and a part of one
ROOM = (frame.SUM_BYTES + panel_bytes(DEPTH)) // 4  # floats that a block product may write


def _matrix(form: GroupedForm, outputs: int = 32) -> Grouped:
    random = np.random.default_rng(0)
    numbers = random.integers(0, 1 << form.bits, (outputs, DEPTH), np.uint8)
    scales = random.uniform(0.01, 0.02, (outputs, DEPTH // 32)).astype(np.float16)
    offsets = (-7.5 * scales + random.normal(0, 0.01, scales.shape)).astype(np.float16)
    return Grouped(form, numbers, scales, offsets if form.offsets else None)


def _packed(matrix: Grouped) -> tuple[int, Memory]:
    memory = Memory(1 << 18)
    return pack_groups(memory, matrix).ctypes.data | matrix.form.tag, memory


def _values() -> NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal((ROWS, DEPTH)).astype(np.float32)


@entry
def _store(kernels: Any, source: int, inputs: int) -> None:
    for line in range(ROWS):
        for column in range(0, DEPTH, 16):
            vector = simd.load_floats(source + (line * DEPTH + column) * 4)
            store_input(kernels, inputs, line, column, DEPTH, vector)


@entry
def _multiply(kernels: Any, inputs: int, row: int, rows: int, weights: int, sums: int, many: bool) -> None:
    source = for_many_rows(kernels, weights, DEPTH, sums) if many else weights
    block_product(kernels, inputs, row, rows, DEPTH, source, sums, False)


@entry
def _load(kernels: Any, inputs: int, target: int) -> None:
    for line in range(ROWS):
        for column in range(0, DEPTH, 16):
            simd.store_floats(target + (line * DEPTH + column) * 4, load_input(kernels, inputs, line, column, DEPTH))


def _inputs(values: NDArray[np.float32]) -> NDArray[np.float32]:
    inputs = np.zeros(ROWS * DEPTH // 32 * INPUT_BYTES // 4, np.float32)
    _store(KERNELS, values.ctypes.data, inputs.ctypes.data)
    return inputs


def _product(values: NDArray[np.float32], weights: int, row: int, rows: int, many: bool = False) -> NDArray[np.float32]:
    """Sums of `rows` rows from `row`; fails where memory past the room was written."""
    inputs, sums = _inputs(values), aligned((ROOM + 64) * 4).view(np.float32)
    sums[:] = 7.0
    _multiply(KERNELS, inputs.ctypes.data, row, rows, weights, sums.ctypes.data, many)
    assert (sums[ROOM:] == 7.0).all()
    return sums[: rows * 32].reshape(rows, 32).copy()


@FORMS
def test_products_are_those_of_the_weights(form: GroupedForm) -> None:
    """Sums are float64's of the weights, as nearly as float32 allows, by registers and by panels."""
    matrix, values = _matrix(form), _values()
    weights, _memory = _packed(matrix)
    want = values.astype(np.float64) @ matrix.values().T.astype(np.float64)
    for rows in (1, 6, 32):
        got = _product(values, weights, 32, rows)
        assert np.abs(got - want[32 : 32 + rows]).max() < 2e-6 * np.abs(want).max()


@FORMS
def test_a_row_does_not_depend_on_its_neighbours(form: GroupedForm) -> None:
    """Any number of rows gives each row the same bits, whichever tile computes it."""
    weights, _memory = _packed(_matrix(form))
    values = _values()
    want = _product(values, weights, 32, 32)
    for rows in (*range(1, 20), 24, 31):
        for many in (False, True):
            assert np.array_equal(_product(values, weights, 32, rows, many), want[:rows])
    alone = values.copy()
    alone[33:] = 0
    assert np.array_equal(_product(alone, weights, 32, 32)[0], want[0])


@FORMS
def test_tiles_of_every_cpu_give_the_same_bits(form: GroupedForm) -> None:
    """How many rows and column blocks registers allow decides how fast a row is, and not what it is. Tiles of several
    sizes are there side by side."""
    weights, _memory = _packed(_matrix(form))
    inputs, groups = _inputs(_values()), DEPTH // 32
    unpack = make_panel(form)

    def sums_of(most: int, blocks: int) -> NDArray[np.float32]:
        by_panel = rows_of_panel(most, blocks)

        @entry
        def call(inputs: int, weights: int, panel: int, sums: int) -> None:
            for block in range(0, 2, blocks):
                for each in range(blocks):
                    unpack(block + each, weights, groups, panel + each * groups * PANEL_GROUP_BYTES)
                for row in range(0, 12, most):
                    by_panel(
                        most, inputs + row * groups * INPUT_BYTES, groups * INPUT_BYTES, panel,
                        groups * PANEL_GROUP_BYTES, groups, sums + row * 128 + block * 64,
                    )  # fmt: skip

        panel, sums = np.zeros(2 * groups * PANEL_GROUP_BYTES // 4, np.float32), np.zeros((12, 32), np.float32)
        call(inputs.ctypes.data, weights & ~63, panel.ctypes.data, sums.ctypes.data)
        return sums

    want = _product(_values(), weights, 0, 12)
    for most, blocks in ((12, 2), (6, 1), (4, 2), (12, 1)):
        assert np.array_equal(sums_of(most, blocks), want)


@entry
def _load_column(weights: int, column: int, factor: float, target: int) -> None:
    load_column(weights, column, DEPTH, factor, target)


@FORMS
def test_a_column_is_read_exactly(form: GroupedForm) -> None:
    """A row of a table of embeddings is its weights, bit for bit, times the factor."""
    matrix = _matrix(form, 70)
    weights, _memory = _packed(matrix)
    got = np.zeros(DEPTH, np.float32)
    for column in (0, 15, 16, 31, 32, 69):
        for factor in (np.float32(1.0), np.float32(24.0)):
            _load_column(weights, column, factor, got.ctypes.data)
            assert np.array_equal(got, matrix.values()[column] * factor)


def test_inputs_are_read_back_as_they_were_stored() -> None:
    """An adapter's products read what the base's product reads, bit for bit."""
    values, read = _values(), np.zeros((ROWS, DEPTH), np.float32)
    inputs = _inputs(values)
    _load(KERNELS, inputs.ctypes.data, read.ctypes.data)
    assert np.array_equal(read, values)


def test_quantising_is_off_by_half_a_scale_at_most() -> None:
    """Of large, small and tiny weights; zeros stay zeros, and inputs are padded with weights of zero."""
    random = np.random.default_rng(2)
    matrix = random.standard_normal((9, 100)).astype(np.float32)
    matrix[1] *= 1e-4
    matrix[2] *= 1e-7
    matrix[3] *= 1e4
    matrix[4] = 0
    found = quantize(matrix)
    values, scales = found.values(), np.repeat(found.scales.astype(np.float32), 32, 1)
    assert values.shape == (9, 128) and not values[:, 100:].any() and not values[4].any()
    assert (np.abs(values[:, :100] - matrix) <= 0.5001 * scales[:, :100]).all()
    assert np.array_equal(quantize(values).values(), values)
