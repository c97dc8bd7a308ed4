"""Attention of one block of query rows over tiles of keys that lie in pages: the inner loop of prefill and decode.

Online softmax (Milakov and Gimelshein 2018) in the tiling of FlashAttention-2 (Dao 2023): logits in base 2 and
float32, statistics and output float32. A page is `[block_tokens, head_dim]` in one run. The number of the next page is
loaded one tile ahead, so that it is no link of the chain that the loads of keys wait for. Only tiles at the ends of a
row's context are masked. There keys *and* values outside are loaded as zero: a weight of zero does not undo a NaN.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

import triton.language as tl

from decoder.kernels.gpu import kernel


@kernel
def hyperbolic_tangent(x: tl.tensor) -> tl.tensor:
    """tanh through exp2; exact limits at both ends."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@kernel
def dequantize(stored: tl.tensor, KIND: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Stored elements as DTYPE, without their scale. Exact: int8 and e4m3 fit bfloat16 and float16."""
    if KIND == 3:
        # An e4m3 number with its bits moved is a float16 number 2**8 times smaller, subnormal ones too.
        wide = stored.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        result = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(DTYPE)
    elif KIND != 0:
        result = stored.to(tl.float32).to(DTYPE)
    else:
        result = stored
    return result


@kernel
def widen_scale(bits: tl.tensor) -> tl.tensor:
    """The numbers whose bfloat16 bits are given, as float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@kernel
def load_rows(pointers: tl.tensor, mask: tl.tensor, MASKED: tl.constexpr) -> tl.tensor:
    """What is at the pointers; zero outside the mask where there is one."""
    return tl.load(pointers, mask=mask, other=0.0) if MASKED else tl.load(pointers)


@kernel
def _attend_tile(
    queries: tl.tensor,
    output: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    table: tl.tensor,
    block: tl.tensor,
    start: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    positions: tl.tensor,
    block_stride: tl.tensor,
    scale_stride: tl.tensor,
    logit_scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    TILE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """One tile of keys from token `start`; the tokens that any row may see are low <= token < high."""
    tokens = start + tl.arange(0, TILE)  # [TILE]
    columns = tl.arange(0, COLUMNS)  # [COLUMNS]
    inside = (tokens >= low) & (tokens < high)
    slots = tokens % BLOCK_TOKENS
    if BLOCK_TOKENS >= TILE:
        blocks = block.to(tl.int64)
    elif MASKED:
        blocks = tl.load(table + tokens // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
    else:
        blocks = tl.load(table + tokens // BLOCK_TOKENS).to(tl.int64)
    offsets = (blocks * block_stride + slots * HEAD_DIM)[:, None] + columns[None, :]  # [TILE, COLUMNS]
    present = (columns < HEAD_DIM)[None, :]
    if MASKED:
        present = present & inside[:, None]
    PARTIAL: tl.constexpr = MASKED or COLUMNS != HEAD_DIM
    # Quantised values of a decode are loaded where they are used: beside the keys they would cost it registers. With
    # heads of 256 it is the other way round.
    LATE: tl.constexpr = KIND != 0 and queries.shape[0] <= 16 and COLUMNS < 256
    k = load_rows(keys + offsets, present, PARTIAL)
    if not LATE:
        v = load_rows(values + offsets, present, PARTIAL)
    k = dequantize(k, KIND, queries.dtype)
    logits = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * logit_scale  # [ROWS, TILE]
    if KIND != 0:
        places = blocks * scale_stride + slots
        k_scale = widen_scale(load_rows(key_scales + places, inside, MASKED))
        if not LATE:
            v_scale = widen_scale(load_rows(value_scales + places, inside, MASKED))
        logits = logits * k_scale[None, :]
    if SOFT_CAP:
        logits = soft_cap * hyperbolic_tangent(logits)
    if MASKED:
        visible = inside[None, :]
        if CAUSAL:
            visible = visible & (tokens[None, :] <= positions[:, None])
        if WINDOWED:
            visible = visible & (tokens[None, :] > positions[:, None] - window)
        logits = tl.where(visible, logits, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1))
    base = new_max
    if MASKED:
        # A row that has seen nothing yet: -inf minus -inf would be NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(logits - base[:, None])
    kept = tl.exp2(row_max - base)
    row_sum = row_sum * kept + tl.sum(weights, 1)
    output = output * kept[:, None]
    if LATE:
        v = load_rows(values + offsets, present, PARTIAL)
        v_scale = widen_scale(load_rows(value_scales + places, inside, MASKED))
    if KIND == 0:
        output = tl.dot(weights.to(v.dtype), v, output, input_precision=PRECISION)
    elif queries.dtype == tl.float32:
        v = dequantize(v, KIND, tl.float32)
        output = tl.dot(weights * v_scale[None, :], v, output, input_precision=PRECISION)
    else:
        # bfloat16 for float16 queries too: a weight times a scale may lie below what float16 can hold.
        v = dequantize(v, KIND, tl.bfloat16)
        output = tl.dot((weights * v_scale[None, :]).to(tl.bfloat16), v, output)
    return output, new_max, row_sum


@kernel
def attend_tiles(
    queries: tl.tensor,
    output: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    positions: tl.tensor,
    block_stride: tl.tensor,
    scale_stride: tl.tensor,
    logit_scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    TILE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Tiles begin..stop-1 of TILE tokens, in order, merged into (output, row_max, row_sum), which it returns.

    `queries` [ROWS, COLUMNS], `output` [ROWS, COLUMNS] float32, `row_max` and `row_sum` [ROWS]; `keys` and `values`
    point at one (layer, key head) of block 0, `table` at the sequence's first entry. `positions` [ROWS] are those of
    the rows.
    With a soft cap, `logit_scale` is scale / cap and `soft_cap` is cap * log2(e); without, `logit_scale` has log2(e).
    """
    block = begin
    if BLOCK_TOKENS >= TILE:
        block = tl.load(table + begin * TILE // BLOCK_TOKENS, mask=begin < stop, other=0)
    for index in range(begin, stop):
        following = block
        if BLOCK_TOKENS >= TILE:
            following = tl.load(table + (index + 1) * TILE // BLOCK_TOKENS, mask=index + 1 < stop, other=0)
        output, row_max, row_sum = _attend_tile(
            queries,
            output,
            row_max,
            row_sum,
            keys,
            values,
            key_scales,
            value_scales,
            table,
            block,
            index * TILE,
            low,
            high,
            positions,
            block_stride,
            scale_stride,
            logit_scale,
            soft_cap,
            window,
            TILE,
            BLOCK_TOKENS,
            HEAD_DIM,
            COLUMNS,
            KIND,
            SOFT_CAP,
            CAUSAL,
            WINDOWED,
            MASKED,
            PRECISION,
        )
        block = following
    return output, row_max, row_sum
