"""Weights of a model as torch tensors on a device: matrices in the model's type, norms and rotary tables in float32.

Owns how they are read from the common form (`decoder/weights/`) into the places of `device_layout.py`, in memory that
the caller gives. Built once at load, read by `device_step.py`.
"""

# Methods of torch without annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from decoder.models.config import ModelConfig
from decoder.models.device_layout import DeviceLayout, Place, device_layout
from decoder.models.matrices import Read
from decoder.models.rope import rotary_tables

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Feed:
    """A gated feed-forward part: gate_up [2 * inner, hidden], down [hidden, inner]."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: router float32 [experts, hidden], with a row more for the gate of `shared` where there is one;
    gate_up [experts, 2 * inner, hidden], down [experts, hidden, inner]."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: Feed | None


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One layer. Norm weights float32; `qkv` [queries + 2 * kv, hidden].

    attention_post_norm and mlp_post_norm norm what a half puts out before it is added (None without); head_norms are
    those of single query and key heads. window 0 means all keys.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: Feed | Experts
    mlp_post_norm: torch.Tensor | None
    rotation: Rotation
    window: int


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """All weights of a model."""

    embedding: torch.Tensor
    layers: tuple[DeviceLayer, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


class WeightMemory(Protocol):
    """Where the tensors of one model lie. Where it is `filled`, what is taken is there already and is not written."""

    filled: bool

    def take(self, place: Place) -> torch.Tensor:
        """The tensor of a place; the same memory each time."""

    def finish(self) -> None:
        """Everything is written. Tensors that were taken before are not used any more; it is `filled` from now on."""


MakeWeightMemory = Callable[[DeviceLayout], WeightMemory]


class OwnMemory:
    """This process's own tensors on a device."""

    filled = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}

    def take(self, place: Place) -> torch.Tensor:
        if place.name not in self._tensors:
            self._tensors[place.name] = torch.empty(place.shape, dtype=place.dtype, device=self._device)
        return self._tensors[place.name]

    def finish(self) -> None:
        self.filled = True


def load_weights(
    config: ModelConfig,
    read: Read,
    dtype: torch.dtype,
    report: Callable[[float], None],
    make_memory: MakeWeightMemory,
) -> DeviceWeights:
    """The weights in memory of `make_memory`; where that is filled, nothing is read, else every tensor once.

    Raises InvalidArgument, by name, on a setting that the device step does not compute, and what `make_memory` raises.
    """
    layout = device_layout(config, dtype)
    memory = make_memory(layout)
    if not memory.filled:
        _fill(config, layout, memory, read, report)
        memory.finish()
    return _weights(config, layout, memory)


def _fill(
    config: ModelConfig, layout: DeviceLayout, memory: WeightMemory, read: Read, report: Callable[[float], None]
) -> None:
    for index, rope in enumerate(layout.ropes):
        for kind, table in zip(("cosines", "sines"), rotary_tables(rope, config.max_position), strict=True):
            memory.take(layout.places[f"rope.{index}.{kind}"]).copy_(torch.from_numpy(np.ascontiguousarray(table)))
    done = 0
    for place in layout.places.values():
        if not place.sources:
            continue
        target, row = memory.take(place), 0
        for name in place.sources:
            # Converted before it is moved, so that what goes over the bus is what is kept.
            part = torch.from_numpy(np.array(read(name), np.float32)).to(place.dtype)
            if part.ndim < target.ndim:
                part = part[None]  # the gate of a shared expert is one row of a router
            target[row : row + len(part)].copy_(part)
            row += len(part)
        if place.name.endswith((".down", ".expert_down")):
            done += 1
            report(done / (config.num_layers + 1))


def _weights(config: ModelConfig, layout: DeviceLayout, memory: WeightMemory) -> DeviceWeights:
    tensors = {name: memory.take(place) for name, place in layout.places.items()}
    rotations = {
        rope: (tensors[f"rope.{index}.cosines"], tensors[f"rope.{index}.sines"])
        for index, rope in enumerate(layout.ropes)
    }

    def feed(own: str) -> Feed:
        biases = (tensors.get(f"{own}{name}_bias") for name in ("gate_up", "down"))
        return Feed(tensors[f"{own}gate_up"], tensors[f"{own}down"], *biases)

    def experts(own: str) -> Experts:
        down = tensors[f"{own}expert_down"]
        apart = (down.shape[0] // config.hidden_size, -1)
        gate_up = tensors[f"{own}expert_gate_up"].unflatten(0, apart)
        shared = feed(f"{own}shared_") if f"{own}shared_down" in tensors else None
        return Experts(tensors[f"{own}router"], gate_up, down.unflatten(0, apart), shared)

    def layer(index: int) -> DeviceLayer:
        own = f"layer.{index}."
        return DeviceLayer(
            input_norm=tensors[f"{own}input_norm"],
            qkv=tensors[f"{own}qkv"],
            qkv_bias=tensors.get(f"{own}qkv_bias"),
            head_norms=(tensors[f"{own}query_norm"], tensors[f"{own}key_norm"]) if config.qk_norms else None,
            output=tensors[f"{own}output"],
            output_bias=tensors.get(f"{own}output_bias"),
            attention_post_norm=tensors.get(f"{own}attention_post_norm"),
            mlp_norm=tensors[f"{own}mlp_norm"],
            mlp=feed(own) if f"{own}down" in tensors else experts(own),
            mlp_post_norm=tensors.get(f"{own}mlp_post_norm"),
            rotation=rotations[config.layer_rope(index)],
            window=config.layers[index].window or 0,
        )

    embedding = tensors["embedding"]
    layers = tuple(layer(index) for index in range(config.num_layers))
    return DeviceWeights(embedding, layers, tensors["final_norm"], tensors.get("head", embedding))
