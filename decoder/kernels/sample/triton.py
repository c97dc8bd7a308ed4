"""Draws on a GPU: one pass over the logits in runs of the vocabulary, then one program per row.

`reduce_kernel` leaves of each run its maximum, the place of it and the sum of weights against that maximum;
`pick_kernel` merges those in order, finds the run that the random number falls into and reads that run once more.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import kernel, power_of_two

RUN: Final = 2048
PICK_WARPS: Final = 8
NO_TOKEN: Final = -1


@kernel
def inverse_temperature(temperatures: tl.tensor, row: tl.tensor) -> tl.tensor:
    """1 / temperature as the host rounds it, and whether the draw is greedy."""
    temperature = tl.load(temperatures + row)
    greedy = temperature <= 1e-4
    safe = tl.where(greedy, 1.0, tl.minimum(temperature, 1e30))
    return (1.0 / safe).to(tl.float32), greedy


@kernel
def reduce_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    statistics: tl.tensor,
    best: tl.tensor,
    vocab: tl.tensor,
    runs: tl.tensor,
    logit_stride: tl.tensor,
    RUN: tl.constexpr,
) -> tl.tensor:
    """One run of one row. A NaN makes its maximum infinite, which no token is drawn from."""
    row = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1)
    inverse, _ = inverse_temperature(temperatures, row)
    index = run * RUN + tl.arange(0, RUN)
    x = tl.load(logits + row * logit_stride + index, mask=index < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 0)
    usable = (top > float("-inf")) & (top < float("inf"))
    weights = tl.exp((tl.where(usable, x, 0.0) - tl.where(usable, top, 0.0)) * inverse)
    place = row * runs + run
    tl.store(statistics + place * 2, top)
    tl.store(statistics + place * 2 + 1, tl.where(usable, tl.sum(weights, 0), 0.0))
    tl.store(best + place, run * RUN + tl.argmax(x, 0).to(tl.int32))


@kernel
def pick_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    samples: tl.tensor,
    positions: tl.tensor,
    statistics: tl.tensor,
    best: tl.tensor,
    ids: tl.tensor,
    vocab: tl.tensor,
    runs: tl.tensor,
    logit_stride: tl.tensor,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
) -> tl.tensor:
    """The token of one row."""
    row = tl.program_id(0).to(tl.int64)
    inverse, greedy = inverse_temperature(temperatures, row)
    index = tl.arange(0, RUNS)
    inside = index < runs
    tops = tl.load(statistics + (row * runs + index) * 2, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    token = tl.load(best + row * runs + tl.argmax(tops, 0))
    usable = (top > float("-inf")) & (top < float("inf"))
    if usable & (greedy == 0):
        sums = tl.load(statistics + (row * runs + index) * 2 + 1, mask=inside, other=0.0)
        ends = tl.cumsum((sums * tl.exp((tops - top) * inverse)).to(tl.float64), 0)
        total = tl.max(ends, 0)
        seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
        position = tl.load(positions + row).to(tl.uint32, bitcast=True)
        sample = tl.load(samples + row).to(tl.uint32, bitcast=True)
        zero = position * 0
        high, low, _, _ = tl.philox(seed, position, sample, zero, zero)
        bits = ((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11
        # 53 bits fit a signed integer, whose conversion every chip has.
        number = bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16
        target = tl.minimum(number * total, total * 0.9999999999999999)
        run = tl.sum((ends <= target).to(tl.int32), 0)
        before = tl.max(tl.where(index < run, ends, 0.0), 0)
        columns = run * RUN + tl.arange(0, RUN)
        x = tl.load(logits + row * logit_stride + columns, mask=columns < vocab, other=float("-inf"))
        inner = tl.cumsum(tl.exp((x - top) * inverse).to(tl.float64), 0)
        rest = tl.minimum(target - before, tl.max(inner, 0) * 0.9999999999999999)
        token = run * RUN + tl.sum((inner <= rest).to(tl.int32), 0)
    tl.store(ids + row, tl.where(usable, token, -1))


@dataclass(frozen=True, slots=True)
class Draws:
    """What the rows of one call are drawn with, on the device; rows of a padded batch may hold anything.

    temperatures float64 [R], at or below 1e-4 for the likeliest token; seeds int64 [R], the bits of the unsigned seed;
    samples and positions int32 [R], those of `decoder.philox.uniforms`.
    """

    temperatures: torch.Tensor
    seeds: torch.Tensor
    samples: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampleWorkspace:
    """What `draw` needs besides its output, for up to `rows` rows."""

    statistics: torch.Tensor
    best: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device) -> SampleWorkspace:
        """Memory for `rows` rows of `vocab` logits."""
        runs = -(-vocab // RUN)
        return cls(
            torch.empty((rows, runs, 2), dtype=torch.float32, device=device),
            torch.empty((rows, runs), dtype=torch.int32, device=device),
        )


def draw(logits: torch.Tensor, draws: Draws, workspace: SampleWorkspace, ids: torch.Tensor) -> None:
    """Draw one token of each row into `ids`, int32 [R]; ties go to the smaller id, NO_TOKEN where no finite maximum is.

    logits float32 [R, vocab], rows contiguous. Raises Internal on shapes that do not fit; nothing is launched then.
    """
    rows, vocab = logits.shape
    runs = -(-vocab // RUN)
    columns = (draws.temperatures, draws.seeds, draws.samples, draws.positions)
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or any(c.shape != (rows,) for c in (*columns, ids)):
        raise Internal(f"draws do not fit logits {tuple(logits.shape)} of {logits.dtype}")
    if [c.dtype for c in columns] != [torch.float64, torch.int64, torch.int32, torch.int32]:
        raise Internal(f"draws have types {[c.dtype for c in columns]}")
    if workspace.best.shape[0] < rows or workspace.best.shape[1] != runs or ids.dtype != torch.int32:
        raise Internal(f"a workspace {tuple(workspace.best.shape)} does not fit logits {tuple(logits.shape)}")
    if not rows:
        return
    reduce_kernel[(rows, runs)](
        logits, draws.temperatures, workspace.statistics, workspace.best, vocab, runs, logits.stride(0),
        RUN=RUN, num_warps=4,
    )  # fmt: skip
    pick_kernel[(rows,)](
        logits, draws.temperatures, draws.seeds, draws.samples, draws.positions, workspace.statistics, workspace.best,
        ids, vocab, runs, logits.stride(0), RUN=RUN, RUNS=power_of_two(runs), num_warps=PICK_WARPS,
    )  # fmt: skip
