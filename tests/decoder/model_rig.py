"""Helpers of the model tests: random models in memory, poisoned arenas and batches of prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.layout import KvDtype, KvLayout
from decoder.batch import StepBatch
from decoder.grouped_arena import GroupedArena, parts_of, private_arena
from decoder.kernels import blocks
from decoder.models.config import ModelConfig, digest_config
from decoder.models.llama import CausalLM
from decoder.models.matrices import GroupedMatrices
from decoder.models.packing import to_bfloat16
from decoder.models.rope import RopeConfig
from decoder.weights.loader import expected_shapes

# float32 throughout; bfloat16 without and with what the CPU has; bfloat16 weights beside other keys and values.
KERNELS = (
    "float32", "portable", "auto", "portable-kv-float32", "auto-kv-float32", "auto-kv-float16", "portable-kv-int8",
    "auto-kv-int8", "auto-kv-fp8_e4m3",
)  # fmt: skip
IntArray = NDArray[np.int32]


def make_config(
    *, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, hidden: int = 64, layers: int = 2, vocab: int = 260
) -> ModelConfig:
    """A small Llama configuration."""
    return ModelConfig(
        "llama", vocab, layers, heads, kv_heads, head_dim, hidden, 2 * hidden, 1e-5, RopeConfig(10000.0, head_dim),
        4096, (2,), 1, False,
    )  # fmt: skip


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights, rounded to bfloat16 so that both dtypes compute the same function."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = random.standard_normal(shape) / (np.sqrt(shape[1]) if len(shape) == 2 else 10.0)
        if len(shape) == 1:
            values = values + 1.0
        elif "q_proj" in name or "k_proj" in name:
            values = values * 2.0
        rounded = to_bfloat16(values.astype(np.float32)).astype(np.uint32) << 16
        tensors[name] = rounded.view(np.float32)
    return tensors


def make_model(
    config: ModelConfig,
    tensors: dict[str, NDArray[np.float32]],
    kernels: str,
    *,
    block_tokens: int = 16,
    threads: int = 2,
) -> CausalLM:
    """A model with one of `KERNELS`."""
    groups = GroupedMatrices(tensors.__getitem__) if kernels.startswith("int8") else None
    dtype = KvDtype.FLOAT32 if kernels in ("float32", "int8") else KvDtype.BFLOAT16
    kv_dtype = kernels.partition("-kv-")[2] or dtype.value
    layout = KvLayout.of(config.num_layers, config.num_kv_heads, config.head_dim, block_tokens, kv_dtype)
    digests = digest_config(config, bytes(32), dtype.value)
    chosen = "portable" if kernels.startswith("portable") else "auto"
    return CausalLM(config, layout, digests, tensors.__getitem__, threads, kernels=chosen, dtype=dtype, groups=groups)


def poisoned_arena(model: CausalLM, num_blocks: int, num_window_blocks: int | None = None) -> Any:
    """An arena full of NaN, the null block included. With groups each block has some window block, unless there are
    fewer: then none has."""
    count = num_blocks if num_window_blocks is None else num_window_blocks
    arena = private_arena(model.layout, num_blocks, count)
    for memory, _ in parts_of(arena, model.layout):
        memory.view(np.uint8)[...] = 0xFF
    if isinstance(arena, GroupedArena) and count == num_blocks:
        arena.of[1:] = np.random.default_rng(num_blocks).permutation(num_blocks) + 1
    return arena


def empty_arena(model: CausalLM, num_blocks: int, num_window_blocks: int = 0) -> Any:
    """As `poisoned_arena`, where no block has a window block: that a cache manager says. With groups there are as many
    as the layout says, or so many."""
    count = num_window_blocks or model.layout.num_window_blocks(num_blocks)
    arena = poisoned_arena(model, num_blocks, count or None)
    if isinstance(arena, GroupedArena):
        arena.of[:] = 0
    return arena


def changed_slots(model: CausalLM, arena: NDArray[Any], before: NDArray[Any]) -> NDArray[np.bool_]:
    """Which slots [blocks, block_tokens] of an arena have another bit than `before`, scales included."""
    changed = np.zeros((arena.shape[0], model.layout.block_tokens), np.bool_)
    words = np.uint32 if arena.dtype == np.float32 else arena.dtype
    pairs = (blocks.planes(array.view(words), model.layout) for array in (arena, before))
    for view, old in zip(*pairs, strict=True):
        changed |= (view != old).any(axis=(1, 2, 3, *range(5, view.ndim)))
    return changed


def stored_numbers(model: CausalLM, part: NDArray[Any]) -> NDArray[np.float32]:
    """Part of an arena as float32."""
    if model.layout.dtype is KvDtype.BFLOAT16:
        return (part.astype(np.uint32) << 16).view(np.float32)
    return part.view(np.float16 if model.layout.dtype is KvDtype.FLOAT16 else np.float32).astype(np.float32)


@dataclass
class Sequence:
    """A prompt with its blocks; `done` tokens are in the arena."""

    token_ids: IntArray
    blocks: IntArray
    done: int = 0
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    adapter: Any = None


def run_step(model: CausalLM, arena: Any, parts: list[tuple[Sequence, int]]) -> None:
    """One step that adds `count` tokens to each sequence; logits of all its rows are appended to the sequence."""
    parts = sorted(parts, key=lambda part: part[1] > 1)
    width = max(sequence.blocks.size for sequence, _ in parts) + 1
    tables = np.zeros((len(parts), width), np.int32)
    for index, (sequence, _) in enumerate(parts):
        tables[index, : sequence.blocks.size] = sequence.blocks
    counts = [count for _, count in parts]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    batch = StepBatch(
        np.concatenate([s.token_ids[s.done : s.done + count] for s, count in parts]),
        np.concatenate([np.arange(s.done, s.done + count, dtype=np.int32) for s, count in parts]),
        starts,
        np.array([s.done + count for s, count in parts], np.int32),
        tables,
        np.arange(starts[-1], dtype=np.int32),
        sum(count == 1 for count in counts),
        tuple(s.adapter for s, _ in parts) if any(s.adapter is not None for s, _ in parts) else (),
    )
    logits = model.forward(batch, arena)
    for index, (sequence, count) in enumerate(parts):
        sequence.logits.append(logits[starts[index] : starts[index + 1]].copy())
        sequence.done += count


def run_prompt(
    model: CausalLM, token_ids: IntArray, *, chunk: int | None = None, seed: int = 0, adapter: Any = None
) -> NDArray[np.float32]:
    """Logits at every position of one prompt, on scattered blocks of a poisoned arena, in chunks."""
    tokens = model.layout.block_tokens
    needed = -(-token_ids.size // tokens)
    arena = poisoned_arena(model, 2 * needed + 2)
    blocks = (np.random.default_rng(seed).permutation(2 * needed + 2)[:needed] + 1).astype(np.int32)
    sequence = Sequence(token_ids, blocks, adapter=adapter)
    while sequence.done < token_ids.size:
        run_step(model, arena, [(sequence, min(chunk or token_ids.size, token_ids.size - sequence.done))])
    return np.concatenate(sequence.logits)
