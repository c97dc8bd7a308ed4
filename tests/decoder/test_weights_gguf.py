"""GGUF files of every family against the Hugging Face directory that they were made from.

Names of tensors come from the table of the `gguf` package, so that ours is not checked against itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from decoder.weights import load_model
from decoder.weights.source import open_source
from tests.decoder.model_rig import run_prompt
from tests.decoder.test_models_families import PROMPT, relative_error
from tests.tiny_families import FAMILIES, make_family

Array = NDArray[np.float32]

# Family of `tests/tiny_families.py`: the architecture of its GGUF file, and what its metadata say besides sizes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "llama3": ("llama", {}),
    "llama-biases": ("llama", {}),
    "qwen2": ("qwen2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                        "rope.scaling.original_context_length": 256}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"attention.sliding_window": 270, "attn_logit_softcapping": 5.0,
                          "final_logit_softcapping": 3.0, "attention.scale": 24**-0.5}),
    "gemma3": ("gemma3", {"attention.sliding_window": 40, "attention.sliding_window_pattern": 2,
                          "rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "attention.scale": 24**-0.5}),
    "mixtral": ("llama", {"expert_count": 6, "expert_used_count": 2, "attention.sliding_window": 40}),
    "qwen2-moe": ("qwen2moe", {"expert_count": 32, "expert_used_count": 3, "expert_feed_forward_length": 48,
                               "expert_shared_feed_forward_length": 130}),
    "qwen3-moe": ("qwen3moe", {"expert_count": 40, "expert_used_count": 4, "expert_feed_forward_length": 48}),
    "phi3-long": ("phi3", {"attention.sliding_window": 300, "rope.scaling.original_context_length": 256}),
}  # fmt: skip


def write_gguf(
    directory: Path,
    target: Path,
    architecture: str,
    extra: dict[str, Any],
    type_of: Callable[[str], gguf.GGMLQuantizationType] = lambda name: gguf.GGMLQuantizationType.F32,
) -> None:
    """The directory's model as a GGUF file, with the changes that converters make to tensors.

    type_of: of a matrix of whole blocks, by its name in the file; all else is F32
    """
    config = json.loads((directory / "config.json").read_text())
    parsed = open_source(directory).config
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_block_count(parsed.num_layers)
    writer.add_context_length(parsed.max_position)
    writer.add_embedding_length(parsed.hidden_size)
    writer.add_feed_forward_length(parsed.intermediate_size)
    writer.add_head_count(parsed.num_heads)
    writer.add_head_count_kv(parsed.num_kv_heads)
    writer.add_key_length(parsed.head_dim)
    writer.add_value_length(parsed.head_dim)
    writer.add_layer_norm_rms_eps(parsed.norm_epsilon)
    writer.add_rope_freq_base(parsed.rope.theta)
    for key, value in extra.items():
        name = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], parsed.num_layers)
    for name, array in stack_experts(load_file(directory / "model.safetensors")).items():
        short = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert short is not None, name
        if name.endswith("shared_expert_gate.weight"):
            array = array[0]
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + np.float32(1.0)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = parsed.num_heads if "q_proj" in name else parsed.num_kv_heads
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        kind = type_of(short)
        if array.ndim < 2 or array.shape[-1] % 32 or kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(short, np.ascontiguousarray(array))
        else:
            writer.add_tensor(short, gguf.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    _add_divisors(writer, config, parsed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stack_experts(tensors: dict[str, Array]) -> dict[str, Array]:
    """The tensors with those of a layer's experts as one tensor of three dimensions."""
    stacked: dict[str, list[tuple[int, Array]]] = {}
    plain = {}
    for name, array in tensors.items():
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)
        if expert is None:
            plain[name] = array
        else:
            stacked.setdefault(expert[1] + expert[3], []).append((int(expert[2]), array))
    return plain | {name: np.stack([array for _, array in sorted(found, key=lambda item: item[0])])
                    for name, found in stacked.items()}  # fmt: skip


def _add_divisors(writer: Any, config: dict[str, Any], parsed: Any) -> None:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    if rope.get("rope_type") == "llama3":
        # The scaling of Llama 3 as converters write it: by wavelength, in plain steps.
        divisors = []
        for place in range(0, parsed.head_dim, 2):
            wave = 2 * np.pi * parsed.rope.theta ** (place / parsed.head_dim)
            low, high = 128 / rope["low_freq_factor"], 128 / rope["high_freq_factor"]
            if wave < high:
                divisors.append(1.0)
            elif wave > low:
                divisors.append(rope["factor"])
            else:
                mix = (128 / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
                divisors.append(1.0 / ((1 - mix) / rope["factor"] + mix))
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


# What the format cannot say: dense layers among those with experts, probabilities that do not sum to one.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2-moe": {"decoder_sparse_step": 1},
    "qwen3-moe": {"mlp_only_layers": [], "norm_topk_prob": True},
}


@pytest.mark.parametrize("name", list(CASES))
def test_gguf_equals_directory(tmp_path: Path, name: str) -> None:
    """The same model from both formats gives the same logits, so names, metadata and conventions are understood."""
    make_family(tmp_path / "hf", name, **CHANGES.get(name, {}))
    architecture, extra = CASES[name]
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf", architecture, extra)
    directory = load_model(tmp_path / "hf", "float32", 16)
    file = load_model(tmp_path / "model.gguf", "float32", 16)
    assert file.config.layers == directory.config.layers
    assert file.config.architecture == directory.config.architecture
    assert relative_error(run_prompt(file, PROMPT), run_prompt(directory, PROMPT)) < 1e-4


def test_every_family_has_a_case() -> None:
    """A family that is served from directories is served from GGUF too, or is named here."""
    from_directories_alone = {"mistral", "llama-odd-sizes", "phi3-short"}  # Llama and Phi-3 in this format
    assert set(FAMILIES) == set(CASES) | from_directories_alone


def test_stacked_experts_equal_single_ones(tmp_path: Path) -> None:
    """A directory with one tensor for all experts of a layer, gate and up together, gives the same bits."""
    make_family(tmp_path, "qwen3-moe")
    single = run_prompt(load_model(tmp_path, "float32", 16), PROMPT[:60])
    tensors = stack_experts(load_file(tmp_path / "model.safetensors"))
    for name in [name for name in tensors if name.endswith("experts.gate_proj.weight")]:
        both = [tensors.pop(name), tensors.pop(name.replace("gate_proj", "up_proj"))]
        tensors[name.replace("gate_proj.weight", "gate_up_proj")] = np.concatenate(both, axis=1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert np.array_equal(run_prompt(load_model(tmp_path, "float32", 16), PROMPT[:60]), single)
