"""Scores and weighted values of a tile that is alone (a decode): keys and values are read where they lie, once.

A span is read by runs of sixteen keys. The addresses of its runs of keys, then of values, then of the first keys that
the thread reads next, are one list; while a run is read, the one RUNS_AHEAD places later is asked for at the same pace,
so that reading and arithmetic overlap. Called by `attention_rows.py` alone, on scratch memory of one thread.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any, Final

import numpy as np

from decoder.kernels import simd
from decoder.kernels.attention_panels import (
    copy_small_rows,
    fetch_scales,
    note_scales,
    take_noted_scales,
    take_panel,
)
from decoder.kernels.compiled import kernel
from decoder.kernels.frame import (
    AT_KEYS,
    AT_OUTPUT,
    AT_QUERIES,
    AT_RUNS,
    AT_SCORES,
    AT_VALUES,
    BLOCK_TOKENS,
    CONTEXT_LENS,
    HEAD_DIM,
    ROW_BYTES,
    RUN,
    RUNS_AHEAD,
    RUNS_BYTES,
    SPAN,
    VALUE_OFFSET,
)
from decoder.kernels.panels import pack_panel
from decoder.kernels.run_tiles import product_of_panels, product_of_runs
from decoder.kernels.stored_rows import block_address, row_address, stored_bytes

SCORE_ROW: Final = SPAN * 4 + 64  # bytes of a row of scores; the line apart keeps rows in different sets of the cache
_PANEL_KEYS: Final = 64  # keys that are packed, then multiplied: their panels stay in the first-level cache
_SCALES: Final = (2 * SPAN // RUN + RUNS_AHEAD) * 8  # bytes from a run of keys in the list to where its scales lie
_NEXT: Final = RUNS_BYTES - 24  # plane, sequence and token of what is read after the span; the token -1: nothing


@kernel
def expect(frame: Any, scratch: int, plane: int, sequence: int, token: int) -> None:
    """Note that keys of a sequence from `token` on are read after the next span; -1 is nothing."""
    place = scratch + frame[AT_RUNS] + _NEXT
    simd.store_int64(place, plane)
    simd.store_int64(place + 8, sequence)
    simd.store_int64(place + 16, token)


@kernel
def _list_runs(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, begin: int, keys: int
) -> None:
    """Write the list of the runs that hold keys `begin` to `keys` of the span from `start`."""
    place, whole, first = scratch + frame[AT_RUNS], frame[BLOCK_TOKENS] >= RUN, begin & ~15
    runs = (keys - first + 15) >> 4
    for index in range(runs):
        key = first + index * RUN
        block, slot = block_address(frame, sequence, start + key), (start + key) % frame[BLOCK_TOKENS]
        address = block + plane + slot * frame[ROW_BYTES]
        simd.store_int64(place + index * 8, address)
        note_scales(kernels, frame, place + _SCALES + index * 8, block, plane, slot)
        values = address + frame[VALUE_OFFSET]
        if not whole:
            values = scratch + frame[AT_VALUES] + key * frame[ROW_BYTES]
            copy_small_rows(
                frame, plane + frame[VALUE_OFFSET], sequence, start + key, max(0, begin - key), min(RUN, keys - key),
                values,
            )  # fmt: skip
        simd.store_int64(place + (runs + index) * 8, values)
    plane, sequence = simd.load_int64(place + _NEXT), simd.load_int64(place + _NEXT + 8)
    token = simd.load_int64(place + _NEXT + 16)
    end = token
    if token >= 0 and whole:
        end = np.int64(simd.load_int32(frame[CONTEXT_LENS] + sequence * 4))
    address = simd.load_int64(place)
    for index in range(RUNS_AHEAD):
        if token + index * RUN < end:
            address = row_address(frame, plane, sequence, token + index * RUN)
        simd.store_int64(place + (2 * runs + index) * 8, address)
    fetch_scales(kernels, frame, plane, sequence, token, min(end, token + SPAN))


@kernel
def scores_in_place(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, begin: int, keys: int, rows: int
) -> None:
    """Query-key products of the only tile, a few panels at a time."""
    head_dim, stored = frame[HEAD_DIM], stored_bytes(kernels)
    panel, first = head_dim * 16 * stored, begin & ~15
    _list_runs(kernels, frame, scratch, plane, sequence, start, begin, keys)
    place = scratch + frame[AT_RUNS]
    for group in range(first, keys, _PANEL_KEYS):
        last = min(group + _PANEL_KEYS, keys)
        ahead = place + RUNS_AHEAD * 8
        for key in range(group, last, 16):
            target = scratch + frame[AT_KEYS] + ((key - group) >> 4) * panel
            if frame[BLOCK_TOKENS] >= RUN:
                take_noted_scales(kernels, frame, scratch, key, place + _SCALES)
                pack_panel(kernels, simd.load_int64(place), frame[ROW_BYTES], head_dim, target)
            else:
                take_panel(kernels, frame, scratch, plane, sequence, start, key, start + begin, 0, target)
            place += 8
        product_of_panels(
            kernels, scratch + frame[AT_QUERIES], head_dim * 4, rows, scratch + frame[AT_KEYS], panel,
            (last - group + 15) >> 4, head_dim, ahead, scratch + frame[AT_SCORES] + group * 4, SCORE_ROW,
        )  # fmt: skip


@kernel
def values_in_place(kernels: Any, frame: Any, scratch: int, begin: int, keys: int, rows: int) -> None:
    """Weighted values of the only tile, whose runs `scores_in_place` has listed."""
    head_dim, first = frame[HEAD_DIM], begin & ~15
    runs = (keys - first + 15) >> 4
    place = scratch + frame[AT_RUNS] + (runs - (first >> 4)) * 8
    product_of_runs(
        kernels, scratch + frame[AT_SCORES], SCORE_ROW, rows, place, frame[ROW_BYTES], head_dim >> 4, begin, keys,
        RUNS_AHEAD * 8, scratch + frame[AT_OUTPUT], head_dim * 4,
    )  # fmt: skip
