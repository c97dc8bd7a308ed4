"""The low-rank products of rows with adapters on a GPU: two kernels and their launcher.

A tile of rows and a step of ranks is one program of `shrink_kernel`; where tiles are few, its inputs are cut, and the
parts are added in their order by `expand_kernel`, so that equal steps give equal bits. Sums are float32 throughout.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return,index"

from __future__ import annotations

import functools
from typing import Final

import torch
import triton
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import precision
from decoder.kernels.lora.plan import PRODUCTS, RANK_STEP, AdapterRows

COLUMNS: Final = 64  # outputs of a program
_CUT: Final = 1024  # inputs of a program, at least, where they are cut
_MOST_CUTS: Final = 8
_ENOUGH_PROGRAMS: Final = 256

# Entries are many: their number must not be compiled in.
_kernel_of_entries = functools.partial(triton.jit, do_not_specialize=["entry"])


@_kernel_of_entries
def shrink_kernel(
    x: tl.tensor,
    lowered: tl.tensor,
    addresses: tl.tensor,
    tiles: tl.tensor,
    row_ids: tl.tensor,
    entry: tl.tensor,
    inputs: tl.tensor,
    cut: tl.tensor,
    x_stride: tl.tensor,
    cut_stride: tl.tensor,
    lowered_stride: tl.tensor,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """A x of one tile for RANKS rows of A, over `cut` of the inputs. An entry is eight words (`plan.py`)."""
    tile = tl.program_id(0)
    count = tl.load(tiles + tile * 2 + 1)
    if count > 0:
        words = tl.load(addresses + tile).to(tl.pointer_type(tl.int64)) + entry * 8
        first_rank = tl.program_id(1) * RANKS
        if first_rank < tl.load(words + 5):
            down = tl.multiple_of(tl.load(words).to(tl.pointer_type(x.dtype.element_ty)), 16)
            first = tl.load(tiles + tile * 2)
            o_rows = tl.arange(0, ROWS)
            m_rows = o_rows < count
            b_rows = tl.load(row_ids + first + o_rows, mask=m_rows, other=0).to(tl.int64)
            ranks = first_rank + tl.arange(0, RANKS)
            part = tl.program_id(2)
            acc = tl.zeros([ROWS, RANKS], tl.float32)
            stop = tl.minimum((part + 1) * cut, inputs)
            for start in range(part * cut, stop, DEPTH):
                columns = start + tl.arange(0, DEPTH)
                inside = columns < stop
                b_x = tl.load(
                    x + b_rows[:, None] * x_stride + columns[None, :], mask=m_rows[:, None] & inside[None, :], other=0.0
                )  # [ROWS, DEPTH]
                b_down = tl.load(
                    down + ranks[:, None].to(tl.int64) * inputs + columns[None, :], mask=inside[None, :], other=0.0
                )  # [RANKS, DEPTH]
                acc = tl.dot(b_x, tl.trans(b_down), acc, input_precision=PRECISION)
            target = part.to(tl.int64) * cut_stride + (first + o_rows).to(tl.int64) * lowered_stride
            tl.store(lowered + target[:, None] + ranks[None, :], acc, mask=m_rows[:, None])


@_kernel_of_entries
def expand_kernel(
    lowered: tl.tensor,
    output: tl.tensor,
    addresses: tl.tensor,
    tiles: tl.tensor,
    row_ids: tl.tensor,
    entry: tl.tensor,
    first_end: tl.tensor,
    second_end: tl.tensor,
    third_end: tl.tensor,
    output_stride: tl.tensor,
    cut_stride: tl.tensor,
    lowered_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    CUTS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Adds B (A x) to COLUMNS outputs of one tile, all of one part, whose ends are those of its columns."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    count = tl.load(tiles + tile * 2 + 1)
    blocks_of_first = (first_end + COLUMNS - 1) // COLUMNS
    blocks_of_two = blocks_of_first + (second_end - first_end + COLUMNS - 1) // COLUMNS
    second = block >= blocks_of_first
    third = block >= blocks_of_two
    part = second.to(tl.int32) + third.to(tl.int32)
    begin = tl.where(third, second_end, tl.where(second, first_end, 0))
    end = tl.where(third, third_end, tl.where(second, second_end, first_end))
    block -= tl.where(third, blocks_of_two, tl.where(second, blocks_of_first, 0))
    if count > 0:
        words = tl.load(addresses + tile).to(tl.pointer_type(tl.int64)) + entry * 8
        mask = tl.load(words + 4)
        if (mask >> part) & 1 != 0:
            up = tl.multiple_of(tl.load(words + 1).to(tl.pointer_type(output.dtype.element_ty)), 16)
            ranks = tl.multiple_of(tl.load(words + 2), RANKS)
            source = tl.multiple_of(lowered + part * tl.load(words + 3), 16)
            first = tl.load(tiles + tile * 2)
            o_rows = tl.arange(0, ROWS)
            m_rows = o_rows < count
            b_rows = tl.load(row_ids + first + o_rows, mask=m_rows, other=0).to(tl.int64)
            columns = begin + block * COLUMNS + tl.arange(0, COLUMNS)
            inside = columns < end
            o_lowered = (first + o_rows).to(tl.int64) * lowered_stride
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            for start in range(0, ranks, RANKS):
                o_ranks = start + tl.arange(0, RANKS)
                places = source + o_lowered[:, None] + o_ranks[None, :]
                b_lowered = tl.load(places, mask=m_rows[:, None], other=0.0)  # [ROWS, RANKS]
                for part_of_inputs in range(1, CUTS):
                    b_lowered += tl.load(places + part_of_inputs * cut_stride, mask=m_rows[:, None], other=0.0)
                b_up = tl.load(
                    up + columns[:, None].to(tl.int64) * ranks + o_ranks[None, :], mask=inside[:, None], other=0.0
                )  # [COLUMNS, RANKS]
                acc = tl.dot(b_lowered, tl.trans(b_up.to(tl.float32)), acc, input_precision=PRECISION)
            target = output + b_rows[:, None] * output_stride + columns[None, :]
            present = m_rows[:, None] & inside[None, :]
            acc += tl.load(target, mask=present, other=0.0).to(tl.float32)
            tl.store(target, acc.to(output.dtype.element_ty), mask=present)


def depth_of(itemsize: int, tile_rows: int) -> int:
    """Inputs that a program of `shrink_kernel` has at a time."""
    return (64 if tile_rows <= 16 else 32) if itemsize == 4 else 128


def cuts_of(inputs: int, programs: int) -> int:
    """Into how many parts the inputs are cut where there are `programs` tiles and steps of ranks."""
    cuts = 1
    # By twos, so that few kernels are compiled.
    while 2 * cuts <= min(_MOST_CUTS, -(-inputs // _CUT)) and cuts * programs < _ENOUGH_PROGRAMS:
        cuts *= 2
    return cuts


def sum_precision(x: torch.Tensor) -> str:
    """How float32 sums meet B: B is exact in TF32 where it is bfloat16 or float16, and A x is cut to that."""
    if x.dtype == torch.float32:
        return precision(x)
    return "tf32" if torch.version.hip is None else "ieee"


def add(
    x: torch.Tensor, output: torch.Tensor, adapters: AdapterRows, layer: int, product: int, ends: tuple[int, ...]
) -> None:
    """Add B (A x) of each row that has an adapter to its `output`; other rows are left alone.

    x [tokens, inputs] and output [tokens, outputs] of one type, that of the adapters, rows contiguous. `ends`: up to
    three ends of the parts of the outputs, the last one that of all. Nothing is launched for a product that no adapter
    changes. Raises Internal on shapes that do not fit.
    """
    tokens, outputs = output.shape
    if x.shape[0] != tokens or x.dtype != output.dtype or x.stride(1) != 1 or output.stride(1) != 1:
        raise Internal(f"rows {tuple(x.shape)} of {x.dtype} do not fit outputs {tuple(output.shape)} of {output.dtype}")
    if not 0 <= product < PRODUCTS or not 1 <= len(ends) <= 3 or ends[-1] != outputs or list(ends) != sorted(ends):
        raise Internal(f"product {product} with parts that end at {ends} does not fit {outputs} outputs")
    if not adapters.products >> product & 1:
        return
    inputs, rows = x.shape[1], adapters.tile_rows
    tiles, places, lowered = adapters.tiles.shape[0], adapters.rows.numel(), adapters.lowered
    cuts = cuts_of(inputs, tiles * (lowered // RANK_STEP))
    depth = depth_of(x.itemsize, rows)
    cut = -(-inputs // (cuts * depth)) * depth
    sums = torch.empty((cuts, places, lowered), dtype=torch.float32, device=x.device)
    entry = layer * PRODUCTS + product
    shrink_kernel[(tiles, lowered // RANK_STEP, cuts)](
        x, sums, adapters.tables, adapters.tiles, adapters.rows, entry, inputs, cut,
        x.stride(0), sums.stride(0), sums.stride(1),
        ROWS=rows, RANKS=RANK_STEP, DEPTH=depth, PRECISION=precision(x), num_warps=4, num_stages=3,
    )  # fmt: skip
    blocks = sum(-(-(end - begin) // COLUMNS) for begin, end in zip((0, *ends), ends, strict=False))
    expand_kernel[(tiles, blocks)](
        sums, output, adapters.tables, adapters.tiles, adapters.rows, entry, *ends, *ends[-1:] * (3 - len(ends)),
        output.stride(0), sums.stride(0), sums.stride(1),
        ROWS=rows, COLUMNS=COLUMNS, RANKS=RANK_STEP, CUTS=cuts, PRECISION=sum_precision(x), num_warps=4, num_stages=2,
    )  # fmt: skip
