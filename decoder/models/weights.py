"""All weights of a model in the order the step reads them, and the row of addresses of each layer.

Folds into the weights what can be folded: the embedding's scale, the concatenation of projections that read the same
input, padding to whole tiles. Owns the memory that the rows point at. Called by `llama.py` once, at load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.kernels import frame as f
from decoder.models.config import ExpertsConfig, ModelConfig
from decoder.models.packing import Memory, interleave_blocks, pack, packed_elements, round_up, take_packed, to_bfloat16
from decoder.models.rope import rotary_tables

FloatArray = NDArray[np.float32]
Read = Callable[[str], FloatArray]
Make = Callable[[], FloatArray]
MakeMemory = Callable[[int], Memory]

_ALIGNMENT: Final = 64  # bytes that an array may take more than its elements


class PackedWeights:
    """The packed weights of one model.

    rows:       int64 [layers, LAYER_WORDS], addresses of each layer's weights and rotary tables, and its window
    embedding:  [vocabulary, padded hidden size], scaled, as float32 or as the bits of bfloat16
    head:       the packed output matrix
    final_norm: float32 [padded hidden size]
    expert_bytes: bytes from one expert's projections to the next one's: gate and up, and down; 0 without experts

    `make_memory` gives memory of so many bytes. Where it is filled already, nothing is read.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: Read,
        bfloat16: bool,
        report: Callable[[float], None],
        make_memory: MakeMemory = Memory,
    ) -> None:
        self._config = config
        self._read = read
        self._bfloat16 = bfloat16
        self._memory = make_memory(_num_bytes(config, bfloat16))
        self._tables = {
            rope: rotary_tables(rope, config.max_position)
            for rope in dict.fromkeys((config.rope, config.local_rope))
            if rope is not None
        }
        self.expert_bytes = (0, 0)
        self.rows: NDArray[np.int64] = np.zeros((config.num_layers, f.LAYER_WORDS), np.int64)
        for layer in range(config.num_layers):
            self._set_layer(layer)
            report((layer + 1) / (config.num_layers + 1))
        table = functools.cache(lambda: read("model.embed_tokens.weight"))
        head = table if config.tie_embeddings else lambda: read("lm_head.weight")
        self.head = self._pack(config.vocab_size, config.hidden_size, head)
        self.embedding = self._embedding(table)
        self.final_norm = self._vector(config.hidden_size, lambda: read("model.norm.weight"))
        self._memory.finish()

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that one decode step reads: all matrices, without the embedding table."""
        return self._memory.used_bytes - self.embedding.nbytes

    def _set_layer(self, layer: int) -> None:
        config, read, row = self._config, self._read, self.rows[layer]
        prefix = f"model.layers.{layer}."
        attention = f"{prefix}self_attn."
        after, before = "post_attention_layernorm", "post_attention_layernorm"
        hidden, queries, fused = config.hidden_size, config.query_size, config.query_size + 2 * config.kv_size
        if config.post_norms:
            before = "pre_feedforward_layernorm"
            row[f.LAYER_POST_MIX_NORM] = self._address(hidden, f"{prefix}{after}.weight")
            row[f.LAYER_POST_MLP_NORM] = self._address(hidden, f"{prefix}post_feedforward_layernorm.weight")
        row[f.LAYER_NORM] = self._address(hidden, f"{prefix}input_layernorm.weight")
        row[f.LAYER_POST_NORM] = self._address(hidden, f"{prefix}{before}.weight")

        def joined(kind: str) -> FloatArray:
            return np.concatenate([read(f"{attention}{name}_proj.{kind}") for name in "qkv"])

        row[f.LAYER_QKV] = self._pack(fused, hidden, lambda: joined("weight")).ctypes.data
        row[f.LAYER_MIX] = self._pack(hidden, queries, lambda: read(f"{attention}o_proj.weight")).ctypes.data
        if config.qkv_bias:
            row[f.LAYER_QKV_BIAS] = self._vector(fused, lambda: joined("bias")).ctypes.data
        if config.output_bias:
            row[f.LAYER_MIX_BIAS] = self._address(hidden, f"{attention}o_proj.bias")
        if config.qk_norms:
            row[f.LAYER_QUERY_NORM] = self._address(config.head_dim, f"{attention}q_norm.weight")
            row[f.LAYER_KEY_NORM] = self._address(config.head_dim, f"{attention}k_norm.weight")
        if config.experts is not None and config.layers[layer].experts:
            self._set_experts(row, f"{prefix}mlp.", config.experts)
        else:
            inner = config.intermediate_size
            row[f.LAYER_GATE_UP] = self._gate_up(f"{prefix}mlp.", inner).ctypes.data
            row[f.LAYER_DOWN] = self._down(f"{prefix}mlp.", inner).ctypes.data
            if config.mlp_bias:
                row[f.LAYER_GATE_UP_BIAS] = self._gate_up_bias(f"{prefix}mlp.", inner)
                row[f.LAYER_DOWN_BIAS] = self._address(hidden, f"{prefix}mlp.down_proj.bias")
        cosines, sines = self._tables[config.layer_rope(layer)]
        row[f.LAYER_COSINES], row[f.LAYER_SINES] = cosines.ctypes.data, sines.ctypes.data
        row[f.LAYER_WINDOW] = min(config.layers[layer].window or f.NO_WINDOW, f.NO_WINDOW)

    def _set_experts(self, row: NDArray[np.int64], prefix: str, experts: ExpertsConfig) -> None:
        """The router, with the gate of the shared expert as one output more, and the experts."""

        def router() -> FloatArray:
            matrix = self._read(f"{prefix}gate.weight")
            gate = [self._read(f"{prefix}shared_expert_gate.weight")[None]] if experts.shared else []
            return np.concatenate([matrix, *gate])

        outputs = router_outputs(experts)
        row[f.LAYER_ROUTER] = self._pack(outputs, self._config.hidden_size, router).ctypes.data
        row[f.LAYER_GATE_UP], row[f.LAYER_DOWN] = self._experts(f"{prefix}experts.", experts)
        if experts.shared:
            shared = f"{prefix}shared_expert."
            row[f.LAYER_SHARED_GATE_UP] = self._gate_up(shared, experts.shared).ctypes.data
            row[f.LAYER_SHARED_DOWN] = self._down(shared, experts.shared).ctypes.data

    def _gate_up(self, prefix: str, inner: int) -> NDArray[Any]:
        """The packed gate and up projections, in alternating blocks."""

        def alternating() -> FloatArray:
            gate, up = (_padded_rows(self._read(f"{prefix}{name}_proj.weight")) for name in ("gate", "up"))
            return interleave_blocks(gate, up)

        return self._pack(2 * round_up(inner, 32), self._config.hidden_size, alternating)

    def _gate_up_bias(self, prefix: str, inner: int) -> int:
        """Address of the biases of gate and up, in the order of the packed columns."""

        def alternating() -> FloatArray:
            columns = (self._read(f"{prefix}{name}_proj.bias")[:, None] for name in ("gate", "up"))
            return interleave_blocks(*(_padded_rows(column) for column in columns))[:, 0]

        return int(self._vector(2 * round_up(inner, 32), alternating).ctypes.data)

    def _down(self, prefix: str, inner: int) -> NDArray[Any]:
        return self._pack(self._config.hidden_size, inner, lambda: self._read(f"{prefix}down_proj.weight"))

    def _experts(self, prefix: str, experts: ExpertsConfig) -> tuple[int, int]:
        """Addresses of the first expert's packed projections; the others' follow without a gap."""
        up = [self._gate_up(f"{prefix}{index}.", experts.inner) for index in range(experts.count)]
        down = [self._down(f"{prefix}{index}.", experts.inner) for index in range(experts.count)]
        self.expert_bytes = up[0].nbytes, down[0].nbytes
        return up[0].ctypes.data, down[0].ctypes.data

    def _pack(self, outputs: int, inputs: int, make: Make) -> NDArray[Any]:
        if self._memory.filled:
            return take_packed(self._memory, outputs, inputs, self._bfloat16)
        return pack(self._memory, make(), self._bfloat16)

    def _vector(self, size: int, make: Make) -> NDArray[Any]:
        array = self._memory.take((round_up(size, 32),), np.float32)
        if not self._memory.filled:
            array[:size] = make()
        return array

    def _address(self, size: int, name: str) -> int:
        return int(self._vector(size, lambda: self._read(name)).ctypes.data)

    def _embedding(self, make: Make) -> NDArray[Any]:
        """The table with its scale folded in, rounded as a product of two numbers of the weights' type is."""
        rows, hidden = self._config.vocab_size, self._config.hidden_size
        array = self._memory.take((rows, round_up(hidden, 32)), np.uint16 if self._bfloat16 else np.float32)
        if self._memory.filled:
            return array
        table = make()
        scale = np.float32(self._config.embedding_scale)
        if self._bfloat16:
            rounded = (to_bfloat16(np.array([scale])).astype(np.uint32) << 16).view(np.float32)[0]
            table = (to_bfloat16(table).astype(np.uint32) << 16).view(np.float32) * rounded if scale != 1.0 else table
            array[:, :hidden] = to_bfloat16(table)
        else:
            array[:, :hidden] = table * scale if scale != 1.0 else table
        return array


