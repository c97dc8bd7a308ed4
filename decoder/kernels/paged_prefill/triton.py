"""Paged prefill on a GPU: the kernel, the plan of row blocks that a step's layers share, and the launcher.

Row blocks are launched longest context first, so that the last ones to start are the short ones. Each output row is
written by one program, in one order of sums: results are repeatable bit for bit and independent of the batch.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

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
from decoder.kernels.paged_tile import attend_tiles
from decoder.kernels.uploads import upload


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Row blocks of one step. `blocks` int32 [n, 2]: sequence and first token of the block inside its chunk."""

    blocks: torch.Tensor
    rows: int
    """Rows of a block (tokens times packed heads, rounded up to a power of two)."""
    packed: int
    """Query heads of a group that share a block: 1 or the whole group."""


def plan(
    query_starts: NDArray[np.int32], lengths: NDArray[np.int32], group: int, rows: int, device: torch.device
) -> PrefillPlan:
    """Cut the chunks into blocks of at most `rows` rows, longest context first.

    query_starts [batch + 1] and lengths [batch] (tokens of context with the chunk) are the host's copies. Heads are
    packed when the longest chunk would not fill a block with the rows of one head (rule of FlashAttention-3).
    """
    chunks = np.diff(query_starts)
    if chunks.size != lengths.size or (chunks < 0).any() or (chunks > lengths).any():
        raise Internal("chunks of a prefill do not fit their contexts")
    packed = group if group <= rows and int(chunks.max(initial=0)) < rows else 1
    tokens = rows // packed
    counts = -(-chunks // tokens)
    sequences = np.repeat(np.arange(chunks.size), counts)
    firsts = (np.arange(sequences.size) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    context = lengths[sequences] - chunks[sequences] + np.minimum(firsts + tokens, chunks[sequences])
    order = np.argsort(-context, kind="stable")
    blocks = np.stack([sequences[order], firsts[order]], axis=1).astype(np.int32)
    return PrefillPlan(upload(blocks, device), rows, packed)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch parameters: rows of a block, keys of a tile, warps and pipeline stages."""

    rows: int
    tile: int
    warps: int
    stages: int


def choose_config(capability: int, head_dim: int, itemsize: int, *, quantized: bool) -> PrefillConfig:
    """Launch parameters by chip, chosen so that nothing spills and shared memory suffices (see docs/kernels.md).

    `itemsize` is that of queries in bytes; `quantized` says whether blocks are. Where a comment names Triton 3.7.1, the
    parameters before spilled with it, and with 3.9.0 they did not.
    """
    columns = power_of_two(head_dim)
    if itemsize == 4:
        if columns > 128:  # 3.7.1 on sm_80: tiles of 16 keys spilled 8 bytes
            return PrefillConfig(16, 32 if 80 <= capability < 90 else 16, 8, 1)
        # 3.7.1: 32 rows by 32 keys spilled up to 24 bytes. More keys instead of more rows; too large for AMD's memory.
        return PrefillConfig(16, 64, 8, 2) if columns == 128 and capability >= 80 else PrefillConfig(32, 32, 8, 2)
    if quantized and columns > 128 and capability >= 90:
        # 3.7.1: tiles of 32 keys spilled 16 bytes on sm_100, and on sm_90, where 128 rows do not fit either, 96. One
        # stage more has as many keys under way.
        return PrefillConfig(128 if capability >= 100 else 64, 16, 8, 3)
    if capability < 90:
        return PrefillConfig(64 if columns > 128 else 128, 32, 8, 3 if columns == 128 else 2)
    return PrefillConfig(128, 32, 8, 2) if columns > 128 else PrefillConfig(128, 64, 8, 3)


@kernel
def prefill_kernel(
    queries: tl.tensor,
    output: tl.tensor,
    log_sums: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    tables: tl.tensor,
    query_starts: tl.tensor,
    lengths: tl.tensor,
    row_blocks: tl.tensor,
    logit_scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    query_stride: tl.tensor,
    output_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    scale_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    LOG_SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """One block of rows of one head, or of one group of packed heads."""
    i_head = tl.program_id(1) * PACKED
    sequence = tl.load(row_blocks + tl.program_id(0) * 2)
    first = tl.load(row_blocks + tl.program_id(0) * 2 + 1)
    row_start = tl.load(query_starts + sequence)
    chunk = tl.load(query_starts + sequence + 1) - row_start
    length = tl.load(lengths + sequence)

    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    tokens = first + rows // PACKED  # [ROWS], inside the chunk
    m_rows = (rows < ROWS // PACKED * PACKED) & (tokens < chunk)
    positions = tl.where(m_rows, length - chunk + tokens, -1)
    heads = i_head + rows % PACKED
    # The block's place is one number; what its rows add to it takes no registers through the loops over keys.
    place = (row_start + first).to(tl.int64)
    i_rows = (rows // PACKED).to(tl.int64)
    offsets = (i_rows * query_stride + heads * HEAD_DIM)[:, None] + columns[None, :]  # [ROWS, COLUMNS]
    m_queries = m_rows[:, None] & (columns < HEAD_DIM)[None, :]
    b_queries = tl.load(queries + place * query_stride + offsets, mask=m_queries, other=0.0)

    first_position = length - chunk + first
    last_position = length - chunk + tl.minimum(first + ROWS // PACKED, chunk) - 1
    low = 0
    if WINDOWED:
        low = tl.maximum(first_position - window + 1, 0)
    high = last_position + 1
    begin = low // TILE
    stop = (high + TILE - 1) // TILE
    full_stop = tl.maximum((first_position + 1) // TILE, begin)

    kv_head = (i_head // GROUP).to(tl.int64)
    k_plane = keys + kv_head * head_stride
    v_plane = values + kv_head * head_stride
    k_scales = key_scales + kv_head * scale_head_stride
    v_scales = value_scales + kv_head * scale_head_stride
    table = tables + sequence.to(tl.int64) * table_stride
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    full_begin = begin
    if WINDOWED:
        full_begin = (tl.maximum(last_position - window + 1, 0) + TILE - 1) // TILE
        full_begin = tl.minimum(full_begin, stop)
        full_stop = tl.maximum(full_stop, full_begin)
        acc, row_max, row_sum = attend_tiles(
            b_queries, acc, row_max, row_sum, k_plane, v_plane, k_scales, v_scales, table, begin, full_begin,
            low, high, positions, block_stride, scale_stride, logit_scale, soft_cap, window,
            TILE, BLOCK_TOKENS, HEAD_DIM, COLUMNS, KIND, SOFT_CAP, True, WINDOWED, True, PRECISION,
        )  # fmt: skip
    acc, row_max, row_sum = attend_tiles(
        b_queries, acc, row_max, row_sum, k_plane, v_plane, k_scales, v_scales, table, full_begin, full_stop,
        low, high, positions, block_stride, scale_stride, logit_scale, soft_cap, window,
        TILE, BLOCK_TOKENS, HEAD_DIM, COLUMNS, KIND, SOFT_CAP, True, WINDOWED, False, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = attend_tiles(
        b_queries, acc, row_max, row_sum, k_plane, v_plane, k_scales, v_scales, table, full_stop, stop,
        low, high, positions, block_stride, scale_stride, logit_scale, soft_cap, window,
        TILE, BLOCK_TOKENS, HEAD_DIM, COLUMNS, KIND, SOFT_CAP, True, WINDOWED, True, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    out = (i_rows * output_stride + heads * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(output + place * output_stride + out, acc.to(output.dtype.element_ty), mask=m_queries)
    if LOG_SUMS:
        tl.store(log_sums + (place + i_rows) * HEADS + heads, row_max + tl.log2(row_sum), mask=m_rows)


def attend(
    queries: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    lengths: torch.Tensor,
    row_plan: PrefillPlan,
    output: torch.Tensor,
    *,
    scale: float,
    scales: torch.Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    log_sums: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> None:
    """Causal attention of the rows of all chunks, into `output`.

    queries and output [tokens, heads, head_dim]; arena as in `common/layout.py`, with `scales` when quantised; tables
    int32 [batch, width]; query_starts int32 [batch + 1]; lengths int32 [batch], the context with the chunk. A row at
    position p sees p - window < keys <= p (window 0: all before it). log_sums, if given, float32 [tokens, heads], gets
    the base-2 logarithm of the sums of weights. Raises Internal on shapes that do not fit; nothing is launched then.
    """
    kind = check_paged(queries, arena, scales, tables, layer)
    heads, head_dim = queries.shape[1:]
    kv_heads, block_tokens = arena.shape[3], arena.shape[4]
    if output.shape != queries.shape or output.stride(-1) != 1 or queries.stride(1) != head_dim:
        raise Internal(f"output {tuple(output.shape)} does not fit queries {tuple(queries.shape)}")
    if window < 0 or soft_cap < 0 or row_plan.packed not in (1, heads // kv_heads):
        raise Internal(f"window {window}, soft cap {soft_cap} or {row_plan.packed} packed heads has no kernels")
    if row_plan.blocks.shape[0] == 0:
        return
    chip = capability(queries.device)
    config = config or choose_config(chip, head_dim, queries.itemsize, quantized=scales is not None)
    keys, values = arena[:, layer, 0], arena[:, layer, 1]
    key_scales, value_scales = scale_planes(arena, scales, layer)
    prefill_kernel[(row_plan.blocks.shape[0], heads // row_plan.packed)](
        queries, output, output if log_sums is None else log_sums, keys, values, key_scales, value_scales,
        tables, query_starts, lengths, row_plan.blocks,
        scale / soft_cap if soft_cap else scale * LOG2_E, soft_cap * LOG2_E, window or NO_WINDOW,
        queries.stride(0), output.stride(0), tables.stride(0), keys.stride(0), keys.stride(1),
        key_scales.stride(0), key_scales.stride(1),
        HEADS=heads, GROUP=heads // kv_heads, PACKED=row_plan.packed, ROWS=row_plan.rows, TILE=config.tile,
        BLOCK_TOKENS=block_tokens, HEAD_DIM=head_dim, COLUMNS=power_of_two(head_dim), KIND=kind,
        SOFT_CAP=soft_cap > 0, WINDOWED=window > 0, LOG_SUMS=log_sums is not None,
        PRECISION=precision(queries),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
