"""One model step as one compiled function: every thread of the team runs it, phase after phase (`sync.py`).

Reads the step frame (`frame.py`) and nothing else; writes it only where layers lie in groups (`_enter_region`).
Counters: a line for each phase of each layer and of the end, zeroed by the caller before the step.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call"

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import numba
import numpy as np
from numba import types

from decoder.kernels import amx, simd, sync
from decoder.kernels.adapters import entry_of
from decoder.kernels.attention import attention, combine
from decoder.kernels.compiled import cached_entries, compile_once, kernel, variant
from decoder.kernels.experts import mix_experts
from decoder.kernels.frame import (
    ADAPT_DOWN,
    ADAPT_GATE_UP,
    ADAPT_MIX,
    ADAPT_QKV,
    ARENA,
    BLOCK_BYTES,
    BRANCH,
    CONTROL,
    COUNTER_BYTES,
    COUNTERS,
    EMBEDDING,
    EPSILON,
    FINAL_NORM,
    GATE_ENDING,
    GATED,
    HEAD,
    HEAD_ENDING,
    HIDDEN,
    INNER,
    LAYER_DOWN,
    LAYER_DOWN_BIAS,
    LAYER_GATE_UP,
    LAYER_GATE_UP_BIAS,
    LAYER_MIX,
    LAYER_MIX_BIAS,
    LAYER_NORM,
    LAYER_POST_MIX_NORM,
    LAYER_POST_MLP_NORM,
    LAYER_POST_NORM,
    LAYER_QKV,
    LAYER_QKV_BIAS,
    LAYER_ROUTER,
    LAYER_WORDS,
    LAYERS,
    LOGIT_ROWS,
    LOGITS,
    MIXED,
    MIXED_COLUMNS,
    NO_ADAPTER,
    NORMED,
    NUM_LAYERS,
    NUM_LOGITS,
    NUM_PARTIALS,
    POST_NORMS,
    QKV,
    QKV_COLUMNS,
    REGION_ARENA,
    REGION_BLOCK_BYTES,
    REGION_SCALES,
    REGION_TABLES,
    REGION_WORDS,
    REGIONS,
    RESIDUAL,
    SCALES,
    SCRATCH,
    SCRATCH_BYTES,
    SIZE,
    TABLES,
    TILE_CONFIG,
    TOKEN_IDS,
    TOKENS,
    VOCAB_COLUMNS,
    WIDTH,
)
from decoder.kernels.linear import ADD, STORE, product
from decoder.kernels.rows import add_normalized, embed, normalize, rotate_and_write
from decoder.kernels.sets import uses_tiles

# The counters of a layer's phases; those of its experts follow the last.
(_ROWS, _QKV, _KEYS, _ATTENTION, _COMBINE, _MIX, _POST_ROWS, _GATE_UP, _DOWN) = range(9)
COUNTERS_PER_LAYER: Final = _GATE_UP + 5
_LAST_ROWS, _LOGIT_ROWS, _HEAD, LAST_COUNTERS = range(4)  # and of what comes after the layers


def enter(kernels: Any, frame: Any) -> None:
    """Prepare the calling thread."""
    raise NotImplementedError("compiled code only")


@variant(enter)
def _enter(kernels: Any, frame: Any) -> Any:
    if uses_tiles(kernels):
        return lambda kernels, frame: amx.configure(frame[TILE_CONFIG])
    return lambda kernels, frame: None


def leave(kernels: Any) -> None:
    """Undo `enter`."""
    raise NotImplementedError("compiled code only")


@variant(leave)
def _leave(kernels: Any) -> Any:
    if uses_tiles(kernels):
        return lambda kernels: amx.release()
    return lambda kernels: None


@kernel
def _add_branch(frame: Any, norm: int, row: int) -> None:
    """Add the norm of a row of a branch to the residual."""
    hidden, epsilon = frame[HIDDEN], simd.load_float(frame[EPSILON])
    offset = row * hidden * 4
    add_normalized(frame[BRANCH] + offset, norm, hidden, frame[WIDTH], epsilon, frame[RESIDUAL] + offset)


@kernel
def _branch_norm(frame: Any, layer: int) -> int:
    """The norm between a layer's last branch and the residual, as long as it was not added; 0 where none is."""
    weights = frame[LAYERS] + layer * LAYER_WORDS * 8
    if frame[POST_NORMS] == 0 or simd.load_int64(weights + LAYER_ROUTER * 8) != 0:
        return 0
    norm: int = simd.load_int64(weights + LAYER_POST_MLP_NORM * 8)
    return norm


