"""What paged operations of every form share: how elements are stored, and the checks of their arguments.

Nothing here needs Triton; `gpu.py` and the CPU's `one_layer.py` use it.
"""

from __future__ import annotations

from typing import Final

import torch

from common.errors import Internal

NOT_QUANTIZED: Final = 0
INT8: Final = 1
FLOAT8: Final = 2
FLOAT8_BITS: Final = 3
"""fp8 e4m3 as plain bytes, for chips without conversion instructions (before compute capability 8.9)."""

_COMPUTED: Final = (torch.float32, torch.bfloat16, torch.float16)


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
