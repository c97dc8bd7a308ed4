"""The two products of attention with AMX tiles, and the packing of what they take.

Queries lie as [head_dim, lane] and keys as rows, so that scores come out as [key, lane] for a vertical softmax;
weighted values come out as [head_dim, lane]. Called by `attention_tiles.py` alone, on scratch memory of one thread.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

from decoder.kernels import amx, simd
from decoder.kernels.compiled import kernel
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

WEIGHTS_BYTES: Final = (SPAN // 32) * 1024  # from the softmax weights of one tile of lanes to those of the next


@kernel
def pack_queries(source: int, head_dim: int, target: int, tile: int) -> None:
    """Transpose sixteen query rows into the `tile`-th tile of lanes at `target`."""
    for block in range(head_dim >> 5):
        out = target + (tile * (head_dim >> 5) + block) * 1024
        simd.transpose_words(source + block * 64, head_dim * 2, out, 64)


@kernel
def pack_values(frame: Any, scratch: int, head_dim: int, first: int) -> None:
    """Take in the 32 value rows at AT_ROWS, the `first`-th of the span on."""
    rows, target = scratch + frame[AT_ROWS], scratch + frame[AT_VALUES] + (first >> 5) * 1024
    for block in range(head_dim >> 4):
        simd.transpose_pairs(rows + block * 32, head_dim * 2, target + block * (SPAN // 32) * 1024, 64)


@kernel
def scores(frame: Any, scratch: int, tile: int, pair: int, keys: int) -> None:
    """Query-key products of `pair` tiles of lanes from `tile` and `keys` keys (a multiple of 32), at AT_SCORES."""
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


@kernel
def weighted_values(frame: Any, scratch: int, pair: int, keys: int) -> None:
    """Values by softmax weights of `pair` tiles of lanes, float32 [head_dim, lane] at AT_OUTPUT."""
    wide, weights = (SPAN // 32) * 1024, scratch + frame[AT_WEIGHTS]
    for column in range(0, frame[HEAD_DIM], 32):
        a = scratch + frame[AT_VALUES] + (column >> 4) * wide
        out = scratch + frame[AT_OUTPUT] + column * LANES_BYTES
        if pair == 2:
            amx.product_2x2(a, 64, 1024, wide, weights, 1024, wide, keys >> 5, out, LANES_BYTES, 16 * LANES_BYTES, 64)
        else:
            amx.product_2x1(a, 64, 1024, wide, weights, 1024, wide, keys >> 5, out, LANES_BYTES, 16 * LANES_BYTES, 64)
