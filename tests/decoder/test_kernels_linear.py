"""A whole product, cut into panels of rows and groups of column blocks: every part computed once, whatever the cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.kernels import amx, frame, sets, simd
from decoder.kernels.compiled import entry
from decoder.kernels.linear import ADD, linear
from decoder.kernels.rows import store_input
from decoder.kernels.step import enter, leave
from decoder.kernels.sync import CONTROL_WORDS
from decoder.models.packing import Memory, pack, to_bfloat16
from tests.decoder.amx_emulation import emulate

DEPTH, COLUMNS, MOST_ROWS = 64, 66 * 32, 300  # 66 pairs: neither two nor four divide what is left of a group
SETS = [sets.Float32Kernels(), sets.WideKernels(), sets.Bfloat16Kernels(), sets.DotKernels(), sets.AmxKernels()]


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMX, or its emulation."""
    if not amx.available():
        emulate(monkeypatch)


@entry
def _product(
    kernels: Any, words: Any, source: int, rows: int, inputs: int, weights: int, counter: int, size: int, scratch: int,
    out: int,
) -> None:  # fmt: skip
    enter(kernels, words)
    for line in range(rows):
        for column in range(0, DEPTH, 16):
            store_input(kernels, inputs, line, column, DEPTH, simd.load_floats(source + (line * DEPTH + column) * 4))
    pair_bytes = DEPTH * 32 * (4 if simd.load_int64(counter + 64) else 2)
    # One thread stands for all of a team: it takes every task.
    linear(
        kernels, words, frame.NO_ADAPTER, counter, 0, size, scratch, ADD, inputs, rows, DEPTH, weights, 0,
        COLUMNS // 32, pair_bytes, out, COLUMNS, 0,
    )  # fmt: skip
    leave(kernels)


def _run(kernels: sets.Kernels, values: NDArray[np.float32], packed: NDArray[Any], size: int) -> NDArray[np.float32]:
    words = np.zeros(frame.FRAME_WORDS, np.int64)
    configuration = np.frombuffer(amx.full_tiles(), np.uint8).copy()
    words[frame.TILE_CONFIG] = configuration.ctypes.data
    control = np.zeros(CONTROL_WORDS, np.int32)
    words[frame.CONTROL] = control.ctypes.data
    counter = np.zeros(16, np.int64)
    counter[8] = isinstance(kernels, sets.Float32Kernels)
    rows = len(values)
    inputs, scratch = np.zeros((rows + 32) * DEPTH, np.float32), np.zeros(frame.SUM_BYTES // 4, np.float32)
    # Added to, so that what is computed twice shows, and rows past the last one, which nobody may touch.
    out = np.ones((rows + 1, COLUMNS), np.float32)
    addresses = [array.ctypes.data for array in (values, inputs, packed, counter, scratch, out)]
    _product(kernels, words, addresses[0], rows, addresses[1], addresses[2], addresses[3], size, *addresses[4:])
    assert (out[rows] == 1.0).all()
    return out[:rows]


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: type(kernels).__name__)
@pytest.mark.parametrize("size", [1, 4, 64])
def test_panels_and_groups_change_no_bit_of_a_row(kernels: sets.Kernels, size: int) -> None:
    """Three panels; groups of four pairs with one thread, of two with four, of one with many."""
    random = np.random.default_rng(0)
    values = random.standard_normal((MOST_ROWS, DEPTH)).astype(np.float32)
    matrix = random.standard_normal((COLUMNS, DEPTH)).astype(np.float32)
    matrix = (to_bfloat16(matrix).astype(np.uint32) << 16).view(np.float32)
    memory = Memory(1 << 20)
    packed = pack(memory, matrix, not isinstance(kernels, sets.Float32Kernels))
    together = _run(kernels, values, packed, size)
    for first in (0, 127, 128, MOST_ROWS - 1):
        alone = _run(kernels, values[first : first + 1].copy(), packed, size)
        np.testing.assert_array_equal(together[first], alone[0])
    exact = values.astype(np.float64) @ matrix.T.astype(np.float64) + 1.0
    bound = 1e-5 if isinstance(kernels, (sets.Float32Kernels, sets.WideKernels)) else 2e-2
    assert np.abs(together - exact).max() < bound * np.abs(exact).max()
