"""The Llama family on a CPU: weights in kernel layout and one forward over a ragged paged batch.

Called by `decoder/runner.py` once a step. It owns its weights and scratch memory and no block: keys and values live
in the arena it is handed, and it writes only the slots of the batch's query tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import Internal
from common.layout import KvDtype, KvLayout
from decoder.batch import StepBatch
from decoder.kernels import simple
from decoder.models.config import ModelConfig, ModelDigests

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int32]


class CausalLM:
    """A loaded model. Not safe for concurrent calls: one step at a time."""

    def __init__(
        self,
        config: ModelConfig,
        layout: KvLayout,
        digests: ModelDigests,
        read: Callable[[str], FloatArray],
        threads: int,
        report: Callable[[float], None],
    ) -> None:
        self.config = config
        self.layout = layout
        self.digests = digests
        self._bf16 = layout.dtype is KvDtype.BFLOAT16
        kind = torch.bfloat16 if self._bf16 else torch.float32

        def weight(*names: str) -> torch.Tensor:
            return torch.cat([torch.from_numpy(read(name)) for name in names]).to(kind)

        self._embedding = weight("model.embed_tokens.weight")
        self._head = self._embedding if config.tie_embeddings else weight("lm_head.weight")
        self._norm = read("model.norm.weight")
        self._layers = []
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
            self._layers.append((
                read(f"{prefix}input_layernorm.weight"),
                weight(*(f"{attention}{name}_proj.weight" for name in "qkv")),
                weight(f"{attention}o_proj.weight"),
                read(f"{prefix}post_attention_layernorm.weight"),
                weight(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
                weight(f"{mlp}down_proj.weight"),
            ))
            report((layer + 1) / config.num_layers)
        exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
        frequencies = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
        angles = np.arange(config.max_position, dtype=np.float32)[:, None] * frequencies
        self._cos, self._sin = np.cos(angles), np.sin(angles)

    def _linear(self, rows: FloatArray, weight: torch.Tensor) -> FloatArray:
        result: FloatArray = torch.nn.functional.linear(torch.from_numpy(rows).to(weight.dtype), weight).float().numpy()
        return result

    def forward(self, batch: StepBatch, arena: NDArray[np.float32] | NDArray[np.uint16]) -> FloatArray:
        """Run one step; returns float32 logits [R, vocab], valid until the next call."""
        config = self.config
        self._check(batch, arena)
        epsilon = np.float32(config.norm_epsilon)
        x = self._embedding[torch.from_numpy(batch.token_ids).long()].float().numpy()
        rows = x.shape[0]
        normed = np.empty_like(x)
        mixed = np.empty((rows, config.query_size), np.float32)
        gated = np.empty((rows, config.intermediate_size), np.float32)
        sizes = (config.num_heads, config.num_kv_heads, config.head_dim, self._bf16)
        for layer, (norm, qkv_weight, o_weight, post_norm, gate_up, down) in enumerate(self._layers):
            simple.rms_norm(x, norm, epsilon, normed)
            qkv = self._linear(normed, qkv_weight)
            simple.rope_write(
                qkv, self._cos, self._sin, batch.positions, batch.query_starts, batch.block_tables, layer, arena, *sizes
            )
            simple.attention(
                qkv, batch.positions, batch.query_starts, batch.block_tables, layer, arena, *sizes, mixed
            )
            x += self._linear(mixed, o_weight)
            simple.rms_norm(x, post_norm, epsilon, normed)
            simple.silu_mul(self._linear(normed, gate_up), gated)
            x += self._linear(gated, down)
        wanted = x[batch.logit_rows]
        normed = np.empty_like(wanted)
        simple.rms_norm(wanted, self._norm, epsilon, normed)
        return self._linear(normed, self._head)

    def _check(self, batch: StepBatch, arena: NDArray[np.float32] | NDArray[np.uint16]) -> None:
        # A wrong block id would write into another tenant's memory.
        kind = np.uint16 if self._bf16 else np.float32
        if arena.dtype != kind or arena.shape[1:] != self.layout.block_shape:
            raise Internal(f"arena of {arena.dtype} {arena.shape[1:]} does not fit the model")
        if batch.block_tables.size and not 0 <= batch.block_tables.min() <= batch.block_tables.max() < arena.shape[0]:
            raise Internal("a block table names a block outside the arena")
        if batch.positions.size and not 0 <= batch.positions.min() <= batch.positions.max() < self.config.max_position:
            raise Internal("a position is outside the model's range")
        if batch.token_ids.size and not 0 <= batch.token_ids.min() <= batch.token_ids.max() < self.config.vocab_size:
            raise Internal("a token id is outside the vocabulary")

    def warm_up(self, arena: NDArray[np.float32] | NDArray[np.uint16]) -> None:
        """Compile every kernel this model may need; touches the null block alone."""
        empty = np.zeros(1, np.int32)
        ends = np.array([0, 1], np.int32)
        tables = np.zeros((1, 1), np.int32)
        saved = arena[0].copy()
        self.forward(StepBatch(empty, empty, ends, empty + 1, tables, empty, 1), arena)
        arena[0] = saved

    def copy_blocks(
        self,
        arena: NDArray[np.float32] | NDArray[np.uint16],
        sources: IntArray,
        targets: IntArray,
        num_tokens: IntArray,
    ) -> None:
        """Copy the first `num_tokens[i]` tokens of block `sources[i]` to `targets[i]`, in every layer."""
        for source, target, count in zip(sources, targets, num_tokens, strict=True):
            arena[target, :, :, :, :count] = arena[source, :, :, :, :count]

    def scrub_blocks(
        self, arena: NDArray[np.float32] | NDArray[np.uint16], blocks: IntArray, *, poison: bool = False
    ) -> None:
        """Overwrite blocks with zeros, or with NaN when `poison` (tests: a stale read becomes visible)."""
        arena[blocks] = (0x7FC0 if self._bf16 else np.nan) if poison else 0
