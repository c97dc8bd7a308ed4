"""Entries for the CPU forms of `norm` and `activation`: the fused step's own row kernels, on rows of their own."""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from decoder.kernels import sets, simd
from decoder.kernels.compiled import cached_entry
from decoder.kernels.rows import add_normalized, gelu_multiply, normalize, silu_multiply
from decoder.kernels.step import source_fingerprint

KERNELS: Final = sets.Float32Kernels()


def _normalize_rows(
    kernels: Any, source: int, weight: int, rows: int, columns: int, width: int, epsilon: float, target: int
) -> None:
    for row in range(rows):
        normalize(kernels, source + row * columns * 4, weight, columns, width, np.float32(epsilon), target, row)


def _add_normalized_rows(
    source: int, weight: int, rows: int, columns: int, width: int, epsilon: float, target: int
) -> None:
    for row in range(rows):
        start = row * columns * 4
        add_normalized(source + start, weight, columns, width, np.float32(epsilon), target + start)


def _gate_rows(first: int, second: int, words: int, gelu: bool, target: int) -> None:
    for offset in range(0, words * 4, 64):
        gate, up = simd.load_floats(first + offset), simd.load_floats(second + offset)
        if gelu:
            simd.store_floats(target + offset, gelu_multiply(gate, up))
        else:
            simd.store_floats(target + offset, silu_multiply(gate, up))


for _function in (_normalize_rows, _add_normalized_rows, _gate_rows):
    _function.__qualname__ = f"{_function.__name__}_{source_fingerprint()}"
normalize_rows, add_normalized_rows = cached_entry(_normalize_rows), cached_entry(_add_normalized_rows)
gate_rows = cached_entry(_gate_rows)


def padded(rows: torch.Tensor) -> torch.Tensor:
    """A float32 copy of rows [n, width], padded with zeros to a multiple of sixteen columns."""
    copy = torch.zeros((rows.shape[0], -(-rows.shape[1] // 16) * 16))
    copy[:, : rows.shape[1]] = rows
    return copy
