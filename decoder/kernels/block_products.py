"""The product of some rows with one pair of column blocks, per kernel set.

Weights are packed by column blocks of sixteen (`decoder/models/packing.py`), inputs as `rows.store_input` lays them.
The sums of a row are added in the order of k whatever the number of rows, so a row's result never depends on what
shares the step. Called by `linear.py` and `experts.py`, which give it room for SUM_BYTES of sums, and with weights in
groups for a panel behind them (`grouped_products.py`).
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from decoder.kernels import amx, simd
from decoder.kernels.compiled import inlined_variant, kernel, made_kernel, variant
from decoder.kernels.frame import ROW_BLOCK, SUM_BYTES
from decoder.kernels.grouped_inputs import GROUP, INPUT_BYTES
from decoder.kernels.grouped_products import grouped_product, panel_of_pair
from decoder.kernels.row_tiles import (
    LINE_BYTES,
    PAIR,
    ROW_BYTES,
    TALL_TILE,
    TILE,
    WHOLE,
    Pass,
    Tile,
    row_tile,
)
from decoder.kernels.sets import float32_weights, grouped_weights, pair_inputs, split_inputs, uses_tiles

_RUN_STEPS: Final = 128  # lines of a run of k: 8 KB
_STREAM_BYTES: Final = 4096  # how far ahead the weights of a tile that takes all rows are prefetched


def block_product(
    kernels: Any, inputs: int, row: int, rows: int, depth: int, weights: int, sums: int, once: bool
) -> None:
    """`rows` rows (at most 32) from `row` (a multiple of 32) by one pair of column blocks, into sums [32, 32].

    `once` says that no other rows follow, so that the weights stream from memory.
    """
    raise NotImplementedError("compiled code only")


def for_many_rows(kernels: Any, weights: int, depth: int, sums: int) -> int:
    """What `block_product` takes in place of a pair of column blocks that more than ROW_BLOCK rows are multiplied with.

    Weights in groups become a panel behind the sums, which begin at a cache line; it stays there while all rows pass.
    """
    raise NotImplementedError("compiled code only")


@inlined_variant(for_many_rows)
def _for_many_rows(kernels: Any, weights: Any, depth: Any, sums: Any) -> Any:
    if grouped_weights(kernels):
        return lambda kernels, weights, depth, sums: panel_of_pair(weights, depth, sums + SUM_BYTES)
    return lambda kernels, weights, depth, sums: weights


@kernel
def _pace(passes: int) -> int:
    """Bytes by which the prefetched address moves with each step, so that all passes over a run fetch the next one."""
    return (LINE_BYTES + passes - 1) // passes


@kernel
def _run_steps(steps: int) -> int:
    """Steps of a run of k whose lines stay in the first-level cache while all rows pass, equal for all runs."""
    runs = (steps + _RUN_STEPS - 1) // _RUN_STEPS
    return ((steps + runs - 1) // runs + 15) & ~15


@functools.cache
def product_by_tiles(passes: tuple[Pass, ...], tile: Tile) -> Any:
    """A function that multiplies rows [depth] by a pair of column blocks, in as many tiles as they need.

    Inputs are float32; bfloat16 in passes over PAIR.
    """
    parts = tuple(part for parts in passes for part in parts)
    num_passes, halves = len(passes), len(parts)  # two halves: sums of even and odd k are apart, and added last
    in_pairs = parts == (PAIR,)
    most, block_step, odd = tile.rows, tile.blocks, ROW_BLOCK * ROW_BYTES
    # One tile of both column blocks: its weights pass once, so all of its sums are kept from the first to the last.
    both = block_step == 2
    alone = most if both else 1
    through = row_tile(range(1, alone + 1), 2, (parts,))
    several = through if both else row_tile(range(2, most + 1), block_step, passes)
    name = f"{passes}_{tile.rows}_{tile.blocks}"

    @made_kernel(name)
    def run_of_k(
        a: int, stride: int, rows: int, w: int, wide: int, steps: int, sums: int, ahead: int, pace: int
    ) -> None:
        """All rows by the weights of one run of k, in tiles of as equal a size as there can be."""
        row = 0
        for left in range((rows + most - 1) // most, 0, -1):
            size = (rows - row + left - 1) // left
            start, target = a + row * stride, sums + row * ROW_BYTES
            several(size, start, stride, w, wide, steps, target, odd, ahead, pace)
            ahead, row = ahead + num_passes * steps * pace, row + size

    @made_kernel(name)
    def multiply(a: int, stride: int, rows: int, depth: int, weights: int, sums: int) -> None:
        steps = depth >> 1 if in_pairs else depth // halves
        wide, run = steps * LINE_BYTES, _run_steps(steps)
        pace = _pace((rows + most - 1) // most * num_passes)
        for offset in range(0, rows * ROW_BYTES, LINE_BYTES):
            simd.store_floats(sums + offset, simd.splat(np.float32(0.0)))
            if halves == 2:
                simd.store_floats(sums + odd + offset, simd.splat(np.float32(0.0)))
        if rows <= alone:
            # The last lines that are asked for are the next pair's first ones.
            far = min(steps, _STREAM_BYTES // LINE_BYTES)
            near, behind = steps - far, weights + (steps - far) * LINE_BYTES
            if near > 0:
                through(rows, a, stride, weights, wide, near, sums, odd, weights + _STREAM_BYTES, LINE_BYTES)
            through(
                rows, a + near * 4 * halves, stride, behind, wide, far, sums, odd, weights + 2 * wide, LINE_BYTES
            )  # fmt: skip
        else:
            for block in range(0, 2, block_step):
                for start in range(0, steps, run):
                    here, w = min(run, steps - start), weights + block * wide + start * LINE_BYTES
                    inputs, target = a + start * 4 * halves, sums + block * LINE_BYTES
                    ahead = w + here * LINE_BYTES
                    # Behind the last run of both blocks the next pair begins.
                    if both and start + here == steps:
                        ahead = weights + 2 * wide
                    run_of_k(inputs, stride, rows, w, wide, here, target, ahead, pace)
        if halves == 2:
            for offset in range(0, rows * ROW_BYTES, LINE_BYTES):
                other = simd.load_floats(sums + odd + offset)
                simd.store_floats(sums + offset, simd.add(simd.load_floats(sums + offset), other))

    return multiply


_float32_rows = product_by_tiles(((WHOLE,),), TALL_TILE)
_bfloat16_rows = product_by_tiles(TILE.pair_passes, TILE)
_rows_of_pairs = product_by_tiles(((PAIR,),), TALL_TILE)


@variant(block_product)
def _block_product(
    kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
) -> Any:
    if float32_weights(kernels):

        def float32(
            kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
        ) -> None:
            _float32_rows(inputs + row * depth * 4, depth * 4, rows, depth, weights, sums)

        return float32
    if grouped_weights(kernels):

        def groups(
            kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
        ) -> None:
            stride = depth // GROUP * INPUT_BYTES
            grouped_product(inputs + row * stride, stride, rows, depth, weights, sums)

        return groups
    if pair_inputs(kernels):

        def pairs(
            kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
        ) -> None:
            _rows_of_pairs(inputs + row * depth * 2, depth * 2, rows, depth, weights, sums)

        return pairs
    if not uses_tiles(kernels):

        def bfloat16(
            kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
        ) -> None:
            _bfloat16_rows(inputs + row * depth * 4, depth * 4, rows, depth, weights, sums)

        return bfloat16
    if split_inputs(kernels):

        def parts(
            kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any
        ) -> None:
            # The two parts of sixteen rows are two row tiles: their sums lie one after the other, and are added last.
            steps = depth >> 5
            wide = steps * 1024
            for part in range(0, rows, 16):
                a, out = inputs + ((row + part) >> 4) * 2 * wide, sums + part * 128
                if once and part == 0:
                    amx.product_2x2_streaming(a, 64, 2048, 1024, weights, 1024, wide, steps, out, 128, 2048, 64)
                else:
                    amx.product_2x2(a, 64, 2048, 1024, weights, 1024, wide, steps, out, 128, 2048, 64)
                for offset in range(0, min(16, rows - part) * 128, 64):
                    low = simd.load_floats(out + 2048 + offset)
                    simd.store_floats(out + offset, simd.add(simd.load_floats(out + offset), low))

        return parts

    def tiles(kernels: Any, inputs: Any, row: Any, rows: Any, depth: Any, weights: Any, sums: Any, once: Any) -> None:
        steps = depth >> 5
        wide = steps * 1024
        a = inputs + (row >> 4) * wide
        if rows <= 16:
            amx.product_1x2_streaming(a, 64, 1024, wide, weights, 1024, wide, steps, sums, 128, 2048, 64)
        elif once:
            amx.product_2x2_streaming(a, 64, 1024, wide, weights, 1024, wide, steps, sums, 128, 2048, 64)
        else:
            amx.product_2x2(a, 64, 1024, wide, weights, 1024, wide, steps, sums, 128, 2048, 64)

    return tiles
