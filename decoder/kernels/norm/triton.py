"""The norm on a GPU: one program per row, the row in registers, sums in float32."""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import kernel, power_of_two

MAX_WIDTH: Final = 16384
_KINDS: Final = (torch.float32, torch.bfloat16, torch.float16)


def num_warps(width: int) -> int:
    """Warps of a program, so that a row of `width` elements stays in registers."""
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


@kernel
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    output: tl.tensor,
    weight: tl.tensor,
    post_weight: tl.tensor,
    epsilon: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    output_stride: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    POST: tl.constexpr,
) -> tl.tensor:
    """One row of WIDTH elements: normed by post_weight if POST, added to the residual if ADD, normed by weight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    b_x = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if POST:
        factor = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 0) / WIDTH + epsilon)
        b_x = b_x * factor * tl.load(post_weight + columns, mask=inside, other=0.0)
    if ADD:
        place = residual + row * residual_stride + columns
        b_x += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, b_x.to(residual.dtype.element_ty), mask=inside)
    factor = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 0) / WIDTH + epsilon)
    b_x = b_x * factor * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(output + row * output_stride + columns, b_x.to(output.dtype.element_ty), mask=inside)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    *,
    epsilon: float,
    residual: torch.Tensor | None = None,
    post_weight: torch.Tensor | None = None,
) -> None:
    """Norm rows of x into `output`; with `residual`, add them to it first (in place) and norm the sums.

    x, output and residual [tokens, width], each float32, bfloat16 or float16, rows contiguous; `output` may be x.
    weight and post_weight float32 [width]: with `post_weight` the rows of x are normed by it before they are added.
    The sum is normed before it is rounded to the residual's type. Raises Internal on shapes that do not fit.
    """
    tokens, width = x.shape
    rows = [x, output] if residual is None else [x, output, residual]
    if any(r.shape != x.shape or r.stride(1) != 1 or r.dtype not in _KINDS for r in rows) or width > MAX_WIDTH:
        raise Internal(f"rows of a norm do not fit: {[(tuple(r.shape), r.dtype) for r in rows]}")
    weights = [weight] if post_weight is None else [weight, post_weight]
    if any(w.shape != (width,) or w.dtype != torch.float32 or not w.is_contiguous() for w in weights):
        raise Internal(f"weights of a norm do not fit rows of {width} elements")
    if post_weight is not None and residual is None:
        raise Internal("a norm before the addition needs a residual")
    if not tokens:
        return
    sums = x if residual is None else residual
    norm_kernel[(tokens,)](
        x, sums, output, weight, weights[-1], epsilon, x.stride(0), sums.stride(0), output.stride(0),
        WIDTH=width, COLUMNS=power_of_two(width), ADD=residual is not None, POST=post_weight is not None,
        num_warps=num_warps(width),
    )  # fmt: skip
