"""Reads a LoRA adapter from disk: its tensors by layer and module, checked against the model, and the content's digest.

Invariant: every tensor of the file is used, of the shape that the model and the rank ask for, and finite, or the
adapter is refused by the tensor's name. The digest covers what is computed with and nothing else (no names or paths):
equal digests change hidden states equally. Knows no kernel.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from common.adapter_config import MODULES, TENSORS_FILE, AdapterConfig, read_adapter_config, refuse_adapter
from common.errors import ResourceExhausted
from common.memory import available_bytes
from decoder.models.config import ModelConfig
from decoder.models.packing import round_up

_RANK_STEP: Final = 4  # a step takes ranks by so many
FloatArray = NDArray[np.float32]
Shape = tuple[int, ...]

_EXPERT_NAMES: Final = (".experts.", ".shared_expert.", ".block_sparse_moe.", ".mlp.gate.", ".shared_expert_gate.")
# Modules whose matrices are one product of a step, with the outputs of all of it.
_PRODUCTS: Final = (
    ("q_proj", "k_proj", "v_proj", "qkv_proj"), ("o_proj",), ("gate_proj", "up_proj", "gate_up_proj"), ("down_proj",),
)  # fmt: skip
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
    """Outputs and inputs of every module that an adapter may change; experts' own are none of them, and fused ones only
    where a model is saved with them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    fused = config.architecture == "phi3"
    shapes = {
        "q_proj": (config.query_size, hidden),
        "k_proj": (config.kv_size, hidden),
        "v_proj": (config.kv_size, hidden),
        "o_proj": (hidden, config.query_size),
    }
    if fused:
        shapes |= {"qkv_proj": (config.query_size + 2 * config.kv_size, hidden), "gate_up_proj": (2 * inner, hidden)}
    if config.experts is None:
        shapes |= {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return shapes


def needed_bytes(config: ModelConfig, layers: Iterable[Collection[str]], rank: int) -> int:
    """Bytes of an adapter with these modules in each layer while it is loaded: as it is read, in float32, and beside it
    as a step reads it, where the modules of a product are one pair of matrices with all of its outputs."""
    shapes = module_shapes(config)
    elements = 0
    for modules in layers:
        elements += sum(rank * sum(shapes[module]) for module in modules)
        for product in _PRODUCTS:
            ranks = round_up(rank * sum(module in modules for module in product), _RANK_STEP)
            elements += ranks * _product_size(config, product)
    return 4 * elements


def _product_size(config: ModelConfig, product: Sequence[str]) -> int:
    hidden, inner = round_up(config.hidden_size, 32), round_up(config.intermediate_size, 32)
    sizes = {"q_proj": round_up(config.query_size + 2 * config.kv_size, 32), "o_proj": round_up(config.query_size, 32)}
    return hidden + sizes.get(product[0], 2 * inner if "up_proj" in product else inner)


def load_adapter(directory: Path, config: ModelConfig, available: Callable[[], int] = available_bytes) -> Adapter:
    """Read an adapter for a model. Raises InvalidArgument naming what is wrong or not served, FileNotFoundError where
    it is not there any more, and ResourceExhausted, before a tensor is read, where it needs more memory than is there.
    """
    settings = read_adapter_config(directory)
    try:
        file: Any = safe_open(str(directory / TENSORS_FILE), framework="pt")
        with file as tensors:
            return _collect(settings, config, tensors, available)
    except SafetensorError as error:
        raise refuse_adapter(f"{TENSORS_FILE} is no safetensors file: {error}") from None


def _collect(settings: AdapterConfig, config: ModelConfig, tensors: Any, available: Callable[[], int]) -> Adapter:
    shapes = module_shapes(config)
    modules: list[set[str]] = [set() for _ in range(config.num_layers)]
    for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
        layer, module, _ = _place(name, settings, config, shapes)
        modules[layer].add(module)
    needed, usable = needed_bytes(config, modules, settings.rank), available()
    if needed > usable:
        raise ResourceExhausted(
            f"the adapter needs {needed} bytes of memory and {usable} are free", subject="adapter_bytes", needed=needed,
            usable=usable, reason="ADAPTER_EXCEEDS_MEMORY",
        )  # fmt: skip
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
    if any(part in name for part in _EXPERT_NAMES):
        raise refuse_adapter(f"tensor {name}: experts are not adapted; it would take low-rank products of each")
    if match is None:
        raise refuse_adapter(f"tensor {name} is not one of lora_A and lora_B of a layer's projections")
    layer, module, side = int(match[1]), match[2], match[3]
    if module not in shapes:
        allowed = ", ".join(name for name in MODULES if name in shapes)
        why = "" if config.experts is None else ", which has experts"
        raise refuse_adapter(f"tensor {name}: {module} cannot be adapted in this model{why}; allowed are {allowed}")
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
