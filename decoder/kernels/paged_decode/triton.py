"""Paged decode on a GPU: the persistent attention kernel, the combine kernel and the launcher.

The grid is the plan's number of programs, whatever the batch, so that a recorded graph fits every step. A program walks
its run of tiles; a row block (sequence, key head) that lies in the run as a whole is written out at once, the other
parts, two at most, go to the plan's slots. `combine_kernel` merges those, and writes zeros for empty places.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import (
    LOG2_E,
    NO_WINDOW,
    capability,
    check_paged,
    kernel,
    power_of_two,
    precision,
    scale_planes,
)
from decoder.kernels.paged_decode.combine import combine_kernel
from decoder.kernels.paged_decode.plan import DecodePlan, tile_range
from decoder.kernels.paged_tile import attend_tiles


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Launch parameters: keys of a tile, warps, pipeline stages, programs per multiprocessor, and a thread's registers.

    With `registers` 0 the assembler weighs registers against warps, and may spill a few for warps that a persistent
    grid never has; a number is the most that it may take, and it spills none below that. NVIDIA alone takes one.
    """

    tile: int
    warps: int
    stages: int
    programs: int
    registers: int = 0


_ALL_REGISTERS: Final = 255
"""Of a thread; with them two programs of four warps still fit a multiprocessor."""


def choose_config(capability: int, head_dim: int, itemsize: int, rows: int = 16) -> DecodeConfig:
    """Launch parameters by chip and row block, so that nothing spills; raises Internal where none are known."""
    columns = power_of_two(head_dim)
    if rows * columns > (32 * 128 if itemsize == 4 else 128 * 128) or (columns > 128 and rows > 32):
        raise Internal(f"{rows} rows of {columns} columns of {itemsize} bytes have no decode; prefill takes them")
    if itemsize == 4:
        if columns > 128:  # Triton 3.7.1 on sm_100: with two stages 8 bytes are spilled
            return DecodeConfig(16, 8, 3 if capability >= 100 else 2, 1)
        return DecodeConfig(32 if rows == 16 else 16, 4, 2, 1)
    if columns > 128:  # Triton 3.7.1 and 3.6.0 left to choose spill 8 bytes, with a window and a soft cap on sm_80
        return DecodeConfig(32, 4, 2, 1, _ALL_REGISTERS if capability >= 80 else 0)
    if rows > (64 if capability >= 100 else 128 if capability >= 90 else 32):
        return DecodeConfig(32, 8, 2, 1)
    if rows > (16 if capability >= 100 else 32):
        return DecodeConfig(64, 8, 2, 1)
    if capability < 80:
        return DecodeConfig(64, 4, 2, 2)
    # Triton 3.7.1 left to choose spills 8 bytes on sm_80 with pages of 16, and on sm_90 16 with heads of 64, and 8 of
    # quantised blocks with heads of 80 and 96.
    return DecodeConfig(64, 4, 3, 2, _ALL_REGISTERS if capability < 90 or head_dim < 128 else 0)


