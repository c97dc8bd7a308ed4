"""The arena as the device step reads it: how elements lie there, whole blocks, and views of elements and scales.

Owns which torch type stored keys and values have on a chip, and that an array is taken only if its geometry is the
layout's, so that no kernel gets a wrong stride. Nothing is copied. Called by `device_model.py`; it starts no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import Internal
from common.layout import KvDtype, KvLayout
from decoder.grouped_arena import GroupedArena, parts_of
from decoder.kernels.quantized import views

TORCH_TYPES: Final = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
}
_CONVERTS_E4M3: Final = 89
"""Compute capability from which a chip converts e4m3 itself; others take it as bytes."""


@dataclass(frozen=True, slots=True)
class DeviceArena:
    """`blocks` [blocks, ...] is contiguous, a block one run of bytes. `elements` [blocks, layers, 2, kv_heads,
    block_tokens, head_dim] and `scales`, bfloat16 without head_dim, are views of it; None where there are no scales.

    windows: the same of window blocks, where the layout has groups; `of` is `GroupedArena.of` then.
    """

    blocks: torch.Tensor
    elements: torch.Tensor
    scales: torch.Tensor | None
    windows: DeviceArena | None = None
    of: NDArray[np.int32] | None = None


def element_type(layout: KvLayout, capability: int) -> torch.dtype:
    """The type in which kernels take stored elements on a chip of this compute capability (`kernels/gpu.py`)."""
    if not layout.quantized:
        return TORCH_TYPES[layout.dtype]
    if layout.quantization == "int8":
        return torch.int8
    return torch.float8_e4m3fn if capability >= _CONVERTS_E4M3 else torch.uint8


def allocate(layout: KvLayout, num_blocks: int, device: torch.device) -> Any:
    """Zeros for `num_blocks` blocks and the null block; with groups each block has the window block of its number."""
    dtype = torch.uint8 if layout.quantized else TORCH_TYPES[layout.dtype]

    def zeros(group: KvLayout) -> torch.Tensor:
        return torch.zeros((num_blocks + 1, *group.array_shape), dtype=dtype, device=device)

    if not layout.grouped:
        return zeros(layout)
    numbers = np.arange(num_blocks + 1, dtype=np.int32)
    return GroupedArena(zeros(layout.full_group), zeros(layout.window_group), numbers)


def view_arena(arena: Any, layout: KvLayout, capability: int, device: torch.device) -> DeviceArena:
    """Views of an arena: torch tensors on `device`, or the host's arrays. Raises Internal when it does not fit."""
    views_of = [_view(array, group, capability, device) for array, group in parts_of(arena, layout)]
    return replace(views_of[0], windows=views_of[1], of=arena.of) if len(views_of) > 1 else views_of[0]


def _view(array: Any, layout: KvLayout, capability: int, device: torch.device) -> DeviceArena:
    blocks: torch.Tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    stored = torch.uint8 if layout.quantized else TORCH_TYPES[layout.dtype]
    if blocks.dtype == torch.uint16 and stored.itemsize == 2:
        blocks = blocks.view(stored)  # NumPy has bits alone of what it has no type for
    fits = blocks.dtype == stored and blocks.shape[1:] == layout.array_shape and blocks.is_contiguous()
    if not fits or blocks.device.type != device.type:
        raise Internal(f"an arena of {blocks.dtype} {tuple(blocks.shape[1:])} on {blocks.device} does not fit")
    if not layout.quantized:
        return DeviceArena(blocks, blocks, None)
    sizes = layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_tokens
    return DeviceArena(blocks, *views(blocks, *sizes, element_type(layout, capability)))
