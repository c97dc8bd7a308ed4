"""Whole-block operations on an arena: the copy of copy-on-write, and scrubbing.

An arena is an array of blocks as `KvLayout.array_shape` and `array_type` say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import Internal
from common.layout import KvLayout


def planes(arena: NDArray[Any], layout: KvLayout) -> list[NDArray[Any]]:
    """Views [blocks, layers, 2, kv_heads, block_tokens, ...] of all that a token has: elements, and scales if any."""
    if not layout.quantized:
        return [arena]
    shape, tokens = (arena.shape[0], *layout.block_shape), layout.block_tokens
    heads, dim = layout.num_kv_heads, layout.head_dim
    return [
        np.ndarray(
            (*shape[:5], *last), kind, arena, offset,
            (layout.block_bytes, *(size * step for step in (2 * heads * tokens, heads * tokens, tokens, 1)), *inner),
        )
        for last, kind, offset, size, inner in (
            ((dim,), np.uint8, 0, dim, (1,)), ((), np.uint16, layout.scales_offset, 2, ()),
        )
    ]  # fmt: skip


def copy_tokens(
    views: list[NDArray[Any]],
    sources: NDArray[np.int32],
    targets: NDArray[np.int32],
    num_tokens: NDArray[np.int32],
) -> None:
    """Copy the first `num_tokens[i]` tokens of block `sources[i]` to `targets[i]`, all layers, in order of i.

    `views` are those of `planes`.
    """
    arena = views[0]  # [blocks, layers, 2, kv_heads, block_tokens, head_dim]
    if not sources.size == targets.size == num_tokens.size:
        raise Internal("a copy plan has columns of different lengths")
    _check(arena, sources)
    _check(arena, targets)
    if num_tokens.size and not 0 <= num_tokens.min() <= num_tokens.max() <= arena.shape[4]:
        raise Internal("a copy plan names more tokens than a block holds")
    for source, target, count in zip(sources.tolist(), targets.tolist(), num_tokens.tolist(), strict=True):
        for view in views:
            view[target, :, :, :, :count] = view[source, :, :, :, :count]


def fill(arena: NDArray[Any], block_ids: NDArray[np.int32], poison: bool) -> None:
    """Overwrite blocks with zeros, or with NaN: in every type of keys and values all bits set are one."""
    _check(arena, block_ids)
    arena.view(np.uint8)[block_ids] = 0xFF if poison else 0


def _check(arena: NDArray[Any], block_ids: NDArray[np.int32]) -> None:
    # Negative ids would wrap around to another block.
    if block_ids.size and not 0 <= block_ids.min() <= block_ids.max() < arena.shape[0]:
        raise Internal("a block id is outside the arena")
