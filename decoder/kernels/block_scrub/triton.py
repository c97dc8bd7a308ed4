"""Scrubbing on a GPU: whole blocks filled with one 32-bit pattern. The null block is never written."""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import kernel

_WIDTH: Final = 4096
_NAN_PATTERNS: Final = {
    torch.float32: 0x7FC00000,
    torch.bfloat16: 0x7FC07FC0,
    torch.float16: 0x7E007E00,
    torch.uint8: 0x7FC07FC0,
}
"""Bytes hold a quantised block; as bfloat16 they poison its scales, and with them whatever is read."""


@kernel
def scrub_kernel(
    blocks: tl.tensor, block_ids: tl.tensor, words: tl.tensor, pattern: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """WIDTH words of one block."""
    block = tl.load(block_ids + tl.program_id(0)).to(tl.int64)
    index = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    fill = tl.zeros([WIDTH], tl.int32) + pattern
    tl.store(blocks + block * words + index, fill, mask=index < tl.where(block != 0, words, 0))


def scrub(blocks: torch.Tensor, block_ids: torch.Tensor, *, poison: bool = False) -> None:
    """Overwrite blocks block_ids (int32 [n]) with zeros, or with NaN.

    `blocks` is the arena, contiguous, first dimension the block: float32, bfloat16, float16, or bytes when quantised.
    """
    block_bytes = blocks[0].numel() * blocks.itemsize
    if not blocks.is_contiguous() or block_bytes % 4 or block_ids.dtype != torch.int32:
        raise Internal(f"blocks of {block_bytes} bytes cannot be scrubbed")
    if blocks.dtype not in _NAN_PATTERNS:
        raise Internal(f"blocks of {blocks.dtype} cannot be scrubbed")
    if not block_ids.numel():
        return
    words = block_bytes // 4
    scrub_kernel[(block_ids.numel(), -(-words // _WIDTH))](
        blocks.flatten().view(torch.int32), block_ids, words, _NAN_PATTERNS[blocks.dtype] if poison else 0,
        WIDTH=_WIDTH, num_warps=8,
    )  # fmt: skip
