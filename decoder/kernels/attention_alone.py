"""Scores and weighted values of a tile that is alone (a decode): keys and values are read where they lie, once.

A span is read by runs of sixteen keys. The addresses of its runs of keys, then of values, then of the first keys that
the thread reads next, are one list; while a run is read, the one some places later is asked for at the same pace, so
that reading and arithmetic overlap. Where registers are few, keys are packed a tile at a time, so that asking hardly
pauses, and fewer large runs are asked for ahead, so that they fit the first-level cache. Called by `attention_rows.py`
alone, on scratch memory of one thread.
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
    take_scales,
)
from decoder.kernels.compiled import kernel
from decoder.kernels.frame import (
    AT_KEYS,
    AT_OUTPUT,
    AT_QUERIES,
    AT_ROWS,
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
from decoder.kernels.half_panels import pack_keys, panel_bytes
from decoder.kernels.register_tiles import rows_at_once, vectors_at_once
from decoder.kernels.registers import VECTORS
from decoder.kernels.run_tiles import product_of_panels, product_of_runs
from decoder.kernels.stored_rows import entry_address, row_address, stored_bytes, table_entry

SCORE_ROW: Final = SPAN * 4 + 64  # bytes of a row of scores; the line apart keeps rows in different sets of the cache
_PANEL_KEYS: Final = 64  # keys that are packed, then multiplied: their panels stay in the first-level cache
_ASKED: Final = 1024  # bytes of values that are asked for beside the softmax of a row
_ASKING: Final = 4  # rows that ask for any
_LARGE_RUN: Final = 4096  # bytes of a run of which few are asked for ahead where registers are few
_FEW_AHEAD: Final = 2
FEWER_AHEAD: Final = 4  # runs asked for before they are used, of other sizes
SCALES_LISTED: Final = (2 * SPAN // RUN + RUNS_AHEAD) * 8  # bytes from a run of keys in the list to its scales' address
_NEXT: Final = RUNS_BYTES - 24  # plane, sequence and token of what is read after the span; the token -1: nothing


@kernel
def expect(frame: Any, scratch: int, plane: int, sequence: int, token: int) -> None:
    """Note that keys of a sequence from `token` on are read after the next span; -1 is nothing."""
    place = scratch + frame[AT_RUNS] + _NEXT
    simd.store_int64(place, plane)
    simd.store_int64(place + 8, sequence)
    simd.store_int64(place + 16, token)


@kernel
def list_runs(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, begin: int, keys: int
) -> None:
    """Write the list of the runs that hold keys `begin` to `keys` of the span from `start`."""
    place, whole, first = scratch + frame[AT_RUNS], frame[BLOCK_TOKENS] >= RUN, begin & ~15
    runs, tokens = (keys - first + 15) >> 4, frame[BLOCK_TOKENS]
    entry, slot = table_entry(frame, sequence, start + first), (start + first) % tokens
    further = 4 if whole else RUN // tokens * 4
    for index in range(runs):
        key, block = first + index * RUN, entry_address(frame, entry)
        address = block + plane + slot * frame[ROW_BYTES]
        simd.store_int64(place + index * 8, address)
        note_scales(kernels, frame, place + SCALES_LISTED + index * 8, block, plane, slot)
        values = address + frame[VALUE_OFFSET]
        if not whole:
            values = scratch + frame[AT_VALUES] + key * frame[ROW_BYTES]
            copy_small_rows(
                frame, plane + frame[VALUE_OFFSET], sequence, start + key, max(0, begin - key), min(RUN, keys - key),
                values,
            )  # fmt: skip
        simd.store_int64(place + (runs + index) * 8, values)
        slot += RUN
        if slot >= tokens:
            entry, slot = entry + further, 0
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
def _keys_together(rows: int) -> int:
    """Keys that are packed, then multiplied: one tile's where registers are few, so that reading hardly pauses."""
    if VECTORS >= 32:
        return _PANEL_KEYS
    return vectors_at_once(rows_at_once(rows), _PANEL_KEYS >> 4) * 16


@kernel
def _distance(kernels: Any, frame: Any, rows: int) -> int:
    """Bytes in the list of runs from the one that is read to the one that is asked for."""
    large = stored_bytes(kernels) > 1 and RUN * frame[ROW_BYTES] >= _LARGE_RUN
    # A single row takes four panels at once, and asks for as many.
    if VECTORS < 32 and large and rows > 1:
        return _FEW_AHEAD * 8
    return FEWER_AHEAD * 8


@kernel
def scores_in_place(
    kernels: Any, frame: Any, scratch: int, plane: int, sequence: int, start: int, begin: int, keys: int, rows: int
) -> None:
    """Query-key products of the only tile, a few panels at a time."""
    head_dim = frame[HEAD_DIM]
    panel, first = panel_bytes(kernels, head_dim), begin & ~15
    list_runs(kernels, frame, scratch, plane, sequence, start, begin, keys)
    place = scratch + frame[AT_RUNS]
    distance, together = _distance(kernels, frame, rows), _keys_together(rows)
    for group in range(first, keys, together):
        last = min(group + together, keys)
        ahead = place + distance
        for key in range(group, last, 16):
            target = scratch + frame[AT_KEYS] + ((key - group) >> 4) * panel
            rows_at = simd.load_int64(place)
            if frame[BLOCK_TOKENS] >= RUN:
                take_noted_scales(kernels, frame, scratch, key, place + SCALES_LISTED)
            else:
                take_scales(kernels, frame, scratch, plane, sequence, start, key)
                rows_at = scratch + frame[AT_ROWS]
                copy_small_rows(
                    frame, plane, sequence, start + key, max(0, begin - key), min(16, keys - key), rows_at
                )  # fmt: skip
            pack_keys(kernels, rows_at, frame[ROW_BYTES], head_dim, target)
            place += 8
        product_of_panels(
            kernels, scratch + frame[AT_QUERIES], head_dim * 4, rows, scratch + frame[AT_KEYS], panel,
            (last - group + 15) >> 4, head_dim, ahead, scratch + frame[AT_SCORES] + group * 4, SCORE_ROW,
        )  # fmt: skip


@kernel
def ask_ahead(kernels: Any, frame: Any, scratch: int, begin: int, keys: int, rows: int, row: int) -> None:
    """Ask for the `row`-th part of the values, while weights are computed: memory has nothing else to do then."""
    run_bytes, offset = RUN * frame[ROW_BYTES], row * _ASKED
    if VECTORS >= 32 or row >= _ASKING:
        return
    first = begin & ~15
    place = scratch + frame[AT_RUNS] + ((keys - first + 15) >> 4) * 8 + _distance(kernels, frame, rows)
    address = simd.load_int64(place + offset // run_bytes * 8) + offset % run_bytes
    for line in range(0, min(_ASKED, run_bytes), 64):
        simd.prefetch(address + line)


@kernel
def values_in_place(kernels: Any, frame: Any, scratch: int, begin: int, keys: int, rows: int) -> None:
    """Weighted values of the only tile, whose runs `scores_in_place` has listed."""
    head_dim, first = frame[HEAD_DIM], begin & ~15
    runs = (keys - first + 15) >> 4
    place = scratch + frame[AT_RUNS] + (runs - (first >> 4)) * 8
    product_of_runs(
        kernels, scratch + frame[AT_SCORES], SCORE_ROW, rows, place, frame[ROW_BYTES], head_dim >> 4, begin, keys,
        _distance(kernels, frame, rows), scratch + frame[AT_OUTPUT], head_dim * 4,
    )  # fmt: skip
