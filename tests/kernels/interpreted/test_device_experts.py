"""Mixtures of experts in a device step: the logits and the tokens of the CPU's step, in fixed memory, with adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.layout import KvDtype
from decoder.kernels.mixture import triton
from decoder.models.config import ExpertsConfig, LayerConfig
from decoder.models.device_model import DeviceModel
from decoder.weights import load_model
from decoder.weights.source import open_source
from tests.decoder.model_rig import make_model, random_tensors
from tests.decoder.rig import Node, request
from tests.kernels.interpreted.test_device_adapters import layers_of, steps_of
from tests.kernels.interpreted.test_device_model import VOCAB, Row, arena_of, batch_of, config_of, model_of
from tests.kernels.rig import DEVICE

ALL = (LayerConfig(experts=True),) * 2
CONFIGS = {
    "mixtral": config_of(architecture="mixtral", experts=ExpertsConfig(4, 2, 48), layers=ALL),
    "qwen2-moe": config_of(
        architecture="qwen2_moe", qkv_bias=True, experts=ExpertsConfig(5, 3, 24, False, 40),
        layers=(LayerConfig(experts=True), LayerConfig()),
    ),
    "qwen3-moe": config_of(architecture="qwen3_moe", qk_norms=True, experts=ExpertsConfig(9, 2, 24), layers=ALL),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_the_cpu(tmp_path: Path, name: str) -> None:
    """Chunks, decodes beside them and decodes alone, one sequence with an adapter of attention's matrices: as the CPU's
    step has them."""
    config = CONFIGS[name]
    layers = layers_of(tmp_path / "a", config, 4, ("q_proj", "v_proj", "o_proj"))
    tokens = np.random.default_rng(3).integers(0, VOCAB, 30).astype(np.int32)
    tensors, logits = random_tensors(config), []
    device = model_of(config, tensors=tensors)
    for model in (make_model(config, tensors, "float32"), device):
        arena = np.full((8, *device.layout.block_shape), np.nan, np.float32)
        blocks = arena if model is not device or DEVICE.type == "cpu" else torch.from_numpy(arena).to(DEVICE)
        logits.append(steps_of(model, blocks, [None, model.pack_adapter(layers), None], tokens))
    for want, got in zip(*logits, strict=True):
        assert np.abs(want - got).max() < 1e-3
        assert np.array_equal(want.argmax(1), got.argmax(1))


def test_empty_places_choose_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five decodes in a bucket of eight: the three places that are nobody's take no slot of an expert; each row alone
    has the logits of all together."""
    config = CONFIGS["mixtral"]
    model = model_of(config)
    routes, mix = [], triton.mix

    def noted(*arguments: object, **options: object) -> None:
        routes.append(mix(*arguments, **options))  # type: ignore[arg-type]

    monkeypatch.setattr("decoder.models.device_step.mix", noted)
    arena = torch.randn((11, *model.layout.block_shape), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows = [Row(np.arange(index, index + 20), [2 * index + 1, 2 * index + 2]) for index in range(5)]

    def run(chosen: list[Row]) -> np.ndarray:
        for row in chosen:
            row.done = 17
        return model.forward(batch_of([(row, 1) for row in chosen]), arena).copy()

    together = run(rows)
    assert len(routes) == 2
    for route in routes:
        assert route.choices.shape == (8, 2)
        assert (route.choices[5:] == -1).all() and (route.choices[:5] >= 0).all()
        assert int((route.sources.view(-1, route.rows)[route.owners >= 0] >= 0).sum()) == 5 * 2
    for index, row in enumerate(rows):
        assert np.abs(run([row])[0] - together[index]).max() < 1e-4


def test_warm_up_reaches_both_sizes_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small steps of a start, and one row more, compute with every block size that serving has."""
    model, sizes, mix = model_of(CONFIGS["qwen3-moe"]), set(), triton.mix

    def noted(*arguments: object, **options: object) -> None:
        sizes.add(mix(*arguments, **options).rows)  # type: ignore[arg-type]

    monkeypatch.setattr("decoder.models.device_step.mix", noted)
    model.warm_up()
    assert sizes == {config.rows for config in triton.configs(90, 4)} == {16, 32}


def test_an_expert_that_is_another_would_be_seen() -> None:
    """Control: with two experts exchanged the logits are others, beyond what is allowed."""
    config = CONFIGS["qwen3-moe"]
    tensors = random_tensors(config)
    first, second = "model.layers.1.mlp.experts.0.", "model.layers.1.mlp.experts.1."
    swapped = {
        (second if name.startswith(first) else first) + name[len(first) :]: value
        for name, value in tensors.items()
        if name.startswith((first, second))
    }
    batch = batch_of([(Row(np.arange(25), [1, 2]), 25)])
    one, two = (
        model.forward(batch, arena_of(model, 2)).copy()
        for model in (model_of(config, tensors=tensors), model_of(config, tensors={**tensors, **swapped}))
    )
    assert np.abs(one - two).max() > 1e-2


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_an_engine_gives_the_tokens_of_the_cpu_model(tmp_path: Path, name: str) -> None:
    """A model as `transformers` saves it, in chunks, decoded and sampled: tokens as on the CPU."""
    pytest.importorskip("transformers")
    from tests.tiny_families import make_family

    make_family(tmp_path, name)
    on_cpu = load_model(tmp_path, "float32", 16)
    source = open_source(tmp_path)
    on_device = DeviceModel(on_cpu.config, on_cpu.layout, on_cpu.digests, source.read, DEVICE)
    prompt = np.random.default_rng(1).integers(3, 300, 21).tolist()
    tokens = []
    for model in (on_cpu, on_device):
        arena = np.full((41, *model.layout.block_shape), np.nan, np.float32)
        blocks = arena if model is on_cpu or DEVICE.type == "cpu" else torch.from_numpy(arena).to(DEVICE)
        node = Node(40, model=model, arena=blocks, chunk_tokens=16)
        node.submit(request(1, prompt, max_tokens=4))
        node.submit(request(2, prompt[:9], max_tokens=3, num_samples=2, temperature=1.0, seed=3))
        node.finish(1, 2)
        node.assert_quiet()
        tokens.append(node.sink.tokens)
    assert tokens[0] == tokens[1]


def test_a_narrow_mixture() -> None:
    """bfloat16 weights and keys: the median of the error over positions is within its rounding, since a rounding may
    change a router's choice."""
    config = CONFIGS["qwen3-moe"]
    tensors, tokens = random_tensors(config), np.random.default_rng(7).integers(0, VOCAB, 12)
    exact = model_of(config, tensors=tensors)
    want = exact.forward(batch_of([(Row(tokens, [1]), 12)]), arena_of(exact, 2)).copy()
    model = model_of(config, KvDtype.BFLOAT16, tensors=tensors)
    arena = torch.zeros((3, *model.layout.block_shape), dtype=torch.bfloat16, device=DEVICE)
    got = model.forward(batch_of([(Row(tokens, [1]), 12)]), arena).copy()
    assert np.median(np.abs(got - want).max(1) / np.abs(want).max(1)) < 0.03
