"""All weights of a model in the order the step reads them, and the row of addresses of each layer.

Folds into the weights what can be folded: the embedding's scale, the concatenation of projections that read the same
input, padding to whole tiles. Owns the memory that the rows point at. Called by `llama.py` once, at load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.kernels import frame as f
from decoder.models.config import ExpertsConfig, ModelConfig
from decoder.models.matrices import Arrange, DenseMatrices, GroupedMatrices, Packed, Read, alternating, below
from decoder.models.packing import CountingMemory, FloatArray, Memory, packed_elements, round_up, to_bfloat16
from decoder.models.rope import rotary_tables

Make = Callable[[], FloatArray]
MakeMemory = Callable[[int], Memory]

_ALIGNMENT: Final = 64  # bytes that an array may take more than its elements


class PackedWeights:
    """The packed weights of one model.

    rows:       int64 [layers, LAYER_WORDS], addresses of each layer's weights and rotary tables, and its window
    embedding:  [vocabulary, padded hidden size], scaled, as float32 or as the bits of bfloat16; with weights in groups
                a packed matrix without its scale, the head itself where they are tied
    head:       the packed output matrix
    final_norm: float32 [padded hidden size]
    expert_bytes: bytes from one expert's projections to the next one's: gate and up, and down; 0 without experts

    `groups` packs matrices in groups; without it they are float32 or bfloat16. `make_memory` gives memory of so many
    bytes. Where it is filled already, nothing is read.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: Read,
        bfloat16: bool,
        report: Callable[[float], None],
        make_memory: MakeMemory = Memory,
        groups: GroupedMatrices | None = None,
    ) -> None:
        read = functools.lru_cache(maxsize=1)(read)  # the head and the table of embeddings may be one tensor
        self._config = config
        self._read = read
        self._bfloat16 = bfloat16
        self._groups = groups
        self._matrices = groups or DenseMatrices(read, bfloat16)
        self._tables = {
            rope: rotary_tables(rope, config.max_position)
            for rope in dict.fromkeys((config.rope, config.local_rope))
            if rope is not None
        }
        self.expert_bytes = (0, 0)
        self.rows: NDArray[np.int64] = np.zeros((config.num_layers, f.LAYER_WORDS), np.int64)
        self._memory: Memory | CountingMemory
        if groups is None:
            num_bytes = self._num_bytes()
        else:
            self._memory = CountingMemory()
            self._set_all(lambda done: None)
            groups.anew.clear()
            num_bytes = self._memory.used_bytes
        self._memory = make_memory(num_bytes)
        self._set_all(report)
        self._memory.finish()

    def _set_all(self, report: Callable[[float], None]) -> None:
        config, hidden = self._config, self._config.hidden_size
        for layer in range(config.num_layers):
            self._set_layer(layer)
            report((layer + 1) / (config.num_layers + 1))
        embedded = "model.embed_tokens.weight"
        self.head = self._pack(config.vocab_size, hidden, [embedded if config.tie_embeddings else "lm_head.weight"])
        if self._groups is None:
            self.embedding = self._embedding(embedded)
        else:
            tied = config.tie_embeddings
            self.embedding = self.head if tied else self._pack(config.vocab_size, hidden, [embedded])
        self.final_norm = self._vector(hidden, lambda: self._read("model.norm.weight"))

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that one decode step reads: all matrices, without an embedding table of its own."""
        return self._memory.used_bytes - (0 if self.embedding is self.head else self.embedding.num_bytes)

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

        def biases() -> FloatArray:
            return np.concatenate([read(f"{attention}{name}_proj.bias") for name in "qkv"])

        row[f.LAYER_QKV] = self._pack(fused, hidden, [f"{attention}{name}_proj.weight" for name in "qkv"]).address
        row[f.LAYER_MIX] = self._pack(hidden, queries, [f"{attention}o_proj.weight"]).address
        if config.qkv_bias:
            row[f.LAYER_QKV_BIAS] = self._vector(fused, biases).ctypes.data
        if config.output_bias:
            row[f.LAYER_MIX_BIAS] = self._address(hidden, f"{attention}o_proj.bias")
        if config.qk_norms:
            row[f.LAYER_QUERY_NORM] = self._address(config.head_dim, f"{attention}q_norm.weight")
            row[f.LAYER_KEY_NORM] = self._address(config.head_dim, f"{attention}k_norm.weight")
        if config.experts is not None and config.layers[layer].experts:
            self._set_experts(row, f"{prefix}mlp.", config.experts)
        else:
            inner = config.intermediate_size
            row[f.LAYER_GATE_UP] = self._gate_up(f"{prefix}mlp.", inner).address
            row[f.LAYER_DOWN] = self._down(f"{prefix}mlp.", inner).address
            if config.mlp_bias:
                row[f.LAYER_GATE_UP_BIAS] = self._gate_up_bias(f"{prefix}mlp.", inner)
                row[f.LAYER_DOWN_BIAS] = self._address(hidden, f"{prefix}mlp.down_proj.bias")
        cosines, sines = self._tables[config.layer_rope(layer)]
        row[f.LAYER_COSINES], row[f.LAYER_SINES] = cosines.ctypes.data, sines.ctypes.data
        row[f.LAYER_WINDOW] = min(config.layers[layer].window or f.NO_WINDOW, f.NO_WINDOW)

    def _set_experts(self, row: NDArray[np.int64], prefix: str, experts: ExpertsConfig) -> None:
        """The router, with the gate of the shared expert as one output more, and the experts."""
        names = [f"{prefix}gate.weight"]
        if experts.shared:
            names.append(f"{prefix}shared_expert_gate.weight")
        row[f.LAYER_ROUTER] = self._pack(router_outputs(experts), self._config.hidden_size, names).address
        row[f.LAYER_GATE_UP], row[f.LAYER_DOWN] = self._experts(f"{prefix}experts.", experts)
        if experts.shared:
            shared = f"{prefix}shared_expert."
            row[f.LAYER_SHARED_GATE_UP] = self._gate_up(shared, experts.shared).address
            row[f.LAYER_SHARED_DOWN] = self._down(shared, experts.shared).address

    def _gate_up(self, prefix: str, inner: int) -> Packed:
        """The packed gate and up projections, in alternating blocks."""
        names = [f"{prefix}{name}_proj.weight" for name in ("gate", "up")]
        return self._pack(2 * round_up(inner, 32), self._config.hidden_size, names, alternating)

    def _gate_up_bias(self, prefix: str, inner: int) -> int:
        """Address of the biases of gate and up, in the order of the packed columns."""

        def columns() -> FloatArray:
            return alternating([self._read(f"{prefix}{name}_proj.bias")[:, None] for name in ("gate", "up")])[:, 0]

        return int(self._vector(2 * round_up(inner, 32), columns).ctypes.data)

    def _down(self, prefix: str, inner: int) -> Packed:
        return self._pack(self._config.hidden_size, inner, [f"{prefix}down_proj.weight"])

    def _experts(self, prefix: str, experts: ExpertsConfig) -> tuple[int, int]:
        """Addresses of the first expert's packed projections; the others' follow without a gap."""
        up = [self._gate_up(f"{prefix}{index}.", experts.inner) for index in range(experts.count)]
        down = [self._down(f"{prefix}{index}.", experts.inner) for index in range(experts.count)]
        self.expert_bytes = up[0].num_bytes, down[0].num_bytes
        return up[0].address, down[0].address

    def _pack(self, outputs: int, inputs: int, names: Sequence[str], arrange: Arrange = below) -> Packed:
        return self._matrices.pack(self._memory, outputs, inputs, names, arrange)

    def _vector(self, size: int, make: Make) -> NDArray[Any]:
        array = self._memory.take((round_up(size, 32),), np.float32)
        if not self._memory.filled:
            array[:size] = make()
        return array

    def _address(self, size: int, name: str) -> int:
        return int(self._vector(size, lambda: self._read(name)).ctypes.data)

    def _embedding(self, name: str) -> Packed:
        """The table with its scale folded in, rounded as a product of two numbers of the weights' type is."""
        rows, hidden = self._config.vocab_size, self._config.hidden_size
        array = self._memory.take((rows, round_up(hidden, 32)), np.uint16 if self._bfloat16 else np.float32)
        if self._memory.filled:
            return Packed(array, array.ctypes.data)
        table = self._read(name)
        scale = np.float32(self._config.embedding_scale)
        if self._bfloat16:
            rounded = (to_bfloat16(np.array([scale])).astype(np.uint32) << 16).view(np.float32)[0]
            table = (to_bfloat16(table).astype(np.uint32) << 16).view(np.float32) * rounded if scale != 1.0 else table
            array[:, :hidden] = to_bfloat16(table)
        else:
            array[:, :hidden] = table * scale if scale != 1.0 else table
        return Packed(array, array.ctypes.data)

    def _num_bytes(self) -> int:
        """Bytes of all weights of float32 or bfloat16, or a little more."""
        config, element = self._config, 2 if self._bfloat16 else 4
        hidden, inner = config.hidden_size, config.intermediate_size
        attention = config.query_size + 2 * config.kv_size

        def size(outputs: int, inputs: int) -> int:
            return packed_elements(outputs, inputs) * element

        def gated(inner: int) -> int:
            return size(2 * round_up(inner, 32), hidden) + size(hidden, inner)

        vectors = 6 * round_up(hidden, 32) + round_up(attention, 32) + 2 * round_up(config.head_dim, 32)
        vectors += 2 * round_up(inner, 32) if config.mlp_bias else 0
        matrices = size(attention, hidden) + size(hidden, config.query_size)
        total = (matrices + vectors * 4 + 16 * _ALIGNMENT) * config.num_layers
        for layer in config.layers:
            if config.experts is not None and layer.experts:
                experts = config.experts
                total += size(router_outputs(experts), hidden) + experts.count * gated(experts.inner)
                total += gated(experts.shared) if experts.shared else 0
            else:
                total += gated(inner)
        table = config.vocab_size * round_up(hidden, 32) * element
        return total + size(config.vocab_size, hidden) + table + round_up(hidden, 32) * 4 + 4 * _ALIGNMENT


def router_outputs(experts: ExpertsConfig) -> int:
    """Columns of a router's product: one for each expert, then one for the gate of the shared expert, if any."""
    return experts.count + (1 if experts.shared else 0)
