"""Register tiles and panels alone: every shape gives the same sums, and panels are transposes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.kernels import sets
from decoder.kernels.compiled import entry
from decoder.kernels.panels import pack_panel
from decoder.kernels.register_tiles import stored_product, wide
from decoder.kernels.registers import VECTORS, count_vectors

STEPS = 37


@entry
def _product(kernels: Any, a: int, rows: int, b: int, vectors: int, steps: int, c: int) -> None:
    stored_product(kernels, a, steps * 4, rows, b, vectors * 64, 64, vectors, steps, c, vectors * 64)


@entry
def _panel(kernels: Any, source: int, stride: int, head_dim: int, target: int) -> None:
    pack_panel(kernels, source, stride, head_dim, target, source)


def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    """Products of 1 to 16 rows by 1 to 5 vectors equal, bit for bit, those of one row by one vector at a time."""
    kernels, random = sets.Float32Kernels(), np.random.default_rng(1)
    a = random.standard_normal((16, STEPS), np.float32)
    b = random.standard_normal((STEPS, 5 * 16), np.float32)
    single = np.zeros((16, 5 * 16), np.float32)
    for row in range(16):
        for vector in range(5):
            column, sums = np.ascontiguousarray(b[:, vector * 16 : vector * 16 + 16]), np.empty(16, np.float32)
            _product(kernels, a[row].ctypes.data, 1, column.ctypes.data, 1, STEPS, sums.ctypes.data)
            single[row, vector * 16 : vector * 16 + 16] = sums
    assert np.allclose(single, a @ b, atol=1e-4)
    for rows in range(1, 17):
        for vectors in range(1, 6):
            part, sums = np.ascontiguousarray(b[:, : vectors * 16]), np.ones((rows + 1, vectors * 16), np.float32)
            _product(kernels, a.ctypes.data, rows, part.ctypes.data, vectors, STEPS, sums.ctypes.data)
            assert np.array_equal(sums[:rows], single[:rows, : vectors * 16]), (rows, vectors)
            assert (sums[rows] == 1.0).all()


@pytest.mark.parametrize(
    ("storage", "kind"),
    [(sets.Float32Storage(), np.uint32), (sets.Float16Storage(), np.uint16), (sets.Int8Storage(), np.uint8)],
)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_a_panel_is_a_transpose(storage: sets.Storage, kind: type, head_dim: int) -> None:
    """Sixteen rows, apart from each other, become [head_dim, 16], element by element; nothing else is written."""
    numbers: NDArray[Any] = np.random.default_rng(2).integers(0, np.iinfo(kind).max, (16, head_dim + 16)).astype(kind)
    panel: NDArray[Any] = np.zeros((head_dim + 1, 16), kind)
    kernels = sets.Float32Kernels(storage)
    _panel(kernels, numbers.ctypes.data, numbers.strides[0], head_dim, panel.ctypes.data)
    assert np.array_equal(panel[:head_dim], numbers[:, :head_dim].T)
    assert not panel[head_dim].any()


def test_sums_leave_room_in_the_registers() -> None:
    """A tile's sums never take more than three quarters of the registers, on a CPU with AVX-512 and without."""
    assert (count_vectors({"avx512f": True}), count_vectors({"avx2": True}), count_vectors({})) == (32, 8, 8)
    assert all(rows * wide(rows) <= VECTORS * 3 // 4 for rows in (1, 2, 3, 4, 6))