@kernel
def decode_kernel(
    queries: tl.tensor,
    output: tl.tensor,
    log_sums: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    starts: tl.tensor,
    ranges: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    logit_scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    query_stride: tl.tensor,
    position_stride: tl.tensor,
    output_stride: tl.tensor,
    output_position_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    scale_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    LOG_SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """One program's run of tiles."""
    program = tl.program_id(0)
    sequence = tl.load(ranges + program * 4)
    kv_head = tl.load(ranges + program * 4 + 1)
    tile = tl.load(ranges + program * 4 + 2)
    left = tl.load(ranges + program * 4 + 3)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    m_rows = rows < GROUP * QUERY_LEN
    m_all = m_rows[:, None] & (columns < HEAD_DIM)[None, :]
    i_query = rows // GROUP
    while left > 0:
        length = tl.load(lengths + sequence)
        tiles = tl.load(starts + sequence + 1) - tl.load(starts + sequence)
        count = tl.minimum(left, tiles - tile)
        if count > 0:
            i_sequence = sequence.to(tl.int64)
            heads = kv_head * GROUP + rows % GROUP
            offsets = i_sequence * query_stride + (i_query.to(tl.int64) * position_stride + heads * HEAD_DIM)
            b_queries = tl.load(queries + offsets[:, None] + columns[None, :], mask=m_all, other=0.0)
            positions = tl.where(m_rows, length - QUERY_LEN + i_query, -1)
            low = 0
            if WINDOWED:
                low = tl.maximum(length - QUERY_LEN - window + 1, 0)
            first, _ = tile_range(length, QUERY_LEN, window, TILE)
            begin = first + tile
            stop = begin + count
            full_stop = length // TILE
            if CAUSAL:
                full_stop = tl.maximum(length - QUERY_LEN + 1, 0) // TILE
            i_head = kv_head.to(tl.int64)
            k_plane = keys + i_head * head_stride
            v_plane = values + i_head * head_stride
            k_scales = key_scales + i_head * scale_head_stride
            v_scales = value_scales + i_head * scale_head_stride
            table = tables + i_sequence * table_stride
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            row_max = tl.full([ROWS], float("-inf"), tl.float32)
            row_sum = tl.zeros([ROWS], tl.float32)
            full_begin = begin
            if WINDOWED:
                full_begin = (tl.maximum(length - window, 0) + TILE - 1) // TILE
                full_begin = tl.minimum(tl.maximum(full_begin, begin), stop)
                acc, row_max, row_sum = attend_tiles(
                    b_queries, acc, row_max, row_sum, k_plane, v_plane, k_scales, v_scales, table, begin, full_begin,
                    low, length, positions, block_stride, scale_stride, logit_scale, soft_cap, window,
                    TILE, BLOCK_TOKENS, HEAD_DIM, COLUMNS, KIND, SOFT_CAP, CAUSAL, WINDOWED, True, PRECISION,
                )  # fmt: skip
            full_stop = tl.minimum(tl.maximum(full_stop, full_begin), stop)
            acc, row_max, row_sum = attend_tiles(
                b_queries, acc, row_max, row_sum, k_plane, v_plane, k_scales, v_scales, table, full_begin, full_stop,
                low, length, positions, block_stride, scale_stride, logit_scale, soft_cap, window,
                TILE, BLOCK_TOKENS, HEAD_DIM, COLUMNS, KIND, SOFT_CAP, CAUSAL, WINDOWED, False, PRECISION,
            )  # fmt: skip
            acc, row_max, row_sum = attend_tiles(
                b_queries, acc, row_max, row_sum, k_plane, v_plane, k_scales, v_scales, table, full_stop, stop,
                low, length, positions, block_stride, scale_stride, logit_scale, soft_cap, window,
                TILE, BLOCK_TOKENS, HEAD_DIM, COLUMNS, KIND, SOFT_CAP, CAUSAL, WINDOWED, True, PRECISION,
            )  # fmt: skip
            if count == tiles:
                acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
                target = i_sequence * output_stride + i_query.to(tl.int64) * output_position_stride + heads * HEAD_DIM
                tl.store(output + target[:, None] + columns[None, :], acc.to(output.dtype.element_ty), mask=m_all)
                if LOG_SUMS:
                    index = (i_sequence * QUERY_LEN + i_query) * (KV_HEADS * GROUP) + heads
                    tl.store(log_sums + index, row_max + tl.log2(row_sum), mask=m_rows)
            else:
                slot = program.to(tl.int64) * 2 + (tile == 0).to(tl.int64)
                place = (slot * ROWS + rows)[:, None] * COLUMNS + columns[None, :]
                tl.store(partial + place, acc, mask=m_all)
                tl.store(statistics + (slot * ROWS + rows) * 2, row_max, mask=m_rows)
                tl.store(statistics + (slot * ROWS + rows) * 2 + 1, row_sum, mask=m_rows)
        left -= tl.maximum(count, 0)
        tile = 0
        kv_head += 1
        if (kv_head == KV_HEADS) | (tiles == 0):
            kv_head = 0
            sequence += 1


def attend(
    queries: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    plan: DecodePlan,
    output: torch.Tensor,
    *,
    scale: float,
    scales: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    causal: bool = True,
    log_sums: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Attention of the last `plan.query_len` positions of each sequence, into `output`.

    queries and output [batch, query_len, heads, head_dim]; arena as in `common/layout.py`, with `scales` when
    quantised; tables int32 [batch, width]; lengths int32 [batch], the very ones that `plan.build` got: context with
    the query positions, or 0 for an empty place, which gives zeros. The window is the plan's. With `causal=False`
    every position sees the whole context. log_sums, if given, float32 [batch, query_len, heads], gets the base-2
    logarithm of the sums of weights (-inf for an empty place). Raises Internal on shapes that do not fit; nothing is
    launched then.
    """
    kind = check_paged(queries, arena, scales, tables, layer)
    batch, query_len, heads, head_dim = queries.shape
    kv_heads, block_tokens = arena.shape[3], arena.shape[4]
    group, columns = heads // kv_heads, power_of_two(head_dim)
    fits = (batch, query_len, kv_heads) == (plan.batch, plan.query_len, plan.kv_heads)
    if not fits or group * query_len > plan.rows or plan.partial.shape[2] != columns or (plan.window and not causal):
        raise Internal(f"queries {tuple(queries.shape)} do not fit a plan of {plan.batch} sequences")
    if output.shape != queries.shape or any(x.stride()[-2:] != (head_dim, 1) for x in (output, queries)):
        raise Internal(f"output {tuple(output.shape)} does not fit queries {tuple(queries.shape)}")
    config = config or choose_config(capability(queries.device), head_dim, queries.itemsize, plan.rows)
    keys, values = arena[:, layer, 0], arena[:, layer, 1]
    key_scales, value_scales = scale_planes(arena, scales, layer)
    log_memory = output if log_sums is None else log_sums
    programs = plan.ranges.shape[0]
    decode_kernel[(programs,)](
        queries, output, log_memory, keys, values, key_scales, value_scales, tables, lengths,
        plan.starts, plan.ranges, plan.partial, plan.statistics,
        scale / soft_cap if soft_cap else scale * LOG2_E, soft_cap * LOG2_E, plan.window or NO_WINDOW,
        queries.stride(0), queries.stride(1), output.stride(0), output.stride(1), tables.stride(0),
        keys.stride(0), keys.stride(1), key_scales.stride(0), key_scales.stride(1),
        KV_HEADS=kv_heads, GROUP=group, QUERY_LEN=query_len, ROWS=plan.rows, TILE=plan.tile,
        BLOCK_TOKENS=block_tokens, HEAD_DIM=head_dim, COLUMNS=columns, KIND=kind, SOFT_CAP=soft_cap > 0,
        CAUSAL=causal, WINDOWED=plan.window > 0, LOG_SUMS=log_sums is not None,
        PRECISION=precision(queries),
        num_warps=config.warps, num_stages=config.stages,
        **({"maxnreg": config.registers} if config.registers else {}),
    )  # fmt: skip
    combine_kernel[(batch * query_len * heads,)](
        output, log_memory, plan.starts, plan.partial, plan.statistics, batch, programs,
        output.stride(0), output.stride(1),
        KV_HEADS=kv_heads, GROUP=group, QUERY_LEN=query_len, ROWS=plan.rows, HEAD_DIM=head_dim, COLUMNS=columns,
        LOG_SUMS=log_sums is not None, num_warps=1,
    )  # fmt: skip
