"""The fused write on a GPU: one program per (token, some heads).

A slot is block_table[position // block_tokens], position % block_tokens. A row of an empty place has block 0 in its
table, and nothing is stored for it.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Final

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import NOT_QUANTIZED, check_paged, kernel, power_of_two, scale_planes
from decoder.kernels.kv_write.row_scales import error_rates, quantize

_HEADS_AT_ONCE: Final = 8


@kernel
def norm_and_rotate(
    rows: tl.tensor,
    norm: tl.tensor,
    epsilon: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    m_heads: tl.tensor,
    offsets: tl.tensor,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:
    """Rows [heads, COLUMNS] of one token at `rows + offsets`, normed and rotated, float32; zero past HEAD_DIM."""
    columns = tl.arange(0, COLUMNS)
    half: tl.constexpr = ROTARY_DIM // 2
    m_columns = columns < HEAD_DIM
    turned = columns < ROTARY_DIM
    partner = tl.where(columns < half, columns + half, tl.where(turned, columns - half, columns))
    mask = m_heads[:, None] & m_columns[None, :]
    x = tl.load(rows + offsets[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(rows + offsets[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + epsilon)
        x = x * factor[:, None] * tl.load(norm + columns, mask=m_columns, other=0.0).to(tl.float32)[None, :]
        y = y * factor[:, None] * tl.load(norm + partner, mask=m_columns, other=0.0).to(tl.float32)[None, :]
    angle = tl.where(columns < half, columns, columns - half)
    cosine = tl.load(cosines + angle, mask=turned, other=1.0)
    sine = tl.load(sines + angle, mask=turned, other=0.0)
    sine = tl.where(columns < half, -sine, sine)
    return x * cosine[None, :] + y * sine[None, :]


@kernel
def narrow(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """x rounded to DTYPE; float16 holds its largest number for larger ones, and keeps a NaN."""
    if DTYPE == tl.float16:  # noqa: SIM300
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x.to(DTYPE)


def warps_for(kind: int) -> int:
    """Warps of a program: twice as many where elements are quantised, so that no version of the compiler spills."""
    return 4 if kind == NOT_QUANTIZED else 8


@kernel
def write_kernel(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    rotated: tl.tensor,
    key_arena: tl.tensor,
    value_arena: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    tables: tl.tensor,
    sequences: tl.tensor,
    positions: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    epsilon: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    rotated_stride: tl.tensor,
    table_stride: tl.tensor,
    angle_stride: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    scale_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    KIND: tl.constexpr,
    NORM: tl.constexpr,
) -> tl.tensor:
    """AT_ONCE query heads, or AT_ONCE key heads with their values, of one token."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (HEADS + AT_ONCE - 1) // AT_ONCE
    position = tl.load(positions + token).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    m_columns = (columns < HEAD_DIM)[None, :]
    cosine_row = cosines + position * angle_stride
    sine_row = sines + position * angle_stride
    if part < query_parts:
        heads = part * AT_ONCE + tl.arange(0, AT_ONCE)
        m_heads = heads < HEADS
        x = norm_and_rotate(
            queries + token * query_stride, query_norm, epsilon, cosine_row, sine_row, m_heads, heads * HEAD_DIM,
            HEAD_DIM, COLUMNS, ROTARY_DIM, NORM,
        )  # fmt: skip
        place = token * rotated_stride + (heads * HEAD_DIM)[:, None] + columns[None, :]
        tl.store(rotated + place, narrow(x, rotated.dtype.element_ty), mask=m_heads[:, None] & m_columns)
    else:
        heads = (part - query_parts) * AT_ONCE + tl.arange(0, AT_ONCE)
        sequence = tl.load(sequences + token).to(tl.int64)
        block = tl.load(tables + sequence * table_stride + position // BLOCK_TOKENS).to(tl.int64)
        # Block 0 is the null block: an empty place of the batch, which stores nothing.
        m_heads = heads < tl.where(block != 0, KV_HEADS, 0)
        mask = m_heads[:, None] & m_columns
        x = norm_and_rotate(
            keys + token * key_stride, key_norm, epsilon, cosine_row, sine_row, m_heads, heads * HEAD_DIM,
            HEAD_DIM, COLUMNS, ROTARY_DIM, NORM,
        )  # fmt: skip
        source = token * value_stride + (heads * HEAD_DIM)[:, None] + columns[None, :]
        v = tl.load(values + source, mask=mask, other=0.0)
        slot = position % BLOCK_TOKENS
        target = block * block_stride + heads.to(tl.int64) * head_stride + slot * HEAD_DIM
        if KIND == 0:
            stored = narrow(x, key_arena.dtype.element_ty)
            tl.store(key_arena + target[:, None] + columns[None, :], stored, mask=mask)
            stored = narrow(v.to(tl.float32), value_arena.dtype.element_ty)
            tl.store(value_arena + target[:, None] + columns[None, :], stored, mask=mask)
        else:
            scale_place = block * scale_stride + heads.to(tl.int64) * scale_head_stride + slot
            rates = error_rates(query_norm, columns, HEAD_DIM, ROTARY_DIM, NORM and KIND != 1)
            stored, scale = quantize(x, KIND, True, rates)
            tl.store(key_arena + target[:, None] + columns[None, :], stored, mask=mask)
            tl.store(key_scales + scale_place, scale, mask=m_heads)
            stored, scale = quantize(v.to(tl.float32), KIND, False, rates)
            tl.store(value_arena + target[:, None] + columns[None, :], stored, mask=mask)
            tl.store(value_scales + scale_place, scale, mask=m_heads)


def write(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    rotated: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 1e-6,
) -> None:
    """Norm and rotate queries into `rotated` (which may be `queries`' twin, not itself), store keys and values.

    queries and rotated [tokens, heads, head_dim], `rotated` of the arena's type unless that is quantised; keys and
    values [tokens, kv_heads, head_dim] (rows may be slices of one projection); arena as in `common/layout.py`, with
    `scales` when quantised; tables int32 [batch, width]; sequences and positions int32 [tokens]; cosines and sines
    float32 [max_position, rotary_dim / 2]; norms: weights [head_dim] of queries and keys; those of queries also say
    which errors of e4m3 keys count. Two rows of one call never share a slot. Raises Internal on shapes that do not fit.
    """
    kind = check_paged(rotated, arena, scales, tables, layer)
    tokens, heads, head_dim = queries.shape
    kv_heads, rotary_dim = arena.shape[3], 2 * cosines.shape[1]
    kv_shape = (tokens, kv_heads, head_dim)
    if keys.shape != kv_shape or values.shape != kv_shape or rotated.shape != queries.shape:
        raise Internal(f"keys {tuple(keys.shape)} or values {tuple(values.shape)} do not fit {kv_shape}")
    if any(x.stride()[-2:] != (head_dim, 1) for x in (queries, keys, values, rotated)):
        raise Internal("heads of one token must be contiguous")
    if rotary_dim > head_dim or cosines.stride() != sines.stride() or cosines.dtype != torch.float32:
        raise Internal(f"tables of {rotary_dim} rotated elements do not fit heads of {head_dim}")
    if rotated.data_ptr() == queries.data_ptr():
        raise Internal("queries cannot be rotated in place")
    if not tokens:
        return
    key_arena, value_arena = arena[:, layer, 0], arena[:, layer, 1]
    key_scales, value_scales = scale_planes(arena, scales, layer)
    query_norm, key_norm = norms or (cosines, cosines)
    parts = -(-heads // _HEADS_AT_ONCE) + -(-kv_heads // _HEADS_AT_ONCE)
    write_kernel[(tokens, parts)](
        queries, keys, values, rotated, key_arena, value_arena, key_scales, value_scales,
        tables, sequences, positions, cosines, sines, query_norm, key_norm, epsilon,
        queries.stride(0), keys.stride(0), values.stride(0), rotated.stride(0), tables.stride(0), cosines.stride(0),
        key_arena.stride(0), key_arena.stride(1), key_scales.stride(0), key_scales.stride(1),
        HEADS=heads, KV_HEADS=kv_heads, AT_ONCE=_HEADS_AT_ONCE, BLOCK_TOKENS=arena.shape[4], HEAD_DIM=head_dim,
        COLUMNS=power_of_two(head_dim), ROTARY_DIM=rotary_dim, KIND=kind, NORM=norms is not None,
        num_warps=warps_for(kind),
    )  # fmt: skip
