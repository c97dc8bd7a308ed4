"""The product of some rows with one pair of column blocks of weights in groups.

Up to two tiles of rows make float32 of the numbers in registers; more rows read them from a panel, which is made once
for all of them: of some groups at a time, or beforehand of the whole pair where several blocks of rows follow. A row's
bits are the same either way. Called by `block_products.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import simd
from decoder.kernels.compiled import kernel, made_kernel
from decoder.kernels.frame import SUM_BYTES
from decoder.kernels.grouped_inputs import GROUP, INPUT_BYTES
from decoder.kernels.grouped_tiles import PANEL_GROUP_BYTES, make_panel, rows_of_panel, rows_of_words
from decoder.kernels.grouped_weights import FORM_BITS, INT8, UINT4, GroupedForm
from decoder.kernels.row_tiles import LINE_BYTES, ROW_BYTES, TALL_TILE

_WORD_ROWS: Final = 6  # of a tile that reads words
_RUN_GROUPS: Final = 4  # whose panel stays in the first-level cache while all rows pass
_PANEL_TAG: Final = 3  # in place of a form: the pair lies in a panel
_MOST, _BLOCKS = TALL_TILE.rows, TALL_TILE.blocks
_panel_rows = rows_of_panel(_MOST, _BLOCKS)


@kernel
def _by_panel(a: int, stride: int, rows: int, panel: int, wide: int, groups: int, sums: int) -> None:
    """All rows by some groups of a panel with column blocks `wide` bytes apart, in tiles of nearly equal sizes."""
    row = 0
    for left in range((rows + _MOST - 1) // _MOST, 0, -1):
        size = (rows - row + left - 1) // left
        start, target = a + row * stride, sums + row * ROW_BYTES
        _panel_rows(size, start, stride, panel, wide, groups, target)
        row += size


def _product(form: GroupedForm) -> Any:
    by_words, unpack, record = rows_of_words(form, _WORD_ROWS), make_panel(form), form.record_bytes

    @made_kernel(form.name)
    def multiply(a: int, stride: int, rows: int, depth: int, weights: int, sums: int) -> None:
        groups, panel = depth // GROUP, sums + SUM_BYTES
        if rows <= 2 * _WORD_ROWS:
            first = rows if rows <= _WORD_ROWS else (rows + 1) >> 1
            by_words(first, a, stride, weights, groups, sums)
            if first < rows:
                by_words(rows - first, a + first * stride, stride, weights, groups, sums + first * ROW_BYTES)
            return
        for block in range(0, 2, _BLOCKS):
            for start in range(0, groups, _RUN_GROUPS):
                here = min(_RUN_GROUPS, groups - start)
                for each in range(_BLOCKS):
                    unpack(block + each, weights + start * record, here, panel + each * here * PANEL_GROUP_BYTES)
                _by_panel(
                    a + start * INPUT_BYTES, stride, rows, panel, here * PANEL_GROUP_BYTES, here,
                    sums + block * LINE_BYTES,
                )  # fmt: skip

    @made_kernel(form.name)
    def unpack_pair(weights: int, groups: int, panel: int) -> None:
        for block in range(2):
            unpack(block, weights, groups, panel + block * groups * PANEL_GROUP_BYTES)

    return multiply, unpack_pair


(_int8_rows, _int8_pair), (_uint4_rows, _uint4_pair) = _product(INT8), _product(UINT4)
_INT8_TAG: Final = INT8.tag


@kernel
def _panel_pair(a: int, stride: int, rows: int, depth: int, panel: int, sums: int) -> None:
    groups = depth // GROUP
    wide = groups * PANEL_GROUP_BYTES
    for block in range(0, 2, _BLOCKS):
        for start in range(0, groups, _RUN_GROUPS):
            here = min(_RUN_GROUPS, groups - start)
            run, target = panel + block * wide + start * PANEL_GROUP_BYTES, sums + block * LINE_BYTES
            _by_panel(a + start * INPUT_BYTES, stride, rows, run, wide, here, target)


@kernel
def panel_of_pair(weights: int, depth: int, panel: int) -> int:
    """Make a panel, PANEL_GROUP_BYTES for each group and column block, of the pair at a tagged address.

    Returns the address that `grouped_product` takes in place of the pair's. A panel begins at a cache line.
    """
    if weights & FORM_BITS == _INT8_TAG:
        _int8_pair(weights & ~FORM_BITS, depth // GROUP, panel)
    else:
        _uint4_pair(weights & ~FORM_BITS, depth // GROUP, panel)
    return panel | _PANEL_TAG


@kernel
def grouped_product(a: int, stride: int, rows: int, depth: int, weights: int, sums: int) -> None:
    """`rows` rows [depth] of inputs in groups at `a`, `stride` bytes apart, by the column blocks at a tagged address.

    sums: float32 [rows, 32], with room for `panel_bytes` behind SUM_BYTES
    """
    for offset in range(0, rows * ROW_BYTES, LINE_BYTES):
        simd.store_floats(sums + offset, simd.splat(np.float32(0.0)))
    form, plain = weights & FORM_BITS, weights & ~FORM_BITS
    if form == _PANEL_TAG:
        _panel_pair(a, stride, rows, depth, plain, sums)
    elif form == _INT8_TAG:
        _int8_rows(a, stride, rows, depth, plain, sums)
    else:
        _uint4_rows(a, stride, rows, depth, plain, sums)


def panel_bytes(depth: int) -> int:
    """Room for the panel of a pair of `depth` inputs, and for one of some groups of it."""
    return 2 * max(depth // GROUP, _RUN_GROUPS) * PANEL_GROUP_BYTES