@kernel
def _enter_region(frame: Any, layer: int) -> None:
    """Make the arena's words of the frame those of the group that the layer lies in.

    By one thread, after the attention of the layer before and before this layer's keys and values are written: nobody
    follows the words meanwhile.
    """
    region = frame[REGIONS] + layer * REGION_WORDS * 8
    frame[ARENA] = simd.load_int64(region + REGION_ARENA * 8)
    frame[TABLES] = simd.load_int64(region + REGION_TABLES * 8)
    frame[BLOCK_BYTES] = simd.load_int64(region + REGION_BLOCK_BYTES * 8)
    frame[SCALES] = simd.load_int64(region + REGION_SCALES * 8)


@kernel
def _begin_rows(kernels: Any, frame: Any, rank: int, layer: int, counter: int) -> None:
    """A phase: each row's embedding or what the layer before left to add, and its norm as input of the layer."""
    tokens, hidden, epsilon = frame[TOKENS], frame[HIDDEN], simd.load_float(frame[EPSILON])
    norm = simd.load_int64(frame[LAYERS] + (layer * LAYER_WORDS + LAYER_NORM) * 8)
    before = _branch_norm(frame, layer - 1) if layer > 0 else 0
    mine = 0
    while True:
        begin, end = sync.take_tasks(counter, tokens, frame[SIZE], rank)
        if begin == end:
            break
        mine += end - begin
        if begin == 0 and frame[REGIONS]:
            _enter_region(frame, layer)
        for row in range(begin, end):
            residual = frame[RESIDUAL] + row * hidden * 4
            if layer == 0:
                token = np.int64(simd.load_int32(frame[TOKEN_IDS] + row * 4))
                embed(kernels, frame, frame[EMBEDDING], token, hidden, residual)
            elif before:
                _add_branch(frame, before, row)
            normalize(kernels, residual, norm, hidden, frame[WIDTH], epsilon, frame[NORMED], row)
    sync.end_phase(frame[CONTROL], counter, mine, tokens)


@kernel
def _write_keys(kernels: Any, frame: Any, rank: int, layer: int, counter: int) -> None:
    """A phase: each row's keys and values into its block, and its queries into their planes."""
    tokens = frame[TOKENS]
    mine = 0
    while True:
        begin, end = sync.take_tasks(counter, tokens, frame[SIZE], rank)
        if begin == end:
            break
        mine += end - begin
        for row in range(begin, end):
            rotate_and_write(kernels, frame, layer, row)
    sync.end_phase(frame[CONTROL], counter, mine, tokens)


@kernel
def _go_on_rows(kernels: Any, frame: Any, rank: int, branch_norm: int, norm: int, counter: int) -> None:
    """A phase: what attention left to add to each row (where `branch_norm` is not 0), and, where `norm` is not 0, the
    row's norm as input of what follows."""
    tokens, hidden, epsilon = frame[TOKENS], frame[HIDDEN], simd.load_float(frame[EPSILON])
    mine = 0
    while True:
        begin, end = sync.take_tasks(counter, tokens, frame[SIZE], rank)
        if begin == end:
            break
        mine += end - begin
        for row in range(begin, end):
            if branch_norm:
                _add_branch(frame, branch_norm, row)
            if norm:
                residual = frame[RESIDUAL] + row * hidden * 4
                normalize(kernels, residual, norm, hidden, frame[WIDTH], epsilon, frame[NORMED], row)
    sync.end_phase(frame[CONTROL], counter, mine, tokens)


@kernel
def _logit_rows(kernels: Any, frame: Any, rank: int, counter: int) -> None:
    """A phase: the final norm of the rows whose logits are wanted."""
    wanted, hidden, epsilon = frame[NUM_LOGITS], frame[HIDDEN], simd.load_float(frame[EPSILON])
    mine = 0
    while True:
        begin, end = sync.take_tasks(counter, wanted, frame[SIZE], rank)
        if begin == end:
            break
        mine += end - begin
        for index in range(begin, end):
            row = np.int64(simd.load_int32(frame[LOGIT_ROWS] + index * 4))
            source = frame[RESIDUAL] + row * hidden * 4
            normalize(kernels, source, frame[FINAL_NORM], hidden, frame[WIDTH], epsilon, frame[NORMED], index)
    sync.end_phase(frame[CONTROL], counter, mine, wanted)


