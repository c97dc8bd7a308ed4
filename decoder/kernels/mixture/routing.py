"""Which experts a row is computed by, and in which slot of each: three kernels and their launchers.

Invariants: the experts of a row are kept in the order of their numbers, and of equal router products the lower number
is taken; the slots of an expert begin with a block, and its choices lie in them in their own order, so that equal steps
have equal slots. A row that is nobody's has no choice (-1). Memory is sized for the worst case, since only the device
knows how many blocks there are.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return,attr-defined"

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import LOG2_E, kernel, power_of_two

MAX_EXPERTS: Final = 1024
_CHUNK: Final = 1024


@kernel
def route_kernel(
    logits: tl.tensor,
    choices: tl.tensor,
    shares: tl.tensor,
    lengths: tl.tensor,
    num_decodes: tl.tensor,
    log2_e: tl.tensor,
    logits_stride: tl.tensor,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    USED: tl.constexpr,
    NORMALIZE: tl.constexpr,
) -> tl.tensor:
    """One row: the USED largest of a softmax, and their parts of the sum of all, or of those that are used."""
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, WIDTH)
    inside = experts < EXPERTS
    b_logits = tl.load(logits + row * logits_stride + experts, mask=inside, other=float("-inf"))
    powers = tl.exp2((b_logits - tl.max(b_logits, 0)) * log2_e)
    # Where a number is none, some experts are chosen all the same; the shares are none either.
    left = tl.where(inside, tl.where(powers == powers, powers, 0.0), -1.0)
    chosen = experts < 0
    for _ in range(USED):
        taken = experts == tl.argmax(left, 0)
        chosen = chosen | taken
        left = tl.where(taken, -2.0, left)
    total = tl.sum(tl.where(inside, powers, 0.0), 0)
    if NORMALIZE:
        total = tl.sum(tl.where(chosen, powers, 0.0), 0)
    places = row * USED + tl.cumsum(chosen.to(tl.int32), 0) - 1
    empty = (tl.load(lengths + row, mask=row < num_decodes, other=1) == 0) & (experts >= 0)
    tl.store(choices + places, tl.where(empty, -1, experts), mask=chosen)
    tl.store(shares + places, powers / total, mask=chosen)


@kernel
def count_kernel(choices: tl.tensor, counts: tl.tensor, num_choices: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    """One expert: how many choices are its own."""
    expert = tl.program_id(0)
    total = 0
    for base in range(0, num_choices, CHUNK):
        index = base + tl.arange(0, CHUNK)
        mine = tl.load(choices + index, mask=index < num_choices, other=-1) == expert
        total += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert, total)


@kernel
def place_kernel(
    choices: tl.tensor,
    counts: tl.tensor,
    slots: tl.tensor,
    sources: tl.tensor,
    owners: tl.tensor,
    num_choices: tl.tensor,
    num_blocks: tl.tensor,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """One expert: its blocks of ROWS slots, its choices in them, -1 in what is left; the last one ends the blocks."""
    expert = tl.program_id(0)
    experts = tl.arange(0, WIDTH)
    blocks = (tl.load(counts + experts, mask=experts < EXPERTS, other=0) + ROWS - 1) // ROWS
    first_block = tl.sum(tl.where(experts < expert, blocks, 0), 0)
    last_block = first_block + tl.sum(tl.where(experts == expert, blocks, 0), 0)
    slot = first_block * ROWS
    for base in range(0, num_choices, CHUNK):
        index = base + tl.arange(0, CHUNK)
        mine = tl.load(choices + index, mask=index < num_choices, other=-1) == expert
        ends = slot + tl.cumsum(mine.to(tl.int32), 0)
        tl.store(slots + index, ends - 1, mask=mine)
        tl.store(sources + ends - 1, index, mask=mine)
        slot += tl.sum(mine.to(tl.int32), 0)
    empty = slot + tl.arange(0, ROWS)
    tl.store(sources + empty, -1, mask=empty < last_block * ROWS)
    for base in range(first_block, last_block, CHUNK):
        index = base + tl.arange(0, CHUNK)
        tl.store(owners + index, expert, mask=index < last_block)
    if expert == EXPERTS - 1:
        for base in range(last_block, num_blocks, CHUNK):
            index = base + tl.arange(0, CHUNK)
            tl.store(owners + index, -1, mask=index < num_blocks)


@dataclass(frozen=True, slots=True)
class Routes:
    """Choices of T rows, `used` each, in blocks of `rows` slots.

    choices int32 [T, used]: experts, ascending, or -1; shares float32 [T, used]; slots int32 [T, used]: of each choice
    (undefined where it is -1). owners int32 [blocks]: expert of a block, -1 for one that is not used; sources int32
    [blocks * rows]: choice in a slot of a used block, counted over all rows, or -1.
    """

    choices: torch.Tensor
    shares: torch.Tensor
    slots: torch.Tensor
    sources: torch.Tensor
    owners: torch.Tensor
    rows: int

    @property
    def used(self) -> int:
        """Experts of a row."""
        return self.choices.shape[1]


def most_blocks(choices: int, experts: int, rows: int) -> int:
    """Blocks of `rows` slots that so many choices take at most."""
    begun = min(experts, choices)
    return begun + (choices - begun) // rows


def route(
    logits: torch.Tensor,
    experts: int,
    used: int,
    rows: int,
    *,
    normalize: bool,
    lengths: torch.Tensor | None = None,
) -> Routes:
    """Routes of rows by their router products, float32 [T, experts or more], of which the first `experts` count.

    `lengths` int32 [D]: a row below D whose length is 0 chooses nothing. Raises Internal on shapes that do not fit.
    """
    tokens, width = logits.shape
    if not 0 < used <= experts <= min(width, MAX_EXPERTS) or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise Internal(f"no choice of {used} of {experts} experts by {logits.dtype} {tuple(logits.shape)}")
    number = tokens * used
    blocks = most_blocks(number, experts, rows)
    int32 = {"dtype": torch.int32, "device": logits.device}
    routes = Routes(
        choices=torch.empty((tokens, used), **int32),  # type: ignore[call-overload]
        shares=torch.empty((tokens, used), dtype=torch.float32, device=logits.device),
        slots=torch.empty((tokens, used), **int32),  # type: ignore[call-overload]
        sources=torch.empty(blocks * rows, **int32),  # type: ignore[call-overload]
        owners=torch.empty(blocks, **int32),  # type: ignore[call-overload]
        rows=rows,
    )
    counts = torch.empty(experts, **int32)  # type: ignore[call-overload]
    route_kernel[(tokens,)](
        logits, routes.choices, routes.shares, counts if lengths is None else lengths,
        0 if lengths is None else lengths.numel(), LOG2_E, logits.stride(0),
        EXPERTS=experts, WIDTH=power_of_two(experts), USED=used, NORMALIZE=normalize, num_warps=1,
    )  # fmt: skip
    chunk = min(_CHUNK, max(16, power_of_two(number)))
    count_kernel[(experts,)](routes.choices, counts, number, CHUNK=chunk, num_warps=4)
    place_kernel[(experts,)](
        routes.choices, counts, routes.slots, routes.sources, routes.owners, number, blocks,
        EXPERTS=experts, WIDTH=power_of_two(experts), ROWS=rows, CHUNK=chunk, num_warps=4,
    )  # fmt: skip
    return routes
