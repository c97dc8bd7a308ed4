"""The gated activation on a GPU: one program per row and run of columns."""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import kernel

ACTIVATIONS: Final = ("silu", "gelu_tanh")
_WIDTH: Final = 1024


@kernel
def gate_kernel(
    gate_up: tl.tensor,
    output: tl.tensor,
    inner: tl.tensor,
    input_stride: tl.tensor,
    output_stride: tl.tensor,
    WIDTH: tl.constexpr,
    GELU: tl.constexpr,
) -> tl.tensor:
    """WIDTH columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < inner
    gate = tl.load(gate_up + row * input_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * input_stride + inner + columns, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if GELU:
        # (1 + tanh(z)) / 2 is the logistic function of 2 z.
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    result = gate / (1.0 + tl.exp2(slope * -1.4426950408889634)) * up
    tl.store(output + row * output_stride + columns, result.to(output.dtype.element_ty), mask=inside)


def gate(gate_up: torch.Tensor, output: torch.Tensor, *, activation: str) -> None:
    """`activation` ("silu" or "gelu_tanh") of the first half of each row, times the second half, into `output`.

    gate_up [tokens, 2 * inner] and output [tokens, inner], float32, bfloat16 or float16, rows contiguous; float32
    inside. Raises Internal on shapes that do not fit.
    """
    tokens, inner = output.shape
    if gate_up.shape != (tokens, 2 * inner) or gate_up.stride(1) != 1 or output.stride(1) != 1:
        raise Internal(f"rows {tuple(gate_up.shape)} do not fit an output {tuple(output.shape)}")
    if activation not in ACTIVATIONS:
        raise Internal(f"activation {activation!r} has no kernel; there are {', '.join(ACTIVATIONS)}")
    if not tokens:
        return
    gate_kernel[(tokens, -(-inner // _WIDTH))](
        gate_up, output, inner, gate_up.stride(0), output.stride(0),
        WIDTH=_WIDTH, GELU=activation == "gelu_tanh", num_warps=4,
    )  # fmt: skip
