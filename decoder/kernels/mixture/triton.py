"""The products of experts on a GPU, one kernel for both, the sum of a row's experts, and the launcher of all.

A program has a block of slots of one expert and COLUMNS outputs. The first product takes rows where they lie and ends
in the gated activation; the second takes slots. A row's experts are added in the order of their numbers, after the
shared one, in float32.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.activation.triton import ACTIVATIONS
from decoder.kernels.gpu import capability, kernel, precision
from decoder.kernels.mixture.routing import Routes, route

_WIDTH: Final = 1024
_FEW_ROWS: Final = 16  # of an expert, on the average


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Launch parameters of a product: slots of a block, outputs of a program, inputs at a time, warps, stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def configs(capability: int, itemsize: int) -> tuple[ProductConfig, ProductConfig]:
    """Launch parameters by chip: for few rows of an expert (decodes stream weights) and for many (chunks compute)."""
    if itemsize == 4:
        return ProductConfig(16, 32, 32, 4, 2), ProductConfig(32, 32, 32, 4, 2)
    stages = 3 if capability >= 80 else 2
    return ProductConfig(16, 64, 128, 4, stages), ProductConfig(64, 64, 64, 4, stages)


def choose_config(capability: int, choices: int, experts: int, itemsize: int) -> ProductConfig:
    """Launch parameters by chip and mean number of rows of an expert."""
    few, many = configs(capability, itemsize)
    return few if choices <= _FEW_ROWS * experts else many


@kernel
def product_kernel(
    x: tl.tensor,
    expert_weights: tl.tensor,
    output: tl.tensor,
    sources: tl.tensor,
    owners: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    x_stride: tl.tensor,
    output_stride: tl.tensor,
    USED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """COLUMNS outputs of one block; if GATED of rows, through two matrices and the activation, else of slots."""
    block = tl.program_id(0)
    expert = tl.load(owners + block)
    if expert >= 0:
        slots = block * ROWS + tl.arange(0, ROWS)
        source = tl.load(sources + slots)
        present = source >= 0
        rows = slots.to(tl.int64)
        if GATED:
            rows = (source // USED).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        m_columns = columns < outputs
        first_row = expert.to(tl.int64) * outputs * (2 if GATED else 1)
        o_weights = (first_row + columns.to(tl.int64))[:, None] * inputs
        o_second = outputs.to(tl.int64) * inputs
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        second = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, inputs, DEPTH):
            o_depth = start + tl.arange(0, DEPTH)
            inside = (o_depth < inputs)[None, :]
            b_x = tl.load(
                x + rows[:, None] * x_stride + o_depth[None, :], mask=present[:, None] & inside, other=0.0
            )  # [ROWS, DEPTH]
            places = expert_weights + o_weights + o_depth[None, :]  # [COLUMNS, DEPTH]
            b_weights = tl.load(places, mask=m_columns[:, None] & inside, other=0.0)
            acc = tl.dot(b_x, tl.trans(b_weights), acc, input_precision=PRECISION)
            if GATED:
                b_second = tl.load(places + o_second, mask=m_columns[:, None] & inside, other=0.0)
                second = tl.dot(b_x, tl.trans(b_second), second, input_precision=PRECISION)
        if GATED:
            slope = acc
            if GELU:
                # (1 + tanh(z)) / 2 is the logistic function of 2 z.
                slope = 1.5957691216057308 * (acc + 0.044715 * acc * acc * acc)
            acc = acc / (1.0 + tl.exp2(slope * -1.4426950408889634)) * second
        target = output + slots.to(tl.int64)[:, None] * output_stride + columns[None, :]
        tl.store(target, acc.to(output.dtype.element_ty), mask=present[:, None] & m_columns[None, :])


@kernel
def sum_kernel(
    expert_outputs: tl.tensor,
    choices: tl.tensor,
    slots: tl.tensor,
    shares: tl.tensor,
    branch: tl.tensor,
    gates: tl.tensor,
    mixture: tl.tensor,
    width: tl.tensor,
    gates_stride: tl.tensor,
    USED: tl.constexpr,
    WIDTH: tl.constexpr,
    BRANCH: tl.constexpr,
) -> tl.tensor:
    """WIDTH columns of one row: the shared expert's output times its gate if BRANCH, and each expert's by its share."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < width
    acc = tl.zeros([WIDTH], tl.float32)
    if BRANCH:
        gate = 1.0 / (1.0 + tl.exp2(tl.load(gates + row * gates_stride) * -1.4426950408889634))
        acc = tl.load(branch + row * width + columns, mask=inside, other=0.0).to(tl.float32) * gate
    for index in range(USED):
        place = row * USED + index
        present = columns < tl.where(tl.load(choices + place) >= 0, width, 0)
        slot = tl.load(slots + place).to(tl.int64)  # of no choice: any number, and nothing is read there
        value = tl.load(expert_outputs + slot * width + columns, mask=present, other=0.0)
        acc += value.to(tl.float32) * tl.load(shares + place)
    tl.store(mixture + row * width + columns, acc, mask=inside)


