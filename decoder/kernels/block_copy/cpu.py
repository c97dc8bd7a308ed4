"""The CPU form of `copy` in `triton.py`: the same call, by the model's own block copy."""

from __future__ import annotations

import torch

from common.errors import Internal
from decoder.kernels.blocks import copy_tokens


def copy(
    arena: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
) -> None:
    """Copy the first num_tokens[i] tokens of block sources[i] to block targets[i], in order; a target 0 takes nothing.

    arena [blocks, layers, 2, kv_heads, block_tokens, head_dim]; scales likewise without head_dim; the columns int32
    [n]. Raises Internal on shapes or numbers that do not fit.
    """
    if not sources.shape == targets.shape == num_tokens.shape or sources.dtype != torch.int32:
        raise Internal("a copy plan has columns of different lengths or types")
    real = targets != 0
    views = [arena] if scales is None else [arena, scales]
    columns = (column[real].numpy() for column in (sources, targets, num_tokens))
    copy_tokens([as_integers(view).numpy() for view in views], *columns)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width, which NumPy has for every type."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
