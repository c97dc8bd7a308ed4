"""A LoRA adapter in a device's memory, in the form that `decoder/kernels/lora/` reads, in the model's type.

Owns the memory that its table points at; nothing writes it after it is made. The projections of one product (q, k and
v; gate and up) are one A, below each other, and one B, whose rows are the product's outputs. Made by
`DeviceModel.pack_adapter`, from any thread; work that a device still has to do with it is ahead of whatever gets its
memory next, as both are on the same stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from decoder.kernels.lora import plan as p
from decoder.models.config import ModelConfig
from decoder.models.packing import FloatArray, round_up

Layer = Mapping[str, tuple[FloatArray, FloatArray]]

# Modules of each product: those of one part each, and the one of all.
_MODULES: Final = (
    (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    (("o_proj",), ""),
    (("gate_proj", "up_proj"), "gate_up_proj"),
    (("down_proj",), ""),
)


def part_ends(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """By product: where each part of its outputs ends."""
    queries, keys, inner = config.query_size, config.kv_size, config.intermediate_size
    hidden = (config.hidden_size,)
    return (queries, queries + keys, queries + 2 * keys), hidden, (inner, 2 * inner), hidden


class DeviceAdapter:
    """One adapter. address, lowered, products: see `decoder.kernels.lora.plan.Packed`."""

    def __init__(
        self, config: ModelConfig, layers: tuple[Layer, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._tensors: list[torch.Tensor] = []
        self.num_bytes = 0
        table = np.zeros((config.num_layers, p.PRODUCTS, p.ENTRY_WORDS), np.int64)
        for entries, layer in zip(table, layers, strict=True):
            for entry, (modules, fused), ends in zip(entries, _MODULES, part_ends(config), strict=True):
                self._add(entry, layer, modules, fused, ends)
        self.lowered = int(table[..., p.ENTRY_LOWERED].max())
        present = (table[..., p.ENTRY_LOWERED] > 0).any(axis=0)
        self.products = sum(1 << product for product in np.flatnonzero(present).tolist())
        self._table = torch.from_numpy(table).to(device)
        self.address = self._table.data_ptr()

    def _add(
        self, entry: np.ndarray, layer: Layer, modules: tuple[str, ...], fused: str, ends: tuple[int, ...]
    ) -> None:
        whole = layer.get(fused)
        parts = [layer.get(module) for module in modules]
        begins = (0, *ends[:-1])
        if whole is None and not any(parts):
            return
        # What a part goes down to: the fused module's, then its own.
        sources = []
        for part, begin, end in zip(parts, begins, ends, strict=True):
            shared = [] if whole is None else [(whole[0], whole[1][begin:end])]
            sources.append(shared if part is None else [*shared, part])
        ranks = round_up(max(sum(len(down) for down, _ in source) for source in sources), p.RANK_STEP)
        once = whole is not None and not any(parts)
        inputs = next(down.shape[1] for source in sources for down, _ in source)
        down = np.zeros((1 if once else len(parts), ranks, inputs), np.float32)
        up = np.zeros((ends[-1], ranks), np.float32)
        for index, (source, begin, end) in enumerate(zip(sources, begins, ends, strict=True)):
            first = 0
            for own_down, own_up in source:
                last = first + len(own_down)
                down[0 if once else index, first:last] = own_down
                up[begin:end, first:last] = own_up
                first = last
        entry[p.ENTRY_A], entry[p.ENTRY_B] = self._hold(down), self._hold(up)
        entry[p.ENTRY_RANKS], entry[p.ENTRY_STRIDE] = ranks, 0 if once else ranks
        entry[p.ENTRY_MASK] = sum(1 << index for index, source in enumerate(sources) if source)
        entry[p.ENTRY_LOWERED] = down.shape[0] * ranks

    def _hold(self, array: FloatArray) -> int:
        tensor = torch.from_numpy(array).to(self._dtype).to(self._device)
        self._tensors.append(tensor)
        self.num_bytes += tensor.nbytes
        return tensor.data_ptr()