@kernel
def _layer(kernels: Any, frame: Any, rank: int, layer: int) -> None:
    tokens, hidden, inner = frame[TOKENS], frame[HIDDEN], frame[INNER]
    weights = frame[LAYERS] + layer * LAYER_WORDS * 8
    counter = layer * COUNTERS_PER_LAYER
    counters = frame[COUNTERS] + counter * COUNTER_BYTES
    # What follows a branch of the layer: the product adds it to the residual, or a norm comes between.
    after = frame[POST_NORMS]
    branch = frame[BRANCH] if after else frame[RESIDUAL]
    ending = STORE if after else ADD

    _begin_rows(kernels, frame, rank, layer, counters + _ROWS * COUNTER_BYTES)
    product(
        kernels, frame, entry_of(layer, ADAPT_QKV), counter + _QKV, rank, STORE, frame[NORMED], tokens, hidden,
        simd.load_int64(weights + LAYER_QKV * 8), simd.load_int64(weights + LAYER_QKV_BIAS * 8), frame[QKV_COLUMNS],
        frame[QKV], frame[QKV_COLUMNS],
    )  # fmt: skip
    _write_keys(kernels, frame, rank, layer, counters + _KEYS * COUNTER_BYTES)
    scratch = frame[SCRATCH] + rank * frame[SCRATCH_BYTES]
    attention(kernels, frame, layer, counters + _ATTENTION * COUNTER_BYTES, scratch)
    if frame[NUM_PARTIALS]:
        combine(kernels, frame, layer, rank, counters + _COMBINE * COUNTER_BYTES, scratch)
    product(
        kernels, frame, entry_of(layer, ADAPT_MIX), counter + _MIX, rank, ending, frame[MIXED], tokens,
        frame[MIXED_COLUMNS], simd.load_int64(weights + LAYER_MIX * 8), simd.load_int64(weights + LAYER_MIX_BIAS * 8),
        hidden, branch, hidden,
    )  # fmt: skip
    branch_norm = simd.load_int64(weights + LAYER_POST_MIX_NORM * 8) if after else 0
    norm = simd.load_int64(weights + LAYER_POST_NORM * 8)
    _go_on_rows(kernels, frame, rank, branch_norm, norm, counters + _POST_ROWS * COUNTER_BYTES)
    if simd.load_int64(weights + LAYER_ROUTER * 8):
        first, last = tokens * rank // frame[SIZE], tokens * (rank + 1) // frame[SIZE]
        mix_experts(kernels, frame, weights, counter + _GATE_UP, rank, first, last)
        return
    product(
        kernels, frame, entry_of(layer, ADAPT_GATE_UP), counter + _GATE_UP, rank, frame[GATE_ENDING], frame[NORMED],
        tokens, hidden, simd.load_int64(weights + LAYER_GATE_UP * 8),
        simd.load_int64(weights + LAYER_GATE_UP_BIAS * 8), 2 * inner, frame[GATED], inner,
    )  # fmt: skip
    product(
        kernels, frame, entry_of(layer, ADAPT_DOWN), counter + _DOWN, rank, ending, frame[GATED], tokens, inner,
        simd.load_int64(weights + LAYER_DOWN * 8), simd.load_int64(weights + LAYER_DOWN_BIAS * 8), hidden, branch,
        hidden,
    )  # fmt: skip


@kernel
def _step(kernels: Any, frame: Any, rank: int) -> None:
    enter(kernels, frame)
    layers = frame[NUM_LAYERS]
    for layer in range(layers):
        _layer(kernels, frame, rank, layer)
    counter = layers * COUNTERS_PER_LAYER
    counters = frame[COUNTERS] + counter * COUNTER_BYTES
    branch_norm = _branch_norm(frame, layers - 1)
    if branch_norm:
        _go_on_rows(kernels, frame, rank, branch_norm, 0, counters + _LAST_ROWS * COUNTER_BYTES)
    _logit_rows(kernels, frame, rank, counters + _LOGIT_ROWS * COUNTER_BYTES)
    product(
        kernels, frame, NO_ADAPTER, counter + _HEAD, rank, frame[HEAD_ENDING], frame[NORMED], frame[NUM_LOGITS],
        frame[HIDDEN], frame[HEAD], 0, frame[VOCAB_COLUMNS], frame[LOGITS], frame[VOCAB_COLUMNS],
    )  # fmt: skip
    leave(kernels)


def source_fingerprint() -> str:
    """Changes with every kernel module, and so with what a cached entry would have compiled in."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _run(kernels: Any, frame: Any, rank: int) -> None:
    """Rank 0 runs one step and returns; other ranks serve steps until the team closes."""
    control = frame[CONTROL]
    if rank == 0:
        sync.open_step(control)
        _step(kernels, frame, rank)
        sync.close_step(control)
        return
    seen = 0
    while True:
        seen = sync.await_generation(control, seen)
        if seen < 0:
            return
        if sync.enter_step(control, seen):
            _step(kernels, frame, rank)
            sync.leave_step(control)


# Numba's cache looks at this file alone; the name makes it see a change of any kernel module.
_run.__qualname__ = f"run_{source_fingerprint()}"
entry_of_set = cached_entries(_run)


def compile_for(kernels: Any) -> Any:
    """Compile (or load from numba's cache) the step for one kernel set; gives what runs it: (kernels, frame, rank)."""
    run = entry_of_set(kernels)
    compile_once(run, (numba.typeof(kernels), types.int64[::1], types.int64))
    return run
