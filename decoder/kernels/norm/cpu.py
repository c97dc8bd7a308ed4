"""The CPU form of `norm` in `triton.py`: the same call, by the fused step's own row kernels."""

from __future__ import annotations

from typing import Final

import torch

from common.errors import Internal
from decoder.kernels.row_forms import KERNELS, add_normalized_rows, normalize_rows, padded

_KINDS: Final = (torch.float32, torch.bfloat16, torch.float16)


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

    x, output and residual [tokens, width], each float32, bfloat16 or float16; `output` may be x. weight and post_weight
    float32 [width]: with `post_weight` the rows of x are normed by it before they are added. The sum is normed before
    it is rounded to the residual's type. Raises Internal on shapes that do not fit.
    """
    tokens, width = x.shape
    rows = [x, output] if residual is None else [x, output, residual]
    if any(r.shape != x.shape or r.dtype not in _KINDS for r in rows):
        raise Internal(f"rows of a norm do not fit: {[(tuple(r.shape), r.dtype) for r in rows]}")
    weights = [weight] if post_weight is None else [weight, post_weight]
    if any(w.shape != (width,) or w.dtype != torch.float32 for w in weights):
        raise Internal(f"weights of a norm do not fit rows of {width} elements")
    if post_weight is not None and residual is None:
        raise Internal("a norm before the addition needs a residual")
    if not tokens:
        return
    sums, scale = padded(x), padded(weight[None])
    columns = sums.shape[1]
    if residual is not None:
        total = padded(residual)
        if post_weight is None:
            total += sums
        else:
            post = padded(post_weight[None])
            add_normalized_rows(sums.data_ptr(), post.data_ptr(), tokens, columns, width, epsilon, total.data_ptr())
        residual.copy_(total[:, :width])
        sums = total
    result = torch.empty_like(sums)
    normalize_rows(KERNELS, sums.data_ptr(), scale.data_ptr(), tokens, columns, width, epsilon, result.data_ptr())
    output.copy_(result[:, :width])
