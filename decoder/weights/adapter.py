"""Reads a LoRA adapter from disk: its tensors by layer and module, checked against the model, and the content's digest.

Invariant: every tensor of the file is used, of the shape that the model and the rank ask for, and finite, or the
adapter is refused by the tensor's name. The digest covers what is computed with and nothing else (no names or paths):
equal digests change hidden states equally. Knows no kernel.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from common.adapter_config import MODULES, TENSORS_FILE, AdapterConfig, read_adapter_config, refuse_adapter
from decoder.models.config import ModelConfig

FloatArray = NDArray[np.float32]
Shape = tuple[int, ...]

_TENSOR: Final = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(\d{1,4})\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight"
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as read.

    layers: for each layer, by module: A, float32 [rank, in], and scale * B, float32 [out, rank]
    digest: sha256 of all that
    """

    rank: int
    layers: tuple[Mapping[str, tuple[FloatArray, FloatArray]], ...]
    digest: bytes


def module_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every module that an adapter may change; experts' own are none of them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "q_proj": (config.query_size, hidden),
        "k_proj": (config.kv_size, hidden),
        "v_proj": (config.kv_size, hidden),
        "o_proj": (hidden, config.query_size),
    }
    if config.experts is None:
        shapes |= {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return shapes


def load_adapter(directory: Path, config: ModelConfig) -> Adapter:
    """Read an adapter for a model. Raises InvalidArgument naming what is wrong or not served, FileNotFoundError where
    it is not there any more."""
    settings = read_adapter_config(directory)
    try:
        file: Any = safe_open(str(directory / TENSORS_FILE), framework="pt")
        with file as tensors:
            return _collect(settings, config, tensors)
    except SafetensorError as error:
        raise refuse_adapter(f"{TENSORS_FILE} is no safetensors file: {error}") from None


def _collect(settings: AdapterConfig, config: ModelConfig, tensors: Any) -> Adapter:
    shapes = module_shapes(config)
    found: dict[tuple[int, str], dict[str, FloatArray]] = {}
    for name in sorted(tensors.keys()):
        layer, module, side = _place(name, settings, config, shapes)
        outputs, inputs = shapes[module]
        expected = (settings.rank, inputs) if side == "A" else (outputs, settings.rank)
        # The shape is looked at before anything of its size is read.
        shape = tuple(tensors.get_slice(name).get_shape())
        if shape != expected:
            raise refuse_adapter(f"tensor {name} has shape {shape}; expected {expected}")
        if side in found.setdefault((layer, module), {}):
            raise refuse_adapter(f"tensor {name} comes twice")
        found[layer, module][side] = _read(tensors, name)
    if not found:
        raise refuse_adapter(f"{TENSORS_FILE} holds no tensor")
    for (layer, module), sides in found.items():
        if len(sides) != 2:
            raise refuse_adapter(f"layer {layer}, {module}: lora_A and lora_B go together; one is missing")
    present = {module for _, module in found}
    for module in sorted((settings.modules or present) - present):
        raise refuse_adapter(f"target_modules names {module}, of which {TENSORS_FILE} holds nothing")
    layers: list[dict[str, tuple[FloatArray, FloatArray]]] = [{} for _ in range(config.num_layers)]
    for (layer, module), sides in found.items():
        layers[layer][module] = (sides["A"], sides["B"] * np.float32(settings.scale))
    return Adapter(settings.rank, tuple(layers), _digest(layers))


def _place(
    name: str, settings: AdapterConfig, config: ModelConfig, shapes: Mapping[str, Shape]
) -> tuple[int, str, str]:
    match = _TENSOR.fullmatch(name)
    if match is None:
        raise refuse_adapter(f"tensor {name} is not one of lora_A and lora_B of a layer's projections")
    layer, module, side = int(match[1]), match[2], match[3]
    if module not in shapes:
        allowed = ", ".join(name for name in MODULES if name in shapes)
        raise refuse_adapter(f"tensor {name}: {module} cannot be adapted in this model; allowed are {allowed}")
    if settings.modules is not None and module not in settings.modules:
        raise refuse_adapter(f"tensor {name}: target_modules does not name {module}")
    if layer >= config.num_layers:
        raise refuse_adapter(f"tensor {name}: the model has layers 0..{config.num_layers - 1}")
    return layer, module, side


def _read(tensors: Any, name: str) -> FloatArray:
    tensor = tensors.get_tensor(name)
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise refuse_adapter(f"tensor {name} is {tensor.dtype}; allowed are float32, bfloat16 and float16")
    values: FloatArray = tensor.to(torch.float32).contiguous().numpy()
    if not np.isfinite(values).all():
        raise refuse_adapter(f"tensor {name} holds a number that is not finite")
    return values


def _digest(layers: list[dict[str, tuple[FloatArray, FloatArray]]]) -> bytes:
    digest = hashlib.sha256(b"tessera-lora/1")
    for index, layer in enumerate(layers):
        for module, (down, up) in sorted(layer.items()):
            digest.update(struct.pack("<IIIII", index, MODULES.index(module), *down.shape, up.shape[0]))
            digest.update(down.tobytes())
            digest.update(up.tobytes())
    return digest.digest()
