"""All weights of a model in the order the step reads them, and the row of addresses of each layer.

Folds into the weights what can be folded: the embedding's scale, the concatenation of projections that read the same
input, padding to whole tiles. Owns the memory that the rows point at. Called by `llama.py` once, at load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decoder.kernels import frame as f
from decoder.models.config import ModelConfig
from decoder.models.packing import Memory, interleave_blocks, pack, packed_elements, round_up, to_bfloat16
from decoder.models.rope import rotary_tables

FloatArray = NDArray[np.float32]
Read = Callable[[str], FloatArray]

_ALIGNMENT: Final = 64  # bytes that an array may take more than its elements


class PackedWeights:
    """The packed weights of one model.

    rows:       int64 [layers, LAYER_WORDS], addresses of each layer's weights and rotary tables, and its window
    embedding:  [vocabulary, padded hidden size], scaled, as float32 or as the bits of bfloat16
    head:       the packed output matrix
    final_norm: float32 [padded hidden size]
    """

    def __init__(self, config: ModelConfig, read: Read, bfloat16: bool, report: Callable[[float], None]) -> None:
        self._config = config
        self._read = read
        self._bfloat16 = bfloat16
        self._memory = Memory(_num_bytes(config, bfloat16))
        self._tables = {
            rope: rotary_tables(rope, config.max_position)
            for rope in dict.fromkeys((config.rope, config.local_rope))
            if rope is not None
        }
        self.rows: NDArray[np.int64] = np.zeros((config.num_layers, f.LAYER_WORDS), np.int64)
        for layer in range(config.num_layers):
            self._set_layer(layer)
            report((layer + 1) / (config.num_layers + 1))
        table = read("model.embed_tokens.weight")
        self.head = self._pack(table if config.tie_embeddings else read("lm_head.weight"))
        self.embedding = self._embedding(table)
        self.final_norm = self._vector(read("model.norm.weight"))

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that one decode step reads: all matrices, without the embedding table."""
        return self._memory.used_bytes - self.embedding.nbytes

    def _set_layer(self, layer: int) -> None:
        config, read, row = self._config, self._read, self.rows[layer]
        prefix = f"model.layers.{layer}."
        attention = f"{prefix}self_attn."
        after, before = "post_attention_layernorm", "post_attention_layernorm"
        if config.post_norms:
            before = "pre_feedforward_layernorm"
            row[f.LAYER_POST_MIX_NORM] = self._address(read(f"{prefix}{after}.weight"))
            row[f.LAYER_POST_MLP_NORM] = self._address(read(f"{prefix}post_feedforward_layernorm.weight"))
        row[f.LAYER_NORM] = self._address(read(f"{prefix}input_layernorm.weight"))
        row[f.LAYER_POST_NORM] = self._address(read(f"{prefix}{before}.weight"))
        fused = np.concatenate([read(f"{attention}{name}_proj.weight") for name in "qkv"])
        row[f.LAYER_QKV] = self._pack(fused).ctypes.data
        row[f.LAYER_MIX] = self._pack(read(f"{attention}o_proj.weight")).ctypes.data
        if config.qkv_bias:
            biases = np.concatenate([read(f"{attention}{name}_proj.bias") for name in "qkv"])
            row[f.LAYER_QKV_BIAS] = self._address(biases)
        if config.qk_norms:
            row[f.LAYER_QUERY_NORM] = self._address(read(f"{attention}q_norm.weight"))
            row[f.LAYER_KEY_NORM] = self._address(read(f"{attention}k_norm.weight"))
        row[f.LAYER_GATE_UP], row[f.LAYER_DOWN] = self._gated(f"{prefix}mlp.")
        cosines, sines = self._tables[config.layer_rope(layer)]
        row[f.LAYER_COSINES], row[f.LAYER_SINES] = cosines.ctypes.data, sines.ctypes.data
        row[f.LAYER_WINDOW] = min(config.layers[layer].window or f.NO_WINDOW, f.NO_WINDOW)

    def _gated(self, prefix: str) -> tuple[int, int]:
        """Addresses of the packed gate and up projections, alternating, and of the down projection."""
        gate, up = (_padded_rows(self._read(f"{prefix}{name}_proj.weight")) for name in ("gate", "up"))
        gate_up = self._pack(interleave_blocks(gate, up))
        return gate_up.ctypes.data, self._pack(self._read(f"{prefix}down_proj.weight")).ctypes.data

    def _pack(self, matrix: FloatArray) -> NDArray[Any]:
        return pack(self._memory, matrix, self._bfloat16)

    def _vector(self, values: FloatArray) -> NDArray[Any]:
        array = self._memory.take((round_up(values.size, 32),), np.float32)
        array[: values.size] = values
        return array

    def _address(self, values: FloatArray) -> int:
        return int(self._vector(values).ctypes.data)

    def _embedding(self, table: FloatArray) -> NDArray[Any]:
        """The table with its scale folded in, rounded as a product of two numbers of the weights' type is."""
        rows, hidden = table.shape
        array = self._memory.take((rows, round_up(hidden, 32)), np.uint16 if self._bfloat16 else np.float32)
        scale = np.float32(self._config.embedding_scale)
        if self._bfloat16:
            rounded = (to_bfloat16(np.array([scale])).astype(np.uint32) << 16).view(np.float32)[0]
            table = (to_bfloat16(table).astype(np.uint32) << 16).view(np.float32) * rounded if scale != 1.0 else table
            array[:, :hidden] = to_bfloat16(table)
        else:
            array[:, :hidden] = table * scale if scale != 1.0 else table
        return array


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
    matrices += packed_elements(2 * round_up(inner, 32), hidden) + packed_elements(hidden, inner)
    vectors = 4 * round_up(hidden, 32) + round_up(attention, 32) + 2 * round_up(config.head_dim, 32)
    per_layer = matrices * element + vectors * 4 + 16 * _ALIGNMENT
    vocabulary = packed_elements(config.vocab_size, hidden) + config.vocab_size * round_up(hidden, 32)
    return per_layer * config.num_layers + vocabulary * element + round_up(hidden, 32) * 4 + 4 * _ALIGNMENT
