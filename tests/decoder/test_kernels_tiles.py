"""Register tiles and panels alone: every shape gives the same sums, and panels are transposes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decoder.kernels import sets
from decoder.kernels.compiled import entry
from decoder.kernels.half_panels import pack_keys, panel_bytes
from decoder.kernels.panels import pack_panel
from decoder.kernels.register_tiles import float_product, wide
from decoder.kernels.registers import VECTORS, count_vectors
from decoder.kernels.run_tiles import product_of_panels, product_of_runs

STEPS = 37


@entry
def _floats(a: int, rows: int, b: int, vectors: int, steps: int, c: int) -> None:
    float_product(a, steps * 4, rows, b, vectors * 64, 64, vectors, steps, c, vectors * 64)


@entry
def _panels(kernels: Any, a: int, rows: int, b: int, vectors: int, steps: int, ahead: int, c: int) -> None:
    product_of_panels(kernels, a, steps * 4, rows, b, steps * 64, vectors, steps, ahead, c, vectors * 64)


@entry
def _runs(kernels: Any, a: int, rows: int, runs: int, vectors: int, begin: int, end: int, c: int) -> None:
    product_of_runs(kernels, a, 256, rows, runs, vectors * 64, vectors, begin, end, 0, c, vectors * 64)


@entry
def _panel(kernels: Any, source: int, stride: int, head_dim: int, target: int) -> None:
    pack_panel(kernels, source, stride, head_dim, target)


@entry
def _pack(kernels: Any, source: int, stride: int, head_dim: int, target: int) -> int:
    pack_keys(kernels, source, stride, head_dim, target)
    return panel_bytes(kernels, head_dim)


@entry
def _products(kernels: Any, a: int, rows: int, panels: int, vectors: int, head_dim: int, ahead: int, c: int) -> None:
    size = panel_bytes(kernels, head_dim)
    product_of_panels(kernels, a, head_dim * 4, rows, panels, size, vectors, head_dim, ahead, c, vectors * 64)


def _one_by_one(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """a [rows, steps] by b [steps, columns], one row by one vector at a time."""
    rows, steps = a.shape
    whole = np.zeros((rows, b.shape[1]), np.float32)
    for row in range(rows):
        for column in range(0, b.shape[1], 16):
            vector, sums = np.ascontiguousarray(b[:, column : column + 16]), np.empty(16, np.float32)
            _floats(a[row].ctypes.data, 1, vector.ctypes.data, 1, steps, sums.ctypes.data)
            whole[row, column : column + 16] = sums
    assert np.allclose(whole, a @ b, atol=1e-4)
    return whole


def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    """Products of 1 to 16 rows by 1 to 5 vectors equal, bit for bit, those of one row by one vector at a time."""
    random = np.random.default_rng(1)
    a = random.standard_normal((16, STEPS), np.float32)
    b = random.standard_normal((STEPS, 5 * 16), np.float32)
    single = _one_by_one(a, b)
    for rows in range(1, 17):
        for vectors in range(1, 6):
            part, sums = np.ascontiguousarray(b[:, : vectors * 16]), np.ones((rows + 1, vectors * 16), np.float32)
            _floats(a.ctypes.data, rows, part.ctypes.data, vectors, STEPS, sums.ctypes.data)
            assert np.array_equal(sums[:rows], single[:rows, : vectors * 16]), (rows, vectors)
            assert (sums[rows] == 1.0).all()


def test_panels_and_runs_give_the_same_bits() -> None:
    """Products by panels, and by runs from any step to any other, equal those by vectors that lie together."""
    kernels, random, steps = sets.Float32Kernels(), np.random.default_rng(3), 64
    a = random.standard_normal((16, steps), np.float32)
    b = random.standard_normal((steps, 5 * 16), np.float32)
    for vectors in (1, 4, 5):
        part = np.ascontiguousarray(b[:, : vectors * 16])
        panels = np.ascontiguousarray(part.reshape(steps, vectors, 16).transpose(1, 0, 2))
        anywhere = np.full(vectors, panels.ctypes.data, np.int64)
        # Runs of sixteen steps, the last ones first, with numbers between them that are nobody's.
        apart = np.full((4, 20, vectors * 16), np.nan, np.float32)
        apart[:, :16] = part.reshape(4, 16, vectors * 16)[::-1]
        runs = np.array([apart[3 - run].ctypes.data for run in range(4)], np.int64)
        for rows in (1, 3, 7, 16):
            sums = np.ones((rows + 1, vectors * 16), np.float32)
            _panels(
                kernels, a.ctypes.data, rows, panels.ctypes.data, vectors, steps, anywhere.ctypes.data,
                sums.ctypes.data,
            )  # fmt: skip
            assert np.array_equal(sums[:rows], _one_by_one(a[:rows], part)) and (sums[rows] == 1.0).all()
            for begin, end in ((0, 64), (5, 6), (3, 16), (16, 33), (40, 64), (17, 47)):
                sums = np.ones((rows + 1, vectors * 16), np.float32)
                _runs(kernels, a.ctypes.data, rows, runs.ctypes.data, vectors, begin, end, sums.ctypes.data)
                wanted = _one_by_one(np.ascontiguousarray(a[:rows, begin:end]), part[begin:end])
                assert np.array_equal(sums[:rows], wanted), (vectors, rows, begin, end)
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


def _stored_keys(storage: sets.Storage, rows: int, head_dim: int) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Random stored elements, and the numbers that a product takes them for."""
    numbers = torch.randn((rows, head_dim), generator=torch.Generator().manual_seed(4))
    if isinstance(storage, sets.Int8Storage):
        whole = (numbers * 40).clamp(-128, 127).to(torch.int8)
        return whole.numpy(), whole.float().numpy()
    if isinstance(storage, sets.Float8Storage):
        small = numbers.to(torch.float8_e4m3fn)
        return small.view(torch.uint8).numpy(), small.float().numpy() / 256
    kinds = {sets.Float16Storage: torch.float16, sets.Bfloat16Storage: torch.bfloat16}
    stored = numbers.to(kinds.get(type(storage), torch.float32))
    return stored.view(torch.int32 if stored.itemsize == 4 else torch.int16).numpy(), stored.float().numpy()


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize(
    "storage",
    [
        sets.Float32Storage(), sets.Bfloat16Storage(), sets.Float16Storage(), sets.Int8Storage(), sets.Float8Storage(),
    ],
)  # fmt: skip
def test_keys_of_every_storage_are_multiplied_step_by_step(storage: sets.Storage, head_dim: int) -> None:
    """Products by packed keys have the bits of those by their numbers; no panel is written past its bytes."""
    vectors, kernels = 5, sets.Float32Kernels(storage)
    stored, numbers = _stored_keys(storage, vectors * 16, head_dim)
    apart = np.zeros((vectors * 16, head_dim + 32), stored.dtype)
    apart[:, :head_dim] = stored
    memory = np.full(vectors * 16 * head_dim * 4 + 4096, 7, np.uint8)
    start, size = memory.ctypes.data, 0
    for vector in range(vectors):
        source = apart[vector * 16 :].ctypes.data
        size = _pack(kernels, source, apart.strides[0], head_dim, start + vector * size)
    assert (memory[vectors * size :] == 7).all()
    a = np.random.default_rng(5).standard_normal((7, head_dim), np.float32)
    anywhere = np.full(vectors, start, np.int64)
    for rows in (1, 3, 4, 7):
        sums = np.ones((rows + 1, vectors * 16), np.float32)
        _products(
            kernels, a.ctypes.data, rows, start, vectors, head_dim, anywhere.ctypes.data, sums.ctypes.data
        )  # fmt: skip
        assert np.array_equal(sums[:rows], _one_by_one(a[:rows], np.ascontiguousarray(numbers.T)))
        assert (sums[rows] == 1.0).all()


def test_sums_leave_room_in_the_registers() -> None:
    """A tile's sums never take more than three quarters of the registers, on a CPU with AVX-512 and without."""
    assert (count_vectors({"avx512f": True}), count_vectors({"avx2": True}), count_vectors({})) == (32, 8, 8)
    assert all(rows * wide(rows) <= VECTORS * 3 // 4 for rows in (1, 2, 3, 4, 6))
