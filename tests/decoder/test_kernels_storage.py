"""How keys and values are stored: each storage writes a row and reads it back, alone, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.kernels import sets
from decoder.kernels.attention_products import copy_rows
from decoder.kernels.compiled import entry
from decoder.kernels.rows import store_kv

HEAD_DIM = 32
HALF_MAX = 65504.0


@entry
def _round_trip(kernels: Any, source: int, stored: int, num_bytes: int, target: int) -> None:
    store_kv(kernels, stored, source, HEAD_DIM)
    copy_rows(kernels, stored, num_bytes, target)


def round_trip(storage: sets.Storage, values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The bytes of a stored row, and the row read back."""
    size = 4 if isinstance(storage, sets.Float32Storage) else 2
    stored, back = np.zeros(HEAD_DIM * size, np.uint8), np.zeros(HEAD_DIM, np.float32)
    _round_trip(sets.WideKernels(storage), values.ctypes.data, stored.ctypes.data, stored.nbytes, back.ctypes.data)
    return stored, back


@pytest.mark.parametrize("scale", [1e-9, 1e-7, 1e-5, 1e-3, 1.0, 1e3])
def test_float16_rounds_as_numpy(scale: float) -> None:
    """A stored row has the bits numpy's float16 has, subnormal numbers too, and is read back as those."""
    values = (np.random.default_rng(1).standard_normal(HEAD_DIM) * scale).astype(np.float32)
    stored, back = round_trip(sets.Float16Storage(), values)
    want = values.astype(np.float16)
    assert np.array_equal(stored.view(np.uint16), want.view(np.uint16))
    assert np.array_equal(back, want.astype(np.float32))


def test_float16_saturates_and_keeps_nan() -> None:
    """What float16 cannot hold becomes its largest number and never an infinity; a NaN stays one."""
    values = np.zeros(HEAD_DIM, np.float32)
    values[:8] = [65503.9, 65519.9, 65520.0, 1e6, -65520.0, -3e38, np.inf, -np.inf]
    values[8:10] = [np.nan, -np.nan]
    _, back = round_trip(sets.Float16Storage(), values)
    sign = np.sign(values[:8])
    assert np.array_equal(back[:8], sign * HALF_MAX)
    assert np.isnan(back[8:10]).all()
    assert not back[10:].any()