def router_outputs(experts: ExpertsConfig) -> int:
    """Columns of a router's product: one for each expert, then one for the gate of the shared expert, if any."""
    return experts.count + (1 if experts.shared else 0)


def _padded_rows(matrix: FloatArray) -> FloatArray:
    rows = round_up(matrix.shape[0], 32)
    if rows == matrix.shape[0]:
        return matrix
    return np.concatenate([matrix, np.zeros((rows - matrix.shape[0], matrix.shape[1]), np.float32)])


def _num_bytes(config: ModelConfig, bfloat16: bool) -> int:
    """Bytes of all weights, or a little more."""
    hidden, inner, element = config.hidden_size, config.intermediate_size, 2 if bfloat16 else 4
    attention = config.query_size + 2 * config.kv_size
    matrices = packed_elements(attention, hidden) + packed_elements(hidden, config.query_size)
    vectors = 6 * round_up(hidden, 32) + round_up(attention, 32) + 2 * round_up(config.head_dim, 32)
    vectors += 2 * round_up(inner, 32) if config.mlp_bias else 0
    total = (matrices * element + vectors * 4 + 16 * _ALIGNMENT) * config.num_layers
    for layer in config.layers:
        if config.experts is not None and layer.experts:
            experts = config.experts
            routed = packed_elements(router_outputs(experts), hidden)
            routed += experts.count * _gated_elements(experts.inner, hidden)
            routed += _gated_elements(experts.shared, hidden) if experts.shared else 0
            total += routed * element
        else:
            total += _gated_elements(inner, hidden) * element
    vocabulary = packed_elements(config.vocab_size, hidden) + config.vocab_size * round_up(hidden, 32)
    return total + vocabulary * element + round_up(hidden, 32) * 4 + 4 * _ALIGNMENT


def _gated_elements(inner: int, hidden: int) -> int:
    return packed_elements(2 * round_up(inner, 32), hidden) + packed_elements(hidden, inner)
