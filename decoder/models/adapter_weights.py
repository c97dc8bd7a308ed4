"""A LoRA adapter as the CPU's step reads it: for each product of a layer, what goes down and what comes up.

The projections of one product (q, k and v; gate and up) are one pair of matrices: their A lie below each other, and
their B side by side, zero where an output is not theirs; a fused projection is one of them. Owns the memory that its
table points at; nothing writes it after it is made. Made by `CausalLM.pack_adapter`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from decoder.kernels import frame as f
from decoder.models.config import ModelConfig
from decoder.models.packing import FloatArray, interleave_blocks, round_up

Layer = Mapping[str, tuple[FloatArray, FloatArray]]
# By module: the first output of each of its equal parts.
Starts = Mapping[str, tuple[int, ...]]

_RANK_STEP = 4  # rows of A that a kernel takes at a time


class AdapterWeights:
    """One adapter in memory.

    table: int64 [layers, ADAPTED_PRODUCTS, ADAPTER_WORDS]: addresses of A, float32 [ranks, padded inputs], and of B,
           float32 [pairs of column blocks, ranks, 32], and the ranks; all 0 where the product is not adapted
    ranks: the most of any product
    """

    def __init__(self, config: ModelConfig, layers: tuple[Layer, ...]) -> None:
        self.table: NDArray[np.int64] = np.zeros((config.num_layers, f.ADAPTED_PRODUCTS, f.ADAPTER_WORDS), np.int64)
        self.num_bytes = 0
        self._arrays: list[FloatArray] = []
        hidden, inner = round_up(config.hidden_size, 32), round_up(config.intermediate_size, 32)
        queries, keys = config.query_size, config.kv_size
        for row, layer in zip(self.table, layers, strict=True):
            starts: Starts = {"q_proj": (0,), "k_proj": (queries,), "v_proj": (queries + keys,), "qkv_proj": (0,)}
            self._add(row[f.ADAPT_QKV], layer, starts, round_up(queries + 2 * keys, 32), hidden)
            self._add(row[f.ADAPT_MIX], layer, {"o_proj": (0,)}, hidden, round_up(queries, 32))
            starts = {"gate_proj": (0,), "up_proj": (inner,), "gate_up_proj": (0, inner)}
            self._add(row[f.ADAPT_GATE_UP], layer, starts, 2 * inner, hidden)
            self._add(row[f.ADAPT_DOWN], layer, {"down_proj": (0,)}, hidden, inner)
        self.ranks = int(self.table[..., f.ADAPTER_RANKS].max())

    def _add(self, entry: NDArray[np.int64], layer: Layer, starts: Starts, outputs: int, inputs: int) -> None:
        parts = [(places, *layer[module]) for module, places in starts.items() if module in layer]
        if not parts:
            return
        ranks = round_up(sum(len(down) for _, down, _ in parts), _RANK_STEP)
        all_down = np.zeros((ranks, inputs), np.float32)
        all_up = np.zeros((outputs, ranks), np.float32)
        first = 0
        for places, down, up in parts:
            last = first + len(down)
            all_down[first:last, : down.shape[1]] = down
            for start, rows in zip(places, np.split(up, len(places)), strict=True):
                all_up[start : start + len(rows), first:last] = rows
            first = last
        if "gate_proj" in starts:
            all_up = interleave_blocks(all_up[: outputs // 2], all_up[outputs // 2 :])
        pairs = np.ascontiguousarray(all_up.reshape(outputs // 32, 32, ranks).transpose(0, 2, 1))
        for word, array in ((f.ADAPTER_DOWN, all_down), (f.ADAPTER_UP, pairs)):
            self._arrays.append(array)
            self.num_bytes += array.nbytes
            entry[word] = array.ctypes.data
        entry[f.ADAPTER_RANKS] = ranks
