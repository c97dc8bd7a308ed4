"""Gather and scatter of whole blocks on a GPU. Blocks are runs of bytes here, so every layout and type is served.

Place 0 in a list is the null block's: it is packed as zeros (what stands in it is the arena's own)
and never unpacked to.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import kernel

_WIDTH: Final = 4096  # 16 KiB a program


@kernel
def pack_kernel(
    blocks: tl.tensor,
    block_ids: tl.tensor,
    buffer: tl.tensor,
    words: tl.tensor,
    block_stride: tl.tensor,
    WIDTH: tl.constexpr,
    UNPACK: tl.constexpr,
) -> tl.tensor:
    """WIDTH words of one block: to the buffer, or from it."""
    entry = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids + entry).to(tl.int64)
    index = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = index < words
    real = index < tl.where(block != 0, words, 0)
    if UNPACK:
        x = tl.load(buffer + entry * words + index, mask=inside, other=0)
        tl.store(blocks + block * block_stride + index, x, mask=real)
    else:
        x = tl.load(blocks + block * block_stride + index, mask=real, other=0)
        tl.store(buffer + entry * words + index, x, mask=inside)


def _launch(blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor, unpack: bool) -> None:
    block_bytes = blocks[0].numel() * blocks.itemsize
    if not blocks.is_contiguous() or block_bytes % 4 or block_ids.dtype != torch.int32:
        raise Internal(f"blocks of {block_bytes} bytes cannot be packed")
    if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.shape != (block_ids.numel(), block_bytes):
        raise Internal(
            f"a buffer {tuple(buffer.shape)} does not hold {block_ids.numel()} blocks of {block_bytes} bytes"
        )
    if not block_ids.numel():
        return
    words = block_bytes // 4
    as_bytes = blocks.flatten().view(torch.uint8)
    pack_kernel[(block_ids.numel(), -(-words // _WIDTH))](
        as_bytes.view(torch.int32), block_ids, buffer.flatten().view(torch.int32), words, words,
        WIDTH=_WIDTH, UNPACK=unpack, num_warps=8,
    )  # fmt: skip


def pack(blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy blocks block_ids[i] (int32 [n]) to rows i of `buffer`, uint8 [n, block_bytes].

    `blocks` is the arena, contiguous, first dimension the block. Raises Internal on shapes that do not fit.
    """
    _launch(blocks, block_ids, buffer, unpack=False)


def unpack(blocks: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy rows i of `buffer` to blocks block_ids[i], which are distinct. The inverse of `pack`."""
    _launch(blocks, block_ids, buffer, unpack=True)
