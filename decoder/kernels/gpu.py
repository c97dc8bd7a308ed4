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

from common.errors import Internal

LOG2_E: Final = 1.4426950408889634
NO_WINDOW: Final = 1 << 30
"""A sliding window wider than any context."""

NOT_QUANTIZED: Final = 0
INT8: Final = 1
FLOAT8: Final = 2
FLOAT8_BITS: Final = 3
"""fp8 e4m3 as plain bytes, for chips without conversion instructions (before compute capability 8.9)."""

_COMPUTED: Final = (torch.float32, torch.bfloat16, torch.float16)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a GPU kernel, or a device function, at its first launch."""
    return triton.jit(function)


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


def quantization(arena: torch.Tensor, scales: torch.Tensor | None) -> int:
    """How elements are stored: NOT_QUANTIZED, INT8, FLOAT8 or FLOAT8_BITS (uint8)."""
    kinds = {torch.int8: INT8, torch.float8_e4m3fn: FLOAT8, torch.uint8: FLOAT8_BITS}
    if arena.dtype in _COMPUTED and scales is None:
        return NOT_QUANTIZED
    if arena.dtype in kinds and scales is not None:
        return kinds[arena.dtype]
    raise Internal(f"an arena of {arena.dtype} {'without' if scales is None else 'with'} scales has no kernels")


def check_paged(
    queries: torch.Tensor, arena: torch.Tensor, scales: torch.Tensor | None, tables: torch.Tensor, layer: int
) -> int:
    """Check shapes and types of one call of paged attention; returns the quantisation.

    queries [..., heads, head_dim]; arena [blocks, layers, 2, kv_heads, block_tokens, head_dim]; scales likewise without
    head_dim; tables int32 [batch, width]. Raises Internal with the numbers.
    """
    kind = quantization(arena, scales)
    heads, head_dim = queries.shape[-2:]
    _, layers, two, kv_heads, block_tokens, stored_dim = arena.shape
    if queries.dtype not in _COMPUTED or (kind == NOT_QUANTIZED and queries.dtype != arena.dtype):
        raise Internal(f"queries of {queries.dtype} do not fit an arena of {arena.dtype}")
    if two != 2 or stored_dim != head_dim or heads % kv_heads or not 0 <= layer < layers:
        raise Internal(f"queries {tuple(queries.shape)} do not fit layer {layer} of an arena {tuple(arena.shape)}")
    if head_dim % 16 or block_tokens & (block_tokens - 1):
        raise Internal(f"head_dim {head_dim} or block_tokens {block_tokens} has no kernels")
    if arena.stride()[-2:] != (head_dim, 1) or queries.stride(-1) != 1 or tables.stride(-1) != 1:
        raise Internal("rows of queries, tables and blocks must be contiguous")
    if tables.dtype != torch.int32:
        raise Internal(f"block tables are {tables.dtype}, not int32")
    if scales is not None and (scales.shape != arena.shape[:-1] or scales.dtype != torch.bfloat16):
        raise Internal(f"scales {tuple(scales.shape)} of {scales.dtype} do not fit an arena {tuple(arena.shape)}")
    return kind


def scale_planes(arena: torch.Tensor, scales: torch.Tensor | None, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views [blocks, kv_heads, block_tokens] of the scales of keys and values, as bits; without scales, stand-ins."""
    if scales is None:
        return arena[:, layer, 0, :, :, 0], arena[:, layer, 1, :, :, 0]
    bits = scales.view(torch.int16)
    return bits[:, layer, 0], bits[:, layer, 1]
