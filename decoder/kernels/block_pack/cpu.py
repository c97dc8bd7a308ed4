"""The CPU form of `pack` and `unpack` in `triton.py`: the same calls, one copy of each block's bytes."""

from __future__ import annotations

import numpy as np
import torch

from common.errors import Internal


def _check(blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    num_bytes = blocks[0].numel() * blocks.itemsize
    if not blocks.is_contiguous() or not buffer.is_contiguous() or block_ids.dtype != torch.int32:
        raise Internal("blocks, their ids or the buffer cannot be packed")
    if buffer.dtype != torch.uint8 or buffer.shape != (block_ids.numel(), num_bytes):
        raise Internal(f"a buffer {tuple(buffer.shape)} does not fit {block_ids.numel()} blocks of {num_bytes} bytes")
    if block_ids.numel() and not 0 <= int(block_ids.min()) <= int(block_ids.max()) < blocks.shape[0]:
        raise Internal("a block id is outside the arena")
    return blocks.view(blocks.shape[0], -1).view(torch.uint8)


def pack(blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy blocks block_ids[i] (int32 [n]) to rows i of `buffer`, uint8 [n, block_bytes]; block 0 gives zeros.

    `blocks` is the arena, contiguous, first dimension the block. Raises Internal on shapes or ids that do not fit.
    """
    rows = _check(blocks, block_ids, buffer)
    # NumPy copies whole rows; torch's gather of bytes goes one by one.
    ids, packed = block_ids.numpy(), buffer.numpy()
    np.take(rows.numpy(), ids, axis=0, out=packed, mode="clip")
    packed[ids == 0] = 0


def unpack(blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy rows i of `buffer` to blocks block_ids[i], which are distinct; block 0 takes nothing."""
    rows = _check(blocks, block_ids, buffer)
    ids, packed = block_ids.numpy(), buffer.numpy()
    real = ids != 0
    rows.numpy()[ids[real]] = packed if real.all() else packed[real]
