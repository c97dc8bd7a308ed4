"""Views of an arena whose blocks hold quantised keys and values with their scales: see `common/layout.py`."""

from __future__ import annotations

import torch

from common.errors import Internal
from common.layout import KvLayout


def views(
    storage: torch.Tensor, num_layers: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements [blocks, layers, 2, kv_heads, block_tokens, head_dim] of `dtype` and scales, without head_dim, bfloat16.

    `storage` is uint8 [blocks, block_bytes], contiguous; nothing is copied. `dtype` is int8, float8_e4m3fn, or uint8
    for e4m3 on chips that cannot convert it. Raises Internal when the sizes do not fit.
    """
    layout = KvLayout.of(num_layers, kv_heads, head_dim, block_tokens, "int8")
    block_bytes, offset = layout.block_bytes, layout.scales_offset
    if storage.dtype != torch.uint8 or not storage.is_contiguous() or storage.shape[1:] != (block_bytes,):
        raise Internal(f"an arena {tuple(storage.shape)} does not hold blocks of {block_bytes} bytes")
    shape = (storage.shape[0], num_layers, 2, kv_heads, block_tokens)
    # view() of a slice keeps the stride of whole blocks.
    elements = storage[:, :offset].view((*shape, head_dim)).view(dtype)
    return elements, storage[:, offset:].view(torch.bfloat16).view(shape)
