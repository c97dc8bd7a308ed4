"""One model step as one compiled function: every thread of the team runs it, with barriers between phases.

Reads the step frame (`frame.py`) and nothing else; writes it only where layers lie in groups (`_enter_region`).
Counters: one task counter per layer and product or attention phase, zeroed by the caller before the step.
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
    EXPERTS,
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

COUNTERS_PER_LAYER: Final = 8


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
def _add_branch(frame: Any, norm: int, first: int, last: int) -> None:
    """Add the norm of this thread's rows of a branch to the residual."""
    hidden, epsilon = frame[HIDDEN], simd.load_float(frame[EPSILON])
    for row in range(first, last):
        offset = row * hidden * 4
        add_normalized(frame[BRANCH] + offset, norm, hidden, frame[WIDTH], epsilon, frame[RESIDUAL] + offset)


@kernel
def _enter_region(frame: Any, layer: int) -> None:
    """Make the arena's words of the frame those of the group that the layer lies in.

    By one thread, between the barrier after the attention of the layer before and the one before this layer's keys and
    values are written: nobody reads the words meanwhile.
    """
    region = frame[REGIONS] + layer * REGION_WORDS * 8
    frame[ARENA] = simd.load_int64(region + REGION_ARENA * 8)
    frame[TABLES] = simd.load_int64(region + REGION_TABLES * 8)
    frame[BLOCK_BYTES] = simd.load_int64(region + REGION_BLOCK_BYTES * 8)
    frame[SCALES] = simd.load_int64(region + REGION_SCALES * 8)


@kernel
def _layer(kernels: Any, frame: Any, rank: int, layer: int, first: int, last: int) -> None:
    tokens, hidden, inner = frame[TOKENS], frame[HIDDEN], frame[INNER]
    weights = frame[LAYERS] + layer * LAYER_WORDS * 8
    epsilon = simd.load_float(frame[EPSILON])
    counter = layer * COUNTERS_PER_LAYER
    control, size, width = frame[CONTROL], frame[SIZE], frame[WIDTH]
    # What follows a branch of the layer: the product adds it to the residual, or a norm comes between.
    after = frame[POST_NORMS]
    branch = frame[BRANCH] if after else frame[RESIDUAL]
    ending = STORE if after else ADD

    if rank == 0 and frame[REGIONS]:
        _enter_region(frame, layer)
    norm = simd.load_int64(weights + LAYER_NORM * 8)
    for row in range(first, last):
        normalize(kernels, frame[RESIDUAL] + row * hidden * 4, norm, hidden, width, epsilon, frame[NORMED], row)
    sync.barrier(control, size)
    product(
        kernels, frame, entry_of(layer, ADAPT_QKV), counter, rank, STORE, frame[NORMED], tokens, hidden,
        simd.load_int64(weights + LAYER_QKV * 8), simd.load_int64(weights + LAYER_QKV_BIAS * 8), frame[QKV_COLUMNS],
        frame[QKV], frame[QKV_COLUMNS],
    )  # fmt: skip
    for row in range(first, last):
        rotate_and_write(kernels, frame, layer, row)
    sync.barrier(control, size)
    scratch = frame[SCRATCH] + rank * frame[SCRATCH_BYTES]
    attention(kernels, frame, layer, frame[COUNTERS] + (counter + 1) * COUNTER_BYTES, scratch)
    sync.barrier(control, size)
    if frame[NUM_PARTIALS]:
        combine(kernels, frame, layer, rank, size, scratch)
        sync.barrier(control, size)
    product(
        kernels, frame, entry_of(layer, ADAPT_MIX), counter + 2, rank, ending, frame[MIXED], tokens,
        frame[MIXED_COLUMNS], simd.load_int64(weights + LAYER_MIX * 8), simd.load_int64(weights + LAYER_MIX_BIAS * 8),
        hidden, branch, hidden,
    )  # fmt: skip
    if after:
        _add_branch(frame, simd.load_int64(weights + LAYER_POST_MIX_NORM * 8), first, last)
    norm = simd.load_int64(weights + LAYER_POST_NORM * 8)
    for row in range(first, last):
        normalize(kernels, frame[RESIDUAL] + row * hidden * 4, norm, hidden, width, epsilon, frame[NORMED], row)
    sync.barrier(control, size)
    if simd.load_int64(weights + LAYER_ROUTER * 8):
        mix_experts(kernels, frame, weights, counter + 3, rank, first, last)
        return
    product(
        kernels, frame, entry_of(layer, ADAPT_GATE_UP), counter + 3, rank, frame[GATE_ENDING], frame[NORMED], tokens,
        hidden, simd.load_int64(weights + LAYER_GATE_UP * 8), simd.load_int64(weights + LAYER_GATE_UP_BIAS * 8),
        2 * inner, frame[GATED], inner,
    )  # fmt: skip
    product(
        kernels, frame, entry_of(layer, ADAPT_DOWN), counter + 4, rank, ending, frame[GATED], tokens, inner,
        simd.load_int64(weights + LAYER_DOWN * 8), simd.load_int64(weights + LAYER_DOWN_BIAS * 8), hidden, branch,
        hidden,
    )  # fmt: skip
    if after:
        _add_branch(frame, simd.load_int64(weights + LAYER_POST_MLP_NORM * 8), first, last)


