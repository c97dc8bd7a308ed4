"""The CPU form of `scrub` in `triton.py`: the same call."""

from __future__ import annotations

import torch

from common.errors import Internal


def scrub(blocks: torch.Tensor, block_ids: torch.Tensor, *, poison: bool = False) -> None:
    """Overwrite blocks block_ids (int32 [n]) with zeros, or with NaN; block 0 stays.

    `blocks` is the arena, contiguous, first dimension the block: float32, bfloat16, float16, or bytes when quantised.
    Raises Internal on what does not fit.
    """
    if not blocks.is_contiguous() or block_ids.dtype != torch.int32:
        raise Internal("blocks or their ids cannot be scrubbed")
    if block_ids.numel() and not 0 <= int(block_ids.min()) <= int(block_ids.max()) < blocks.shape[0]:
        raise Internal("a block id is outside the arena")
    # All bits set are NaN in every type of keys and values, and in scales.
    rows = blocks.view(blocks.shape[0], -1).view(torch.uint8)
    rows.numpy()[block_ids[block_ids != 0].numpy()] = 0xFF if poison else 0