def mix(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    mixture: torch.Tensor,
    *,
    used: int,
    normalize: bool,
    activation: str,
    shared: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    config: ProductConfig | None = None,
) -> Routes:
    """The experts' part of each row of `hidden`, into `mixture`.

    hidden [T, width] in the weights' type, rows contiguous; logits float32 [T, experts], or one column more where there
    is a shared expert: the product of its gate, `shared` [T, width] its output; gate_up [experts, 2 * inner, width] and
    down [experts, width, inner], contiguous; mixture float32 [T, width], contiguous. lengths: see `route`; such a row
    has the shared expert alone. Raises Internal on shapes that do not fit.
    """
    tokens, width = hidden.shape
    experts, inner = gate_up.shape[0], gate_up.shape[1] // 2
    fits = gate_up.shape == (experts, 2 * inner, width) and down.shape == (experts, width, inner)
    if not fits or not (gate_up.is_contiguous() and down.is_contiguous()) or hidden.dtype != gate_up.dtype:
        raise Internal(f"experts {tuple(gate_up.shape)} and {tuple(down.shape)} do not fit rows {tuple(hidden.shape)}")
    extra = 0 if shared is None else 1
    if logits.shape != (tokens, experts + extra) or mixture.shape != hidden.shape or mixture.dtype != torch.float32:
        raise Internal(f"router products {tuple(logits.shape)} do not fit {tokens} rows and {experts} experts")
    results = [mixture] if shared is None else [mixture, shared]
    if any(result.shape != hidden.shape or not result.is_contiguous() for result in results):
        raise Internal(f"outputs of experts are not contiguous rows {tuple(hidden.shape)}")
    if activation not in ACTIVATIONS:
        raise Internal(f"activation {activation!r} has no kernel; there are {', '.join(ACTIVATIONS)}")
    config = config or choose_config(capability(hidden.device), tokens * used, experts, hidden.itemsize)
    routes = route(logits, experts, used, config.rows, normalize=normalize, lengths=lengths)
    blocks = routes.owners.numel()
    gated = torch.empty((blocks * config.rows, inner), dtype=hidden.dtype, device=hidden.device)
    outputs = torch.empty((blocks * config.rows, width), dtype=hidden.dtype, device=hidden.device)
    for x, weights, result, first in ((hidden, gate_up, gated, True), (gated, down, outputs, False)):
        product_kernel[(blocks, -(-result.shape[1] // config.columns))](
            x, weights, result, routes.sources, routes.owners, x.shape[1], result.shape[1], x.stride(0),
            result.stride(0),
            USED=used, ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth, GATED=first,
            GELU=activation == "gelu_tanh", PRECISION=precision(hidden), num_warps=config.warps,
            num_stages=config.stages,
        )  # fmt: skip
    sum_kernel[(tokens, -(-width // _WIDTH))](
        outputs, routes.choices, routes.slots, routes.shares, outputs if shared is None else shared,
        logits[:, experts:] if extra else logits, mixture, width, logits.stride(0),
        USED=used, WIDTH=_WIDTH, BRANCH=shared is not None, num_warps=4,
    )  # fmt: skip
    return routes
