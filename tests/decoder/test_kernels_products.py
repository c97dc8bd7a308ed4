"""One block product per kernel set against float64: how exact it is, and that a row's sum depends on that row alone.

Where the CPU has no AMX, its tile products are emulated, so that the layout of split inputs is tried on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.kernels import amx, frame, sets, simd
from decoder.kernels.block_products import block_product, product_by_tiles
from decoder.kernels.compiled import entry
from decoder.kernels.row_tiles import EVEN, FEW_REGISTERS, MANY_REGISTERS, ODD, WHOLE, Tile
from decoder.kernels.rows import load_input, store_input
from decoder.kernels.step import enter, leave
from decoder.models.packing import Memory, pack, to_bfloat16
from tests.decoder.amx_emulation import emulate

DEPTH = 608  # three unequal runs of k in bfloat16, five in float32
ROWS = 64
ROOM = frame.SUM_BYTES // 4  # floats that a block product may write
# Largest error against float64, in parts of the largest sum.
EXACTNESS = {
    sets.Float32Kernels: 1e-6,
    sets.WideKernels: 1e-6,
    sets.AmxWideKernels: 2e-5,
    sets.Bfloat16Kernels: 1e-2,
    sets.DotKernels: 1e-2,
    sets.AmxKernels: 1e-2,
}


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMX, or its emulation."""
    if not amx.available():
        emulate(monkeypatch)


@entry
def _multiply(
    kernels: Any, words: Any, source: int, inputs: int, row: int, rows: int, weights: int, sums: int, once: bool
) -> None:
    enter(kernels, words)
    for line in range(ROWS):
        for column in range(0, DEPTH, 16):
            vector = simd.load_floats(source + (line * DEPTH + column) * 4)
            store_input(kernels, inputs, line, column, DEPTH, vector)
    block_product(kernels, inputs, row, rows, DEPTH, weights, sums, once)
    leave(kernels)


def _product(
    kernels: sets.Kernels, values: NDArray[np.float32], weights: NDArray[Any], row: int, rows: int, once: bool = False
) -> NDArray[np.float32]:
    """Sums of `rows` rows from `row`; fails where memory past the room was written."""
    words = np.zeros(frame.FRAME_WORDS, np.int64)
    configuration = np.frombuffer(amx.full_tiles(), np.uint8).copy()
    words[frame.TILE_CONFIG] = configuration.ctypes.data
    inputs, sums = np.zeros(ROWS * DEPTH, np.float32), np.full(ROOM + 64, 7.0, np.float32)
    addresses = [array.ctypes.data for array in (values, inputs, weights, sums)]
    _multiply(kernels, words, addresses[0], addresses[1], row, rows, addresses[2], addresses[3], once)
    assert (sums[ROOM:] == 7.0).all()
    return sums[: rows * 32].reshape(rows, 32).copy()


def _operands(kernels: sets.Kernels) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[np.float64], Memory]:
    random = np.random.default_rng(0)
    values = random.standard_normal((ROWS, DEPTH)).astype(np.float32)
    matrix = random.standard_normal((32, DEPTH)).astype(np.float32)
    matrix = (to_bfloat16(matrix).astype(np.uint32) << 16).view(np.float32)
    memory = Memory(1 << 18)
    packed = pack(memory, matrix, not isinstance(kernels, sets.Float32Kernels))
    return values, packed, values.astype(np.float64) @ matrix.T.astype(np.float64), memory


@pytest.mark.parametrize("kind", EXACTNESS, ids=lambda kind: kind.__name__)
def test_sums_are_as_exact_as_the_inputs(kind: type[sets.Kernels]) -> None:
    """float32 and split inputs give float64's sums nearly; inputs rounded to bfloat16 do not."""
    kernels = kind()
    values, weights, want, _memory = _operands(kernels)
    got = np.concatenate([_product(kernels, values, weights, row, 32) for row in (0, 32)])
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < EXACTNESS[kind]
    if kind in (sets.Bfloat16Kernels, sets.DotKernels, sets.AmxKernels):
        assert error > 50 * EXACTNESS[sets.AmxWideKernels]


@pytest.mark.parametrize("kind", EXACTNESS, ids=lambda kind: kind.__name__)
def test_a_row_does_not_depend_on_its_neighbours(kind: type[sets.Kernels]) -> None:
    """Any number of rows, with or without streaming weights, gives each row the same bits."""
    kernels = kind()
    values, weights, _, _memory = _operands(kernels)
    want = _product(kernels, values, weights, 32, 32)
    for rows in (*range(1, 14), 15, 16, 17, 31):
        for once in (False, True):
            assert np.array_equal(_product(kernels, values, weights, 32, rows, once), want[:rows])
    alone = values.copy()
    alone[33:] = 0
    assert np.array_equal(_product(kernels, alone, weights, 32, 32)[0], want[0])


def _by_tiles(kind: type[sets.Kernels], tile: Tile, rows: int) -> NDArray[np.float32]:
    kernels = kind()
    values, weights, _, _memory = _operands(kernels)
    passes = ((WHOLE,),) if kind is sets.Float32Kernels else tile.pair_passes
    multiply = product_by_tiles(passes, tile)

    @entry
    def call(a: int, rows: int, weights: int, sums: int) -> None:
        multiply(a, DEPTH * 4, rows, DEPTH, weights, sums)

    sums = np.zeros(ROOM, np.float32)
    call(values.ctypes.data, rows, weights.ctypes.data, sums.ctypes.data)
    return sums[: rows * 32]


@pytest.mark.parametrize("kind", (sets.Float32Kernels, sets.WideKernels), ids=lambda kind: kind.__name__)
def test_tiles_of_every_cpu_give_the_same_bits(kind: type[sets.Kernels]) -> None:
    """The tile that a CPU's registers allow decides how fast a row is, and not what it is."""
    want = _by_tiles(kind, MANY_REGISTERS, 32)
    for tile in (FEW_REGISTERS, Tile(3, 1, ((EVEN, ODD),))):
        assert np.array_equal(_by_tiles(kind, tile, 32), want)


@entry
def _store_and_load(kernels: Any, source: int, inputs: int, target: int) -> None:
    for line in range(ROWS):
        for column in range(0, DEPTH, 16):
            vector = simd.load_floats(source + (line * DEPTH + column) * 4)
            store_input(kernels, inputs, line, column, DEPTH, vector)
    for line in range(ROWS):
        for column in range(0, DEPTH, 16):
            simd.store_floats(target + (line * DEPTH + column) * 4, load_input(kernels, inputs, line, column, DEPTH))


@pytest.mark.parametrize("kind", EXACTNESS, ids=lambda kind: kind.__name__)
def test_inputs_are_read_back_as_they_were_stored(kind: type[sets.Kernels]) -> None:
    """An adapter's products read what the base's product reads: the same numbers in every layout of inputs."""
    values = np.random.default_rng(1).standard_normal((ROWS, DEPTH)).astype(np.float32)
    inputs, read = np.zeros(ROWS * DEPTH, np.float32), np.zeros((ROWS, DEPTH), np.float32)
    _store_and_load(kind(), values.ctypes.data, inputs.ctypes.data, read.ctypes.data)
    if kind in (sets.Bfloat16Kernels, sets.DotKernels, sets.AmxKernels):
        assert np.array_equal(read, (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32))
    else:
        bound = 2.0**-16 if kind is sets.AmxWideKernels else 0.0
        assert (np.abs(read - values) <= bound * np.abs(values)).all()
