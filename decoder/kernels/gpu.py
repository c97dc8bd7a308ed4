"""What the GPU kernels of the sub-packages have in common: the decorator, launch parameters by chip, argument checks.

A sub-package `<operation>/triton.py` holds kernels and one launcher. Launchers take torch tensors, check what can be
checked without waiting for the device, and start kernels on the current stream; none of them allocates where a caller
may hand the memory in, so that a step can be recorded as a CUDA graph. Needs the `gpu` extra; nothing on a CPU-only
install imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import triton

from decoder.kernels.paged_arguments import (
    FLOAT8,
    FLOAT8_BITS,
    INT8,
    NOT_QUANTIZED,
    check_paged,
    quantization,
)

__all__ = ("FLOAT8", "FLOAT8_BITS", "INT8", "NOT_QUANTIZED", "check_paged", "quantization")

LOG2_E: Final = 1.4426950408889634
NO_WINDOW: Final = 1 << 30
"""A sliding window wider than any context."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a GPU kernel, or a device function, at its first launch."""
    return triton.jit(function)


def use_device(device: torch.device) -> None:
    """Make `device` the one that this thread launches on: Triton takes the thread's, whatever the tensors are on."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()


def capability(device: torch.device) -> int:
    """Compute capability as 10 * major + minor; 0 for an AMD chip, 90 for anything else (the interpreter)."""
    if device.type != "cuda":
        return 90
    if torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def precision(queries: torch.Tensor) -> str:
    """How products of float32 are computed: as three of TF32, or plainly where a chip has none. Others do not care."""
    if queries.dtype != torch.float32:
        return "tf32"
    return "tf32x3" if torch.version.hip is None else "ieee"


def scale_planes(arena: torch.Tensor, scales: torch.Tensor | None, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [blocks, kv_heads, block_tokens] of the scales of keys and values, as bits; without scales, stand-ins."""
    if scales is None:
        return arena[:, layer, 0, :, :, 0], arena[:, layer, 1, :, :, 0]
    bits = scales.view(torch.int16)
    return bits[:, layer, 0], bits[:, layer, 1]
