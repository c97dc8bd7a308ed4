"""The two products of attention per kernel set, and the packing of what they take.

Queries lie as [head_dim, lane] and keys as rows, so that scores come out as [key, lane] for a vertical softmax;
weighted values come out as [head_dim, lane]. Called by `attention.py` alone, on scratch memory of one thread.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np

from decoder.kernels import amx, simd
from decoder.kernels.compiled import inlined_variant, kernel, variant
from decoder.kernels.frame import (
    AT_KEYS,
    AT_OUTPUT,
    AT_QUERIES,
    AT_ROWS,
    AT_SCORES,
    AT_VALUES,
    AT_WEIGHTS,
    HEAD_DIM,
    LANES_BYTES,
    SPAN,
)
from decoder.kernels.sets import float32_inputs, tile_attention


def held_bytes(kernels: Any) -> int:
    """Bytes of an element of a row that `load_rows` wrote."""
    raise NotImplementedError("compiled code only")


@inlined_variant(held_bytes)
def _held_bytes(kernels: Any) -> Any:
    if tile_attention(kernels):
        return lambda kernels: 2
    return lambda kernels: 4


def pack_queries(kernels: Any, source: int, head_dim: int, target: int, tile: int) -> None:
    """Transpose sixteen query rows into the `tile`-th tile of lanes at `target`."""
    raise NotImplementedError("compiled code only")


@variant(pack_queries)
def _pack_queries(kernels: Any, source: Any, head_dim: Any, target: Any, tile: Any) -> Any:
    if tile_attention(kernels):

        def pairs(kernels: Any, source: Any, head_dim: Any, target: Any, tile: Any) -> None:
            for block in range(head_dim >> 5):
                out = target + (tile * (head_dim >> 5) + block) * 1024
                simd.transpose_words(source + block * 64, head_dim * 2, out, 64)

        return pairs
    if float32_inputs(kernels):

        def float32(kernels: Any, source: Any, head_dim: Any, target: Any, tile: Any) -> None:
            for block in range(head_dim >> 4):
                out = target + (tile * (head_dim >> 4) + block) * 1024
                simd.transpose_words(source + block * 64, head_dim * 4, out, 64)

        return float32

    def bfloat16(kernels: Any, source: Any, head_dim: Any, target: Any, tile: Any) -> None:
        for block in range(head_dim >> 4):
            out = target + (tile * (head_dim >> 4) + block) * 1024
            simd.transpose_bf16(source + block * 32, head_dim * 2, out, 64)

    return bfloat16


def value_rows(kernels: Any, frame: Any, scratch: int, first: int) -> int:
    """Where the 32 value rows from the `first`-th of the span are to be copied."""
    raise NotImplementedError("compiled code only")


@inlined_variant(value_rows)
def _value_rows(kernels: Any, frame: Any, scratch: Any, first: Any) -> Any:
    if tile_attention(kernels):
        return lambda kernels, frame, scratch, first: scratch + frame[AT_ROWS]
    return lambda kernels, frame, scratch, first: scratch + frame[AT_VALUES] + first * frame[HEAD_DIM] * 4


def pack_values(kernels: Any, frame: Any, scratch: int, head_dim: int, first: int) -> None:
    """Take in the 32 value rows at `value_rows`, the `first`-th of the span on."""
    raise NotImplementedError("compiled code only")


@variant(pack_values)
def _pack_values(kernels: Any, frame: Any, scratch: Any, head_dim: Any, first: Any) -> Any:
    if not tile_attention(kernels):
        return lambda kernels, frame, scratch, head_dim, first: None

    def tiles(kernels: Any, frame: Any, scratch: Any, head_dim: Any, first: Any) -> None:
        rows, target = scratch + frame[AT_ROWS], scratch + frame[AT_VALUES] + (first >> 5) * 1024
        for block in range(head_dim >> 4):
            simd.transpose_pairs(rows + block * 32, head_dim * 2, target + block * (SPAN // 32) * 1024, 64)

    return tiles


def weights_bytes(kernels: Any) -> int:
    """Bytes from the softmax weights of one tile of lanes to those of the next."""
    raise NotImplementedError("compiled code only")


@inlined_variant(weights_bytes)
def _weights_bytes(kernels: Any) -> Any:
    if tile_attention(kernels):
        return lambda kernels: (SPAN // 32) * 1024
    return lambda kernels: 64


@kernel
def _eight_rows(a: int, a_row: int, a_step: int, b: int, b_step: int, steps: int, out: int, out_row: int) -> None:
    """Products of eight rows of floats at `a`, steps `a_step` apart, with `steps` vectors at `b`, `b_step` apart."""
    zero = simd.splat(np.float32(0.0))
    s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
    a4 = a + 4 * a_row
    for step in range(steps):
        vector, x, y = simd.load_floats(b + step * b_step), a + step * a_step, a4 + step * a_step
        s0 = simd.fma(simd.splat(simd.load_float(x)), vector, s0)
        s1 = simd.fma(simd.splat(simd.load_float(x + a_row)), vector, s1)
        s2 = simd.fma(simd.splat(simd.load_float(x + 2 * a_row)), vector, s2)
        s3 = simd.fma(simd.splat(simd.load_float(x + 3 * a_row)), vector, s3)
        s4 = simd.fma(simd.splat(simd.load_float(y)), vector, s4)
        s5 = simd.fma(simd.splat(simd.load_float(y + a_row)), vector, s5)
        s6 = simd.fma(simd.splat(simd.load_float(y + 2 * a_row)), vector, s6)
        s7 = simd.fma(simd.splat(simd.load_float(y + 3 * a_row)), vector, s7)
    simd.store_floats(out, s0)
    simd.store_floats(out + out_row, s1)
    simd.store_floats(out + 2 * out_row, s2)
    simd.store_floats(out + 3 * out_row, s3)
    simd.store_floats(out + 4 * out_row, s4)
    simd.store_floats(out + 5 * out_row, s5)
    simd.store_floats(out + 6 * out_row, s6)
    simd.store_floats(out + 7 * out_row, s7)


def scores(kernels: Any, frame: Any, scratch: int, tile: int, pair: int, keys: int) -> None:
    """Query-key products of `pair` tiles of lanes from `tile` and `keys` keys (a multiple of 32), at AT_SCORES."""
    raise NotImplementedError("compiled code only")


@variant(scores)
def _scores(kernels: Any, frame: Any, scratch: Any, tile: Any, pair: Any, keys: Any) -> Any:
    if tile_attention(kernels):

        def tiles(kernels: Any, frame: Any, scratch: Any, tile: Any, pair: Any, keys: Any) -> None:
            row, steps = frame[HEAD_DIM] * 2, frame[HEAD_DIM] >> 5
            queries = scratch + frame[AT_QUERIES] + tile * steps * 1024
            for first in range(0, keys, 32):
                a = scratch + frame[AT_KEYS] + first * row
                out = scratch + frame[AT_SCORES] + first * LANES_BYTES
                if pair == 2:
                    amx.product_2x2(
                        a, row, 64, row * 16, queries, 1024, steps * 1024, steps, out, LANES_BYTES, 16 * LANES_BYTES, 64
                    )
                else:
                    amx.product_2x1(
                        a, row, 64, row * 16, queries, 1024, steps * 1024, steps, out, LANES_BYTES, 16 * LANES_BYTES, 64
                    )

        return tiles

    def plain(kernels: Any, frame: Any, scratch: Any, tile: Any, pair: Any, keys: Any) -> None:
        head_dim = frame[HEAD_DIM]
        row = head_dim * 4
        for member in range(pair):
            queries = scratch + frame[AT_QUERIES] + (tile + member) * head_dim * 64
            for first in range(0, keys, 8):
                out = scratch + frame[AT_SCORES] + first * LANES_BYTES + member * 64
                _eight_rows(scratch + frame[AT_KEYS] + first * row, row, 4, queries, 64, head_dim, out, LANES_BYTES)

    return plain


def weighted_values(kernels: Any, frame: Any, scratch: int, pair: int, keys: int) -> None:
    """Values by softmax weights of `pair` tiles of lanes, float32 [head_dim, lane] at AT_OUTPUT."""
    raise NotImplementedError("compiled code only")


@variant(weighted_values)
def _weighted_values(kernels: Any, frame: Any, scratch: Any, pair: Any, keys: Any) -> Any:
    if tile_attention(kernels):

        def tiles(kernels: Any, frame: Any, scratch: Any, pair: Any, keys: Any) -> None:
            wide, weights = (SPAN // 32) * 1024, scratch + frame[AT_WEIGHTS]
            for column in range(0, frame[HEAD_DIM], 32):
                a = scratch + frame[AT_VALUES] + (column >> 4) * wide
                out = scratch + frame[AT_OUTPUT] + column * LANES_BYTES
                if pair == 2:
                    amx.product_2x2(
                        a, 64, 1024, wide, weights, 1024, wide, keys >> 5, out, LANES_BYTES, 16 * LANES_BYTES, 64
                    )
                else:
                    amx.product_2x1(
                        a, 64, 1024, wide, weights, 1024, wide, keys >> 5, out, LANES_BYTES, 16 * LANES_BYTES, 64
                    )

        return tiles

    def plain(kernels: Any, frame: Any, scratch: Any, pair: Any, keys: Any) -> None:
        row = frame[HEAD_DIM] * 4
        for member in range(pair):
            weights = scratch + frame[AT_WEIGHTS] + member * 64
            for column in range(0, frame[HEAD_DIM], 8):
                values = scratch + frame[AT_VALUES] + column * 4
                out = scratch + frame[AT_OUTPUT] + column * LANES_BYTES + member * 64
                _eight_rows(values, 4, row, weights, LANES_BYTES, keys, out, LANES_BYTES)

    return plain
