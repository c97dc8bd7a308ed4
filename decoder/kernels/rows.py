"""Work on single rows: embedding, RMS norm, rotary embedding with the key and value write, and activations.

A row is touched by one thread alone, and its arithmetic does not depend on other rows.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np

from decoder.kernels import simd
from decoder.kernels.compiled import inlined_variant, kernel, variant
from decoder.kernels.frame import (
    ARENA,
    BLOCK_BYTES,
    BLOCK_TOKENS,
    EMBEDDING_SCALE,
    EPSILON,
    HEAD_BYTES,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYER_BYTES,
    LAYER_COSINES,
    LAYER_KEY_NORM,
    LAYER_QUERY_NORM,
    LAYER_SINES,
    LAYER_WORDS,
    LAYERS,
    OWNERS,
    POSITIONS,
    QKV,
    QKV_COLUMNS,
    QUERIES,
    QUERY_PLANE_BYTES,
    ROTARY_HALF,
    ROW_BYTES,
    SCALES,
    TABLE_WIDTH,
    TABLES,
    VALUE_OFFSET,
)
from decoder.kernels.grouped_inputs import load_group_input, store_group_input
from decoder.kernels.grouped_weights import load_column, record_bytes
from decoder.kernels.sets import (
    float32_inputs,
    float32_weights,
    grouped_weights,
    pair_inputs,
    split_inputs,
    uses_tiles,
)
from decoder.kernels.stored_rows import note_rates, store_row

LOG2_E = np.float32(1.4426950408889634)
_GELU_RATE = np.float32(-2.0 * 1.4426950408889634 * 0.7978845608028654)  # -2 log2(e) sqrt(2 / pi)


def load_weights(kernels: Any, address: int) -> Any:
    """Sixteen weights as float32."""
    raise NotImplementedError("compiled code only")


@inlined_variant(load_weights)
def _load_weights(kernels: Any, address: Any) -> Any:
    if float32_weights(kernels):
        return lambda kernels, address: simd.load_floats(address)
    return lambda kernels, address: simd.load_bf16(address)


def weight_bytes(kernels: Any) -> int:
    """Bytes of a weight."""
    raise NotImplementedError("compiled code only")


@inlined_variant(weight_bytes)
def _weight_bytes(kernels: Any) -> Any:
    if float32_weights(kernels):
        return lambda kernels: 4
    return lambda kernels: 2


def pair_bytes(kernels: Any, weights: int, depth: int) -> int:
    """Bytes of a pair of column blocks with `depth` inputs of the packed matrix at `weights`."""
    raise NotImplementedError("compiled code only")


@inlined_variant(pair_bytes)
def _pair_bytes(kernels: Any, weights: Any, depth: Any) -> Any:
    if grouped_weights(kernels):
        return lambda kernels, weights, depth: depth // 32 * record_bytes(weights)
    return lambda kernels, weights, depth: depth * 32 * weight_bytes(kernels)


def store_query(kernels: Any, address: int, vector: Any) -> None:
    """Sixteen float32 rounded to the type of queries."""
    raise NotImplementedError("compiled code only")


@inlined_variant(store_query)
def _store_query(kernels: Any, address: Any, vector: Any) -> Any:
    if float32_inputs(kernels):
        return lambda kernels, address, vector: simd.store_floats(address, vector)
    return lambda kernels, address, vector: simd.store_bf16(address, vector)


def query_bytes(kernels: Any) -> int:
    """Bytes of an element of a query."""
    raise NotImplementedError("compiled code only")


@inlined_variant(query_bytes)
def _query_bytes(kernels: Any) -> Any:
    if float32_inputs(kernels):
        return lambda kernels: 4
    return lambda kernels: 2


def store_input(kernels: Any, base: int, row: int, column: int, columns: int, vector: Any) -> None:
    """Sixteen elements of a matmul input of `columns` columns, from `column` (a multiple of 16).

    Inputs lie row by row as float32, or as bfloat16 where they are multiplied in pairs; for AMX as bfloat16 in tiles of
    sixteen rows by 32 columns, the shape it loads. A split input has two such tiles side by side: the rounded values,
    and what rounding left, rounded again. Beside weights in groups each group of a row has its sums behind it
    (`grouped_inputs.py`).
    """
    raise NotImplementedError("compiled code only")


@inlined_variant(store_input)
def _store_input(kernels: Any, base: Any, row: Any, column: Any, columns: Any, vector: Any) -> Any:
    if grouped_weights(kernels):
        return lambda kernels, base, row, column, columns, vector: store_group_input(base, row, column, columns, vector)
    if pair_inputs(kernels):
        return lambda kernels, base, row, column, columns, vector: simd.store_bf16(
            base + (row * columns + column) * 2, vector
        )
    if not uses_tiles(kernels):
        if float32_inputs(kernels):
            return lambda kernels, base, row, column, columns, vector: simd.store_floats(
                base + (row * columns + column) * 4, vector
            )
        return lambda kernels, base, row, column, columns, vector: simd.store_floats(
            base + (row * columns + column) * 4, simd.round_bf16(vector)
        )
    if split_inputs(kernels):

        def parts(kernels: Any, base: Any, row: Any, column: Any, columns: Any, vector: Any) -> None:
            target = base + ((row >> 4) * (columns >> 5) + (column >> 5)) * 2048 + (row & 15) * 64 + (column & 31) * 2
            high = simd.round_bf16(vector)
            simd.store_bf16(target, high)
            simd.store_bf16(target + 1024, simd.sub(vector, high))

        return parts
    return lambda kernels, base, row, column, columns, vector: simd.store_bf16(
        base + ((row >> 4) * (columns >> 5) + (column >> 5)) * 1024 + (row & 15) * 64 + (column & 31) * 2, vector
    )


def load_input(kernels: Any, base: int, row: int, column: int, columns: int) -> Any:
    """Sixteen elements of a matmul input as float32, as `store_input` has laid them out."""
    raise NotImplementedError("compiled code only")


@inlined_variant(load_input)
def _load_input(kernels: Any, base: Any, row: Any, column: Any, columns: Any) -> Any:
    if grouped_weights(kernels):
        return lambda kernels, base, row, column, columns: load_group_input(base, row, column, columns)
    if pair_inputs(kernels):
        return lambda kernels, base, row, column, columns: simd.load_bf16(base + (row * columns + column) * 2)
    if not uses_tiles(kernels):
        return lambda kernels, base, row, column, columns: simd.load_floats(base + (row * columns + column) * 4)
    if split_inputs(kernels):

        def parts(kernels: Any, base: Any, row: Any, column: Any, columns: Any) -> Any:
            source = base + ((row >> 4) * (columns >> 5) + (column >> 5)) * 2048 + (row & 15) * 64 + (column & 31) * 2
            return simd.add(simd.load_bf16(source), simd.load_bf16(source + 1024))

        return parts
    return lambda kernels, base, row, column, columns: simd.load_bf16(
        base + ((row >> 4) * (columns >> 5) + (column >> 5)) * 1024 + (row & 15) * 64 + (column & 31) * 2
    )


def embed(kernels: Any, frame: Any, table: int, token: int, hidden: int, target: int) -> None:
    """Write one embedding row into the float32 residual."""
    raise NotImplementedError("compiled code only")


@variant(embed)
def _embed(kernels: Any, frame: Any, table: Any, token: Any, hidden: Any, target: Any) -> Any:
    if grouped_weights(kernels):
        return lambda kernels, frame, table, token, hidden, target: load_column(
            table, token, hidden, simd.load_float(frame[EMBEDDING_SCALE]), target
        )

    def copy(kernels: Any, frame: Any, table: Any, token: Any, hidden: Any, target: Any) -> None:
        source = table + token * hidden * weight_bytes(kernels)
        for column in range(0, hidden, 16):
            vector = load_weights(kernels, source + column * weight_bytes(kernels))
            simd.store_floats(target + column * 4, vector)

    return copy


@kernel
def inverse_norm(source: int, columns: int, width: int, epsilon: float) -> Any:
    """What an RMS norm multiplies a float32 row of `columns` columns by, of which the first `width` are not padding."""
    total = simd.splat(np.float32(0.0))
    for column in range(0, columns, 16):
        value = simd.load_floats(source + column * 4)
        total = simd.fma(value, value, total)
    mean = simd.reduce_add(total) / np.float32(width)
    return simd.splat(np.float32(1.0) / np.sqrt(np.float32(mean + np.float32(epsilon))))


@kernel
def normalize(
    kernels: Any, source: int, weight: int, columns: int, width: int, epsilon: float, base: int, row: int
) -> None:
    """RMS norm (Zhang and Sennrich 2019) of the float32 row at `source` into row `row` of a matmul input."""
    scale = inverse_norm(source, columns, width, epsilon)
    for column in range(0, columns, 16):
        value = simd.mul(simd.load_floats(source + column * 4), scale)
        value = simd.mul(value, simd.load_floats(weight + column * 4))
        store_input(kernels, base, row, column, columns, value)


@kernel
def add_normalized(source: int, weight: int, columns: int, width: int, epsilon: float, target: int) -> None:
    """Add the RMS norm of the float32 row at `source` to the one at `target`."""
    scale = inverse_norm(source, columns, width, epsilon)
    for column in range(0, columns, 16):
        value = simd.mul(simd.load_floats(source + column * 4), scale)
        value = simd.mul(value, simd.load_floats(weight + column * 4))
        simd.store_floats(target + column * 4, simd.add(simd.load_floats(target + column * 4), value))


@kernel
def _normalize_head(source: int, weight: int, head_dim: int, epsilon: float) -> None:
    """RMS norm of one head in place."""
    scale = inverse_norm(source, head_dim, head_dim, epsilon)
    for column in range(0, head_dim, 16):
        value = simd.mul(simd.load_floats(source + column * 4), scale)
        simd.store_floats(source + column * 4, simd.mul(value, simd.load_floats(weight + column * 4)))


@kernel
def silu_multiply(gate: Any, up: Any) -> Any:
    """silu(gate) * up per lane."""
    power = simd.exp2(simd.mul(gate, simd.splat(-LOG2_E)))
    return simd.mul(simd.div(gate, simd.add(simd.splat(np.float32(1.0)), power)), up)


@kernel
def gelu_multiply(gate: Any, up: Any) -> Any:
    """gelu(gate) * up per lane, by the tanh approximation (Hendrycks and Gimpel 2016)."""
    cube = simd.mul(simd.mul(gate, gate), gate)
    inner = simd.fma(cube, simd.splat(np.float32(0.044715)), gate)
    # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)), which loses nothing where u is near zero.
    power = simd.exp2(simd.mul(inner, simd.splat(_GELU_RATE)))
    return simd.mul(simd.div(gate, simd.add(simd.splat(np.float32(1.0)), power)), up)


@kernel
def rotate(source: int, cosines: int, sines: int, half: int) -> None:
    """Rotate the first 2 * half columns of a head in place: the first half of them against the second (RoFormer)."""
    if half & 15:
        for index in range(half):
            first, second = simd.load_float(source + index * 4), simd.load_float(source + (half + index) * 4)
            cosine, sine = simd.load_float(cosines + index * 4), simd.load_float(sines + index * 4)
            simd.store_float(source + index * 4, first * cosine - second * sine)
            simd.store_float(source + (half + index) * 4, second * cosine + first * sine)
        return
    for index in range(0, half, 16):
        low, high = source + index * 4, source + (half + index) * 4
        a, b = simd.load_floats(low), simd.load_floats(high)
        cosine_vector, sine_vector = simd.load_floats(cosines + index * 4), simd.load_floats(sines + index * 4)
        simd.store_floats(low, simd.sub(simd.mul(a, cosine_vector), simd.mul(b, sine_vector)))
        simd.store_floats(high, simd.add(simd.mul(b, cosine_vector), simd.mul(a, sine_vector)))


@kernel
def rotate_and_write(kernels: Any, frame: Any, layer: int, row: int) -> None:
    """Finish a row's queries, keys and values, lay its queries out by key head, store the others in its block.

    Queries and keys are normalised, where the layer does that, and rotated.
    """
    head_dim, heads, kv_heads = frame[HEAD_DIM], frame[HEADS], frame[KV_HEADS]
    group, half = heads // kv_heads, frame[ROTARY_HALF]
    size = query_bytes(kernels)
    weights = frame[LAYERS] + layer * LAYER_WORDS * 8
    position = np.int64(simd.load_int32(frame[POSITIONS] + row * 4))
    source = frame[QKV] + row * frame[QKV_COLUMNS] * 4
    query_norm = simd.load_int64(weights + LAYER_QUERY_NORM * 8)
    if query_norm:
        key_norm, epsilon = simd.load_int64(weights + LAYER_KEY_NORM * 8), simd.load_float(frame[EPSILON])
        for head in range(heads + kv_heads):
            norm = query_norm if head < heads else key_norm
            _normalize_head(source + head * head_dim * 4, norm, head_dim, epsilon)
    cosines = simd.load_int64(weights + LAYER_COSINES * 8) + position * half * 4
    sines = simd.load_int64(weights + LAYER_SINES * 8) + position * half * 4
    for head in range(heads + kv_heads):
        rotate(source + head * head_dim * 4, cosines, sines, half)
    for head in range(heads):
        lane = row * group + head % group
        target = frame[QUERIES] + (head // group) * frame[QUERY_PLANE_BYTES] + lane * head_dim * size
        for column in range(0, head_dim, 16):
            vector = simd.load_floats(source + (head * head_dim + column) * 4)
            store_query(kernels, target + column * size, vector)
    owner = np.int64(simd.load_int32(frame[OWNERS] + row * 4))
    entry = owner * frame[TABLE_WIDTH] + position // frame[BLOCK_TOKENS]
    block = np.int64(simd.load_int32(frame[TABLES] + entry * 4))
    start = frame[ARENA] + block * frame[BLOCK_BYTES]
    scales_at = start + frame[SCALES] + (layer * frame[LAYER_BYTES] // head_dim + position % frame[BLOCK_TOKENS]) * 2
    slot = start + layer * frame[LAYER_BYTES]
    slot += (position % frame[BLOCK_TOKENS]) * frame[ROW_BYTES]
    # The queries are laid out; their place is free.
    note_rates(kernels, query_norm, head_dim, half, source)
    for head in range(kv_heads):
        keys = source + (heads + head) * head_dim * 4
        values = keys + kv_heads * head_dim * 4
        target = slot + head * frame[HEAD_BYTES]
        scales = scales_at + head * frame[BLOCK_TOKENS] * 2
        store_row(kernels, target, scales, keys, head_dim, source)
        value_scales = scales + frame[VALUE_OFFSET] // head_dim * 2
        store_row(kernels, target + frame[VALUE_OFFSET], value_scales, values, head_dim, 0)
