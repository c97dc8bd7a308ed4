"""LoRA in the CPU's step: the logits of merged weights, and rows that no other row of the step can change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.models.grouping import quantize
from decoder.models.llama import CausalLM
from decoder.weights.adapter import load_adapter, module_shapes
from tests.decoder.model_rig import Sequence, make_config, make_model, poisoned_arena, random_tensors, run_prompt
from tests.decoder.model_rig import run_step as step
from tests.tiny_adapters import MODULES, adapter_config, adapter_tensors, merged, write_adapter

CONFIG = make_config()
PROMPT = np.random.default_rng(3).integers(3, 260, 75).astype(np.int32)
FloatArray = NDArray[np.float32]


def _adapter(path: Path, model: CausalLM, rank: int, modules: tuple[str, ...] = MODULES, seed: int = 0) -> Any:
    tensors = adapter_tensors(module_shapes(model.config), model.config.num_layers, rank, modules, seed)
    read = load_adapter(write_adapter(path, adapter_config(rank, modules), tensors), model.config)
    return model.pack_adapter(read.layers)


def _relative(got: FloatArray, want: FloatArray) -> float:
    return float((np.abs(got - want).max(-1) / np.abs(want).max(-1)).max())


def _root_mean_square(got: FloatArray, want: FloatArray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


@pytest.mark.parametrize(
    ("modules", "rank", "changes", "scale"),
    [
        (MODULES, 4, {}, 2.0),
        (("q_proj", "v_proj"), 5, {"use_rslora": True}, 10 / 5**0.5),
        (("up_proj",), 3, {"target_modules": r".*\.up_proj"}, 2.0),
        (("k_proj", "gate_proj", "down_proj"), 1, {"lora_alpha": 0.5}, 0.5),
    ],
)
def test_adapter_equals_merged_weights(
    tmp_path: Path, modules: tuple[str, ...], rank: int, changes: dict[str, Any], scale: float
) -> None:
    """In float32 the logits at every position are those of the model with W + scale * B A for its weights."""
    odd = make_config(heads=6, kv_heads=3, head_dim=16, hidden=72)  # nothing is a multiple of a tile
    tensors = random_tensors(odd)
    model = make_model(odd, tensors, "float32")
    deltas = adapter_tensors(module_shapes(odd), odd.num_layers, rank, modules)
    write_adapter(tmp_path / "a", adapter_config(rank, modules, **changes), deltas)
    adapter = model.pack_adapter(load_adapter(tmp_path / "a", odd).layers)
    want = run_prompt(make_model(odd, merged(tensors, deltas, scale), "float32"), PROMPT)
    got = run_prompt(model, PROMPT, adapter=adapter)
    assert _relative(got, want) < 1e-4
    assert _relative(run_prompt(model, PROMPT), want) > 1e-2  # without the adapter it is another model


def _mixed(model: CausalLM, adapters: list[Any], chunk: int) -> list[FloatArray]:
    """Logits of PROMPT under each adapter, all in the same steps: one of them in single tokens, others in chunks."""
    size = -(-PROMPT.size // model.layout.block_tokens)
    arena = poisoned_arena(model, len(adapters) * size)
    blocks = np.random.default_rng(1).permutation(len(adapters) * size).astype(np.int32) + 1
    parts = [Sequence(PROMPT, blocks[index * size :][:size], adapter=adapter) for index, adapter in enumerate(adapters)]
    while left := [part for part in parts if part.done < PROMPT.size]:
        counts = [1 if part is parts[1] else min(chunk, PROMPT.size - part.done) for part in left]
        step(model, arena, list(zip(left, counts, strict=True)))
    return [np.concatenate(part.logits) for part in parts]


@pytest.mark.parametrize("kernels", ["float32", "auto", "auto-kv-float16", "int8"])
def test_rows_of_base_and_adapters_share_steps_bit_by_bit(tmp_path: Path, kernels: str) -> None:
    """Base, adapter A (rank 4) and adapter B (rank 16) in one batch say what each says alone; so do chunks and a cached
    beginning. The three differ."""
    model = make_model(CONFIG, random_tensors(CONFIG), kernels)
    adapters = [None, _adapter(tmp_path / "a", model, 4), _adapter(tmp_path / "b", model, 16, seed=1)]
    alone = [run_prompt(model, PROMPT, adapter=adapter) for adapter in adapters]
    for chunk in (7, 64):
        for together, whole in zip(_mixed(model, adapters, chunk), alone, strict=True):
            assert np.array_equal(together, whole)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert _relative(alone[one], alone[other]) > 1e-2
    arena = poisoned_arena(model, 8)
    first = Sequence(PROMPT, np.arange(1, 9, dtype=np.int32), adapter=adapters[1])
    step(model, arena, [(first, PROMPT.size)])
    again = Sequence(PROMPT, first.blocks, done=33, adapter=adapters[1])
    step(model, arena, [(again, PROMPT.size - 33)])
    assert np.array_equal(again.logits[0], alone[1][33:])


@pytest.mark.parametrize("kernels", ["portable", "auto", "portable-kv-float32", "auto-kv-float32", "int8"])
def test_every_kernel_set_adds_the_adapter(tmp_path: Path, kernels: str) -> None:
    """An adapted model stays as near to float32 on the same weights as the base does, about, by the root of the mean
    square of all logits; without the adapter it would be far away."""
    tensors = random_tensors(CONFIG)
    if kernels == "int8":
        tensors = {name: quantize(it).values() if it.ndim == 2 else it for name, it in tensors.items()}
    exact, model = make_model(CONFIG, tensors, "float32"), make_model(CONFIG, tensors, kernels)
    plain = run_prompt(model, PROMPT)
    base = _root_mean_square(plain, run_prompt(exact, PROMPT))
    want = run_prompt(exact, PROMPT, adapter=_adapter(tmp_path / "a", exact, 8))
    got = run_prompt(model, PROMPT, adapter=_adapter(tmp_path / "a", model, 8))
    bound = max(4 * base, 1e-4)
    assert _root_mean_square(got, want) < bound < _root_mean_square(plain, want)


@pytest.mark.parametrize("inner", [96, 90])
def test_fused_matrices(tmp_path: Path, inner: int) -> None:
    """An adapter of Phi-3's fused matrices gives the logits of merged ones, also where no part fills whole tiles."""
    from tests.tiny_families import make_family  # needs transformers

    pytest.importorskip("transformers")
    from safetensors.numpy import load_file, save_file

    from decoder.weights import load_model

    make_family(tmp_path / "m", "phi3-short", intermediate_size=inner)
    model = load_model(tmp_path / "m", "float32", 16)
    modules = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    deltas = adapter_tensors(module_shapes(model.config), 2, 5, modules)
    write_adapter(tmp_path / "a", adapter_config(5, modules), deltas)
    adapter = model.pack_adapter(load_adapter(tmp_path / "a", model.config).layers)
    got = run_prompt(model, PROMPT, adapter=adapter)
    for path in (tmp_path / "m").glob("*.safetensors"):
        save_file(merged(load_file(path), deltas, 2.0), path)
    want = run_prompt(load_model(tmp_path / "m", "float32", 16), PROMPT)
    assert _relative(got, want) < 1e-4
    assert _relative(run_prompt(model, PROMPT), want) > 1e-2


def test_post_norms_and_gelu(tmp_path: Path) -> None:
    """Where a norm follows a branch, and gates are GELU, the adapter is inside of both (Gemma 2)."""
    from tests.tiny_families import make_family  # needs transformers

    pytest.importorskip("transformers")
    from decoder.weights import load_model

    make_family(tmp_path / "m", "gemma2")
    model = load_model(tmp_path / "m", "float32", 16)
    deltas = adapter_tensors(module_shapes(model.config), 2, 4)
    write_adapter(tmp_path / "a", adapter_config(4), deltas)
    from safetensors.numpy import load_file, save_file

    for path in sorted((tmp_path / "m").glob("*.safetensors")):
        stored = load_file(path)
        plain = {name.replace("model.language_model.", "model."): value for name, value in stored.items()}
        save_file(merged(plain, deltas, 2.0), path)
    want = run_prompt(load_model(tmp_path / "m", "float32", 16), PROMPT)
    adapter = model.pack_adapter(load_adapter(tmp_path / "a", model.config).layers)
    assert _relative(run_prompt(model, PROMPT, adapter=adapter), want) < 1e-4
    assert _relative(run_prompt(model, PROMPT), want) > 1e-2
