"""Random LoRA adapters on disk in the form that PEFT saves, for tests. Never used by product code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

FloatArray = NDArray[np.float32]
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_tensors(
    shapes: dict[str, tuple[int, int]], layers: int, rank: int, modules: Sequence[str] = MODULES, seed: int = 0
) -> dict[str, FloatArray]:
    """Tensors by PEFT's names; `shapes` has the (outputs, inputs) of each module. B is as large as a trained one's."""
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(layers):
        for module in modules:
            outputs, inputs = shapes[module]
            part = "mlp" if module in ("gate_proj", "up_proj", "gate_up_proj", "down_proj") else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            down, up = random.standard_normal((rank, inputs)), random.standard_normal((outputs, rank))
            tensors[f"{name}.lora_A.weight"] = (down / np.sqrt(inputs)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = (up / np.sqrt(rank)).astype(np.float32)
    return tensors


def adapter_config(rank: int, modules: Sequence[str] = MODULES, **changes: Any) -> dict[str, Any]:
    """An adapter_config.json with the settings that PEFT writes and that matter."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "r": rank,
        "lora_alpha": 2 * rank, "lora_dropout": 0.05, "bias": "none", "fan_in_fan_out": False, "use_dora": False,
        "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None,
        "init_lora_weights": True, "target_modules": list(modules), **changes,
    }  # fmt: skip


def write_adapter(directory: Path, config: dict[str, Any], tensors: dict[str, FloatArray]) -> Path:
    """Write an adapter; returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merged(tensors: dict[str, FloatArray], adapter: dict[str, FloatArray], scale: float) -> dict[str, FloatArray]:
    """A model's tensors with scale * B A added to each adapted matrix."""
    result = dict(tensors)
    for name, down in adapter.items():
        if ".lora_A." in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            up = adapter[name.replace("lora_A", "lora_B")]
            result[target] = (tensors[target] + scale * (up @ down)).astype(np.float32)
    return result
