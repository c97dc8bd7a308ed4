"""The copy of copy-on-write on a GPU: one program per plan entry and plane.

A plane is one layer's keys, or values, of one head.

Bits are moved as integers, so that a NaN stays what it was. Entries run at the same time: a target is no other entry's
target or source (the planner of copies gives fresh blocks only). The null block is never written.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import kernel

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@kernel
def copy_kernel(
    planes: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    num_tokens: tl.tensor,
    block_stride: tl.tensor,
    PLANE: tl.constexpr,
    TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """The first num_tokens[i] tokens of a plane of PLANE elements, TOKEN elements each."""
    entry = tl.program_id(0)
    source = tl.load(sources + entry).to(tl.int64)
    target = tl.load(targets + entry).to(tl.int64)
    count = tl.load(num_tokens + entry) * TOKEN
    offset = tl.program_id(1).to(tl.int64) * PLANE
    if target != 0:
        for start in range(0, count, WIDTH):
            index = start + tl.arange(0, WIDTH)
            inside = index < count
            x = tl.load(planes + source * block_stride + offset + index, mask=inside, other=0)
            tl.store(planes + target * block_stride + offset + index, x, mask=inside)


def copy(
    arena: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
) -> None:
    """Copy the first num_tokens[i] tokens of block sources[i] to block targets[i].

    arena [blocks, layers, 2, kv_heads, block_tokens, head_dim], each block contiguous; scales likewise
    without head_dim; the three columns int32 [n] on the arena's device. Raises Internal on shapes that do not fit.
    """
    if not sources.shape == targets.shape == num_tokens.shape or sources.dtype != torch.int32:
        raise Internal("a copy plan has columns of different lengths or types")
    if not sources.numel():
        return
    for tensor in (arena, scales):
        if tensor is None:
            continue
        if not tensor[0].is_contiguous():
            raise Internal("a block is not contiguous")
        token = tensor.shape[5] if tensor.dim() == 6 else 1
        plane = tensor.shape[4] * token
        num_planes = tensor[0].numel() // plane
        copy_kernel[(sources.numel(), num_planes)](
            tensor.view(_INTEGERS[tensor.itemsize]), sources, targets, num_tokens, tensor.stride(0),
            PLANE=plane, TOKEN=token, WIDTH=1024, num_warps=4,
        )  # fmt: skip