@kernel
def _step(kernels: Any, frame: Any, rank: int) -> None:
    tokens, hidden, size = frame[TOKENS], frame[HIDDEN], frame[SIZE]
    first, last = tokens * rank // size, tokens * (rank + 1) // size
    enter(kernels, frame)
    for row in range(first, last):
        token = np.int64(simd.load_int32(frame[TOKEN_IDS] + row * 4))
        embed(kernels, frame, frame[EMBEDDING], token, hidden, frame[RESIDUAL] + row * hidden * 4)
    for layer in range(frame[NUM_LAYERS]):
        _layer(kernels, frame, rank, layer, first, last)
    if frame[POST_NORMS] or frame[EXPERTS]:
        # Each thread has added to its own rows; now it reads others'.
        sync.barrier(frame[CONTROL], size)
    wanted = frame[NUM_LOGITS]
    epsilon = simd.load_float(frame[EPSILON])
    for index in range(wanted * rank // size, wanted * (rank + 1) // size):
        row = np.int64(simd.load_int32(frame[LOGIT_ROWS] + index * 4))
        source = frame[RESIDUAL] + row * hidden * 4
        normalize(kernels, source, frame[FINAL_NORM], hidden, frame[WIDTH], epsilon, frame[NORMED], index)
    sync.barrier(frame[CONTROL], size)
    product(
        kernels, frame, NO_ADAPTER, frame[NUM_LAYERS] * COUNTERS_PER_LAYER, rank, frame[HEAD_ENDING], frame[NORMED],
        wanted, hidden, frame[HEAD], 0, frame[VOCAB_COLUMNS], frame[LOGITS], frame[VOCAB_COLUMNS],
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
    if rank == 0:
        sync.next_generation(frame[CONTROL])
        _step(kernels, frame, rank)
        return
    seen = 0
    while True:
        seen = sync.await_generation(frame[CONTROL], seen)
        if seen < 0:
            return
        _step(kernels, frame, rank)


# Numba's cache looks at this file alone; the name makes it see a change of any kernel module.
_run.__qualname__ = f"run_{source_fingerprint()}"
entry_of_set = cached_entries(_run)


def compile_for(kernels: Any) -> Any:
    """Compile (or load from numba's cache) the step for one kernel set; gives what runs it: (kernels, frame, rank)."""
    run = entry_of_set(kernels)
    compile_once(run, (numba.typeof(kernels), types.int64[::1], types.int64))
    return run
