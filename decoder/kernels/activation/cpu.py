"""The CPU form of `gate` in `triton.py`: the same call, by the fused step's own arithmetic."""

from __future__ import annotations

from typing import Final

import torch

from common.errors import Internal
from decoder.kernels.row_forms import gate_rows, padded

ACTIVATIONS: Final = ("silu", "gelu_tanh")


def gate(gate_up: torch.Tensor, output: torch.Tensor, *, activation: str) -> None:
    """`activation` ("silu" or "gelu_tanh") of the first half of each row, times the second half, into `output`.

    gate_up [tokens, 2 * inner] and output [tokens, inner], float32, bfloat16 or float16; float32 inside. Raises
    Internal on shapes that do not fit.
    """
    tokens, inner = output.shape
    if gate_up.shape != (tokens, 2 * inner):
        raise Internal(f"rows {tuple(gate_up.shape)} do not fit an output {tuple(output.shape)}")
    if activation not in ACTIVATIONS:
        raise Internal(f"activation {activation!r} has no kernel; there are {', '.join(ACTIVATIONS)}")
    first, second = padded(gate_up[:, :inner]), padded(gate_up[:, inner:])
    result = torch.empty_like(first)
    gelu = activation == "gelu_tanh"
    gate_rows(first.data_ptr(), second.data_ptr(), first.numel(), gelu, result.data_ptr())
    output.copy_(result[:, :inner])
