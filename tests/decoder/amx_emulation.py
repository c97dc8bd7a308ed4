"""AMX tile products for any CPU, so that what is around them, their layouts above all, is tried on every machine.

The sums are those of the tiles but for the order in which products of one pair of k are added.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from decoder.kernels import amx, simd
from decoder.kernels.compiled import kernel, made_kernel

PRODUCTS = {
    "product_2x2": (2, 2),
    "product_2x1": (2, 1),
    "product_1x2": (1, 2),
    "product_1x2_streaming": (1, 2),
    "product_2x2_streaming": (2, 2),
}


@functools.cache
def emulated(row_tiles: int, column_tiles: int) -> Any:
    """`amx.product_RxC` for any CPU."""

    @made_kernel(f"{row_tiles}x{column_tiles}")
    def product(
        a: int, a_row: int, a_k: int, a_m: int, b: int, b_k: int, b_n: int, steps: int,
        c: int, c_row: int, c_m: int, c_n: int,
    ) -> None:  # fmt: skip
        for m in range(row_tiles):
            for row in range(16):
                for n in range(column_tiles):
                    total = simd.splat(np.float32(0.0))
                    for step in range(steps):
                        for pair in range(16):
                            x = a + m * a_m + step * a_k + row * a_row + pair * 4
                            words = simd.load_ints(b + n * b_n + step * b_k + pair * 64)
                            total = simd.fma(simd.splat_bf16(x), simd.low_halves(words), total)
                            total = simd.fma(simd.splat_bf16(x + 2), simd.high_halves(words), total)
                    simd.store_floats(c + m * c_m + n * c_n + row * c_row, total)

    return product


@kernel
def _configure(address: int) -> None:
    pass


@kernel
def _release() -> None:
    pass


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put emulations in the place of all that is AMX's, for functions compiled from now on."""
    for name, tiles in PRODUCTS.items():
        monkeypatch.setattr(amx, name, emulated(*tiles))
    monkeypatch.setattr(amx, "configure", _configure)
    monkeypatch.setattr(amx, "release", _release)
