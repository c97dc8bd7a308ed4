"""The Llama family on a CPU: weights in kernel layout and one forward over a ragged paged batch.

Called by `decoder/runner.py` once a step. It owns its weights, scratch memory and step threads, and no block: keys
and values live in the arena it is handed, and it writes only the slots of the batch's query tokens.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import Internal
from common.layout import KvDtype, KvLayout
from decoder.batch import StepBatch
from decoder.kernels import amx, blocks, sets, step, sync
from decoder.kernels import frame as f
from decoder.models.config import ModelConfig, ModelDigests, refuse
from decoder.models.packing import Memory, interleave_blocks, pack, packed_elements, round_up, to_bfloat16
from decoder.models.workspace import Workspace

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]
Arena = NDArray[np.float32] | NDArray[np.uint16]
Read = Callable[[str], FloatArray]

KERNEL_SETS = ("auto", "portable")


def refuse_unserved(config: ModelConfig) -> None:
    """Raise InvalidArgument naming the first setting that the step does not compute."""
    for name in ("qkv_bias", "qk_norms", "post_norms", "attention_cap", "logit_cap", "experts"):
        if getattr(config, name):
            raise refuse(name, getattr(config, name), "models without it on a CPU")
    for name, served in (("activation", "silu"), ("embedding_scale", 1.0), ("query_scale", config.head_dim**-0.5)):
        if getattr(config, name) != served:
            raise refuse(name, getattr(config, name), f"{served!r} on a CPU")
    if any(layer.window or layer.local for layer in config.layers):
        raise refuse("sliding_window", config.layers[0].window, "models without windows on a CPU")
    if config.rope.dim != config.head_dim:
        raise refuse("partial_rotary_factor", config.rope.dim / config.head_dim, "1 on a CPU")
    for name in ("hidden_size", "intermediate_size"):
        # Matmul inputs lie in tiles of 32 columns without padding.
        if getattr(config, name) % 32:
            raise refuse(name, getattr(config, name), "a multiple of 32")


class CausalLM:
    """A loaded model. Not safe for concurrent calls: one step at a time.

    `read` gives a tensor by its Hugging Face name. `kernels` is "auto" (the fastest the CPU has) or "portable". `dtype`
    is the type of the weights, by default that of keys and values. float32 keys and values beside bfloat16 weights
    mean that nothing but the weights is rounded to bfloat16: queries, attention and the inputs of products are
    float32, or with AMX, whose products take bfloat16 alone, sums of two bfloat16.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: KvLayout,
        digests: ModelDigests,
        read: Read,
        threads: int = 0,
        report: Callable[[float], None] = lambda done: None,
        kernels: str = "auto",
        dtype: KvDtype | None = None,
    ) -> None:
        refuse_unserved(config)
        self.config = config
        self.layout = layout
        self.digests = digests
        self.threads = threads or len(os.sched_getaffinity(0))
        self._bfloat16 = (dtype or layout.dtype) is KvDtype.BFLOAT16
        self._kernels = self._choose(kernels)
        self._frame: NDArray[np.int64] = np.zeros(f.FRAME_WORDS, np.int64)
        self._load(read, report)
        self._workspace = Workspace(config, layout, self._frame, self.threads, self._kernels)
        self._team: sync.Team | None = None

    def _choose(self, kernels: str) -> sets.Kernels:
        if kernels not in KERNEL_SETS:
            raise ValueError(f"kernels is {kernels!r}; allowed is one of {KERNEL_SETS}")
        wide = self.layout.dtype is KvDtype.FLOAT32
        if not self._bfloat16:
            if not wide:
                raise ValueError(f"keys and values of {self.layout.dtype.value} beside float32 weights have no kernels")
            return sets.Float32Kernels()
        tiles = kernels == "auto" and amx.available()
        if wide:
            return sets.AmxWideKernels() if tiles else sets.WideKernels()
        # A head narrower than a tile would waste most of it.
        return sets.AmxKernels() if tiles and self.config.head_dim % 32 == 0 else sets.Bfloat16Kernels()

    def _load(self, read: Read, report: Callable[[float], None]) -> None:
        config, bfloat16 = self.config, self._bfloat16
        hidden, inner = config.hidden_size, config.intermediate_size
        sizes = [
            packed_elements(config.query_size + 2 * config.kv_size, hidden),
            packed_elements(hidden, config.query_size),
            packed_elements(2 * inner, hidden),
            packed_elements(hidden, inner),
        ]
        per_layer = sum(sizes) * (2 if bfloat16 else 4) + 2 * hidden * 4 + 1024
        head = (packed_elements(config.vocab_size, hidden) + config.vocab_size * hidden) * (2 if bfloat16 else 4)
        self._memory = Memory(per_layer * config.num_layers + head + hidden * 4 + 4096)
        memory = self._memory

        def vector(name: str) -> NDArray[Any]:
            array = memory.take((hidden,), np.float32)
            array[...] = read(name)
            return array

        rows: list[list[int]] = []
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
            fused = np.concatenate([read(f"{attention}{name}_proj.weight") for name in "qkv"])
            gate_up = interleave_blocks(read(f"{mlp}gate_proj.weight"), read(f"{mlp}up_proj.weight"))
            arrays = [
                vector(f"{prefix}input_layernorm.weight"),
                pack(memory, fused, bfloat16),
                pack(memory, read(f"{attention}o_proj.weight"), bfloat16),
                vector(f"{prefix}post_attention_layernorm.weight"),
                pack(memory, gate_up, bfloat16),
                pack(memory, read(f"{mlp}down_proj.weight"), bfloat16),
            ]
            rows.append([array.ctypes.data for array in arrays])
            report((layer + 1) / (config.num_layers + 1))
        self._layers = np.array(rows, np.int64)
        table = read("model.embed_tokens.weight")
        self._embedding = memory.take(table.shape, np.uint16 if bfloat16 else np.float32)
        self._embedding[...] = to_bfloat16(table) if bfloat16 else table
        head_matrix = table if config.tie_embeddings else read("lm_head.weight")
        self._head = pack(memory, head_matrix, bfloat16)
        self._final_norm = vector("model.norm.weight")
        frame = self._frame
        frame[f.LAYERS] = self._layers.ctypes.data
        frame[f.EMBEDDING] = self._embedding.ctypes.data
        frame[f.HEAD] = self._head.ctypes.data
        frame[f.FINAL_NORM] = self._final_norm.ctypes.data
        frame[f.VOCAB_COLUMNS] = round_up(config.vocab_size, 32)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads: all matrices, without the embedding table."""
        return self._memory.used_bytes - self._embedding.nbytes

    def forward(self, batch: StepBatch, arena: Arena) -> FloatArray:
        """Run one step; returns float32 logits [R, vocab], valid until the next call.

        Raises Internal when the batch does not fit the model or the arena; nothing is written then.
        """
        self._check(batch, arena)
        if self._team is None:
            step.compile_for(self._kernels)
            self._team = sync.Team(self.threads)
            self._frame[f.CONTROL] = self._team.control
            self._team.start(functools.partial(step.run, self._kernels, self._frame))
            # The workers hold no reference to the model, so that dropping it ends them.
            weakref.finalize(self, self._team.close)
        logits = self._workspace.prepare(batch, arena)
        if batch.token_ids.size:
            step.run(self._kernels, self._frame, 0)
        return logits

    def close(self) -> None:
        """End the step threads. The model can be used again; the threads then start anew."""
        if self._team is not None:
            self._team.close()
            self._team = None

    def warm_up(self, arena: Arena) -> None:
        """Compile (or load from numba's cache) all kernels and start the threads; touches the null block alone."""
        tokens = min(2 * self.layout.block_tokens, self.config.max_position, 64)
        ids = np.zeros(tokens, np.int32)
        tables = np.zeros((2, tokens), np.int32)
        saved = arena[0].copy()
        positions = np.concatenate([np.zeros(1, np.int32), np.arange(tokens - 1, dtype=np.int32)])
        starts = np.array([0, 1, tokens], np.int32)
        lengths = np.array([1, max(1, tokens - 1)], np.int32)
        rows = np.array([0], np.int32)
        self.forward(StepBatch(ids, positions, starts, lengths, tables, rows, 1), arena)
        nothing = np.zeros(0, np.int32)
        self.copy_blocks(arena, nothing, nothing, nothing)
        arena[0] = saved

    def copy_blocks(self, arena: Arena, sources: IntArray, targets: IntArray, num_tokens: IntArray) -> None:
        """Copy the first `num_tokens[i]` tokens of block `sources[i]` to `targets[i]`, in every layer."""
        self._check_arena(arena)
        blocks.copy_tokens(arena, sources, targets, num_tokens)

    def scrub_blocks(self, arena: Arena, block_ids: IntArray, *, poison: bool = False) -> None:
        """Overwrite blocks with zeros, or with NaN when `poison` (tests: a stale read becomes visible)."""
        self._check_arena(arena)
        blocks.fill(arena, block_ids, poison)

    def _check_arena(self, arena: Arena) -> None:
        kind = np.float32 if self.layout.dtype is KvDtype.FLOAT32 else np.uint16
        if arena.dtype != kind or arena.shape[1:] != self.layout.block_shape or not arena.flags.c_contiguous:
            raise Internal(f"an arena of {arena.dtype} {arena.shape[1:]} does not fit the model")

    def _check(self, batch: StepBatch, arena: Arena) -> None:
        # The kernels work on addresses: a wrong block id would write into another tenant's memory.
        self._check_arena(arena)
        tokens, sequences = batch.token_ids.size, batch.context_lens.size
        starts = batch.query_starts
        if batch.positions.size != tokens or starts.size != sequences + 1 or batch.block_tables.shape[0] != sequences:
            raise Internal("the arrays of a batch have different lengths")
        if not tokens:
            return
        lengths = np.diff(starts)
        if starts[0] != 0 or starts[-1] != tokens or lengths.min() < 1:
            raise Internal("query_starts are not prefix sums of positive lengths")
        if not 0 <= batch.num_decodes <= sequences or (lengths[: batch.num_decodes] != 1).any():
            raise Internal("the first num_decodes sequences must have one query token")
        if not np.array_equal(batch.positions[starts[1:] - 1] + 1, batch.context_lens):
            raise Internal("query tokens are not the last of their context")
        if not np.array_equal(batch.positions[starts[:-1]] + lengths, batch.context_lens):
            raise Internal("positions of a sequence do not follow each other")
        if batch.context_lens.max() > min(self.config.max_position, batch.block_tables.shape[1] * arena.shape[4]):
            raise Internal("a context is longer than its block table or the model's range")
        if batch.block_tables.min() < 0 or batch.block_tables.max() >= arena.shape[0]:
            raise Internal("a block table names a block outside the arena")
        if batch.token_ids.min() < 0 or batch.token_ids.max() >= self.config.vocab_size:
            raise Internal("a token id is outside the vocabulary")
        if batch.logit_rows.size and not 0 <= batch.logit_rows.min() <= batch.logit_rows.max() < tokens:
            raise Internal("a logit row is outside the batch")
