"""Weights of a model as torch tensors on a device: matrices in the model's type, norms and rotary tables in float32.

Owns which tensors of the common form (`decoder/weights/`) a layer has, and in which order they are fused. Built once
at load, read by `device_step.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.models.config import ModelConfig, refuse
from decoder.models.rope import rotary_tables
from decoder.models.weights import Read

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One layer. Norm weights float32; `qkv` [queries + 2 * kv, hidden], `gate_up` [2 * inner, hidden].

    attention_post_norm and mlp_post_norm norm what a half puts out before it is added (None without); head_norms are
    those of single query and key heads. window 0 means all keys.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: torch.Tensor
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
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


def load_weights(
    config: ModelConfig, read: Read, device: torch.device, dtype: torch.dtype, report: Callable[[float], None]
) -> DeviceWeights:
    """Read every tensor once. Raises InvalidArgument, by name, on a setting that the device step does not compute."""
    if config.experts is not None:
        raise refuse("experts", config.experts.count, "models without experts on a GPU")

    def matrix(*names: str) -> torch.Tensor:
        parts = [torch.from_numpy(np.array(read(name), np.float32)).to(dtype) for name in names]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(device)

    def vector(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(read(name), np.float32)).to(device)

    rotations = {
        rope: _rotation(rotary_tables(rope, config.max_position), device)
        for rope in {config.layer_rope(layer) for layer in range(config.num_layers)}
    }
    layers = []
    for index, settings in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        post, projections = config.post_norms, [f"{attention}{name}_proj" for name in "qkv"]
        after_attention = f"{prefix}post_attention_layernorm.weight"
        layers.append(
            DeviceLayer(
                input_norm=vector(f"{prefix}input_layernorm.weight"),
                qkv=matrix(*(f"{name}.weight" for name in projections)),
                qkv_bias=matrix(*(f"{name}.bias" for name in projections)) if config.qkv_bias else None,
                head_norms=(
                    (vector(f"{attention}q_norm.weight"), vector(f"{attention}k_norm.weight"))
                    if config.qk_norms
                    else None
                ),
                output=matrix(f"{attention}o_proj.weight"),
                attention_post_norm=vector(after_attention) if post else None,
                mlp_norm=vector(f"{prefix}pre_feedforward_layernorm.weight" if post else after_attention),
                gate_up=matrix(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
                down=matrix(f"{mlp}down_proj.weight"),
                mlp_post_norm=vector(f"{prefix}post_feedforward_layernorm.weight") if post else None,
                rotation=rotations[config.layer_rope(index)],
                window=settings.window or 0,
            )
        )
        report((index + 1) / (config.num_layers + 1))
    embedding = matrix("model.embed_tokens.weight")
    head = embedding if config.tie_embeddings else matrix("lm_head.weight")
    return DeviceWeights(embedding, tuple(layers), vector("model.norm.weight"), head)


def _rotation(tables: tuple[NDArray[np.float32], NDArray[np.float32]], device: torch.device) -> Rotation:
    cosines, sines = (torch.from_numpy(np.ascontiguousarray(table)).to(device) for table in tables)
    return cosines, sines
