"""LoRA in a device step: the logits and the tokens of the CPU's step, several adapters in one batch, recorded steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import Internal, ResourceExhausted
from common.layout import KvDtype
from decoder.adapter_pool import AdapterUse
from decoder.batch import StepBatch
from decoder.kernels.lora.plan import group_rows
from decoder.models import device_model
from decoder.models.config import ModelConfig
from decoder.models.device_inputs import DecodeShape
from decoder.models.device_model import DeviceModel
from decoder.weights import load_model
from decoder.weights.adapter import load_adapter, module_shapes
from decoder.weights.source import open_source
from tests.decoder.model_rig import make_model, random_tensors
from tests.decoder.rig import Node, request
from tests.kernels.interpreted.test_device_model import VOCAB, CountingRecorder, Row, batch_of, config_of, model_of
from tests.kernels.rig import DEVICE
from tests.tiny_adapters import MODULES, adapter_config, adapter_tensors, merged, write_adapter
from tests.tiny_models import make_tiny_llama

ODD = {"num_heads": 6, "num_kv_heads": 3, "hidden_size": 72, "intermediate_size": 90}  # nothing is a multiple of a tile
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def layers_of(path: Path, config: ModelConfig, rank: int, modules: tuple[str, ...] = MODULES, seed: int = 0) -> Any:
    """The layers of an adapter, as they are read."""
    tensors = adapter_tensors(module_shapes(config), config.num_layers, rank, modules, seed)
    return load_adapter(write_adapter(path, adapter_config(rank, modules), tensors), config).layers


def with_adapters(batch: StepBatch, *adapters: Any) -> StepBatch:
    return replace(batch, adapters=adapters)


def steps_of(model: Any, arena: Any, adapters: list[Any], tokens: np.ndarray) -> list[np.ndarray]:
    """Logits of steps with every adapter: chunks, a chunk beside decodes, decodes alone."""
    rows = [Row(tokens, [2 * index + 1, 2 * index + 2]) for index in range(len(adapters))]
    steps = [
        [(0, 18), (1, 9), (2, 11)],
        [(0, 1), (2, 1), (1, 7)],
        [(0, 1), (1, 1), (2, 1)],
        [(2, 1), (0, 1)],
    ]
    results = []
    for step in steps:
        batch = batch_of([(rows[index], count) for index, count in step])
        batch = with_adapters(batch, *(adapters[index] for index, _ in step))
        results.append(model.forward(batch, arena).copy())
    return results


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        (config_of(**ODD), MODULES),
        (
            config_of(qkv_bias=True, post_norms=True, architecture="gemma2", activation="gelu_tanh"),
            ("v_proj", "up_proj"),
        ),
        (config_of(architecture="phi3"), FUSED),
    ],
    ids=["odd", "some", "fused"],
)
def test_logits_equal_those_of_the_cpu(tmp_path: Path, config: ModelConfig, modules: tuple[str, ...]) -> None:
    """Two adapters of different ranks and a row without one, in the same steps: as the CPU's step has them; and the
    three differ."""
    layers = [layers_of(tmp_path / "a", config, 4, modules), None, layers_of(tmp_path / "b", config, 20, modules, 1)]
    tokens = np.random.default_rng(3).integers(0, VOCAB, 30).astype(np.int32)
    tensors, logits = random_tensors(config), []
    device = model_of(config, tensors=tensors)
    for model in (make_model(config, tensors, "float32"), device):
        adapters = [None if it is None else model.pack_adapter(it) for it in layers]
        arena = np.full((8, *device.layout.block_shape), np.nan, np.float32)
        blocks = arena if model is not device or DEVICE.type == "cpu" else torch.from_numpy(arena).to(DEVICE)
        logits.append(steps_of(model, blocks, adapters, tokens))
    for want, got in zip(*logits, strict=True):
        assert np.abs(want - got).max() < 1e-3
        assert np.array_equal(want.argmax(1), got.argmax(1))
    ninth = logits[1][0][[8, 18 + 8, 27 + 8]]  # the same token at the same place of each sequence
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(ninth[one] - ninth[two]).max() > 1e-2


def test_recorded_steps_serve_any_adapters(tmp_path: Path) -> None:
    """Three decodes: another adapter in a recorded shape is the one that is used; a batch without adapters is a
    recording of its own, with the bits of a model that never had one; what an adapter does not change costs nothing."""
    config = config_of()
    recordings = CountingRecorder()
    model, plain = model_of(config, recorder=recordings), model_of(config)
    a, b = (model.pack_adapter(layers_of(tmp_path / str(seed), config, 4, seed=seed)) for seed in range(2))
    values = model.pack_adapter(layers_of(tmp_path / "v", config, 4, ("v_proj",), 2))
    assert (a.products, values.products) == (0b1111, 0b0001)
    groups = group_rows([values, None], np.array([0, 1, 2], np.int32))
    assert DecodeShape.of(batch_of([(Row(np.arange(2), [1]), 1)]), None, groups).products == 0b0001
    arena = torch.randn((8, *model.layout.block_shape), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows = [Row(np.arange(20), [1, 2]), Row(np.arange(20), [3, 4]), Row(np.arange(20), [5, 6])]

    def run(*adapters: Any, model: DeviceModel = model) -> np.ndarray:
        for row in rows:
            row.done = 17
        batch = batch_of([(row, 1) for row in rows])
        return model.forward(with_adapters(batch, *adapters), arena).copy()

    base = run(model=plain)
    first, second, other = run(a, None, b), run(b, None, a), run()
    assert recordings.recorded == 2
    assert np.array_equal(other, base)
    assert np.abs(first[1] - base[1]).max() < 1e-5
    for one, two in ((first[0], base[0]), (first[2], base[2]), (first[0], second[0])):
        assert np.abs(one - two).max() > 1e-2
    assert np.array_equal(run(a, None, b), first)
    assert np.abs(run(values, None, None)[0] - base[0]).max() > 1e-3
    assert recordings.recorded == 3
    with pytest.raises(Internal, match="another number of sequences"):
        run(a)


def test_a_device_without_room_refuses_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device's allocator raises is the refusal of an adapter that needs too much."""
    config = config_of()

    def full(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(device_model, "DeviceAdapter", full)
    with pytest.raises(ResourceExhausted, match="GPU's memory"):
        model_of(config).pack_adapter(layers_of(tmp_path / "a", config, 4))


def test_narrow_adapters(tmp_path: Path) -> None:
    """In bfloat16 an adapter gives the logits of merged weights within its rounding."""
    config = config_of(num_layers=1)
    deltas = adapter_tensors(module_shapes(config), 1, 4)
    layers = load_adapter(write_adapter(tmp_path / "a", adapter_config(4), deltas), config).layers
    tensors, tokens = random_tensors(config), np.random.default_rng(7).integers(0, VOCAB, 7)
    logits = []
    for weights, adapted in ((tensors, True), (merged(tensors, deltas, 2.0), False), (tensors, False)):
        model = model_of(config, KvDtype.BFLOAT16, tensors=weights)
        arena = torch.zeros((3, *model.layout.block_shape), dtype=torch.bfloat16, device=DEVICE)
        batch = batch_of([(Row(tokens, [2]), 7)])
        if adapted:
            batch = with_adapters(batch, model.pack_adapter(layers))
        logits.append(model.forward(batch, arena).copy())
    got, want, base = logits
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()
    assert np.abs(base - want).max() > 0.2 * np.abs(want).max()


def test_an_engine_gives_the_tokens_of_the_cpu_model(tmp_path: Path) -> None:
    """Two adapters and the base at once, chunked, decoded and sampled: tokens as on the CPU."""
    folder = make_tiny_llama(tmp_path / "tiny", hidden=32, heads=2, kv_heads=1, intermediate=64, max_position=256)
    on_cpu = load_model(folder, "float32", 16)
    config = on_cpu.config
    on_device = DeviceModel(config, on_cpu.layout, on_cpu.digests, open_source(folder).read, DEVICE)
    layers = [layers_of(tmp_path / "a", config, 4), layers_of(tmp_path / "b", config, 16, ("q_proj", "v_proj"), 1)]
    prompt = np.random.default_rng(1).integers(3, 512, 21).tolist()
    tokens = []
    for model in (on_cpu, on_device):
        arena = np.full((41, *model.layout.block_shape), np.nan, np.float32)
        blocks = arena if model is on_cpu or DEVICE.type == "cpu" else torch.from_numpy(arena).to(DEVICE)
        node = Node(40, model=model, arena=blocks, chunk_tokens=16)
        uses = [AdapterUse(model.pack_adapter(it), bytes([index] * 32)) for index, it in enumerate(layers)]
        for number, use in enumerate((None, *uses), 1):
            node.submit(replace(request(number, prompt, max_tokens=4), adapter=use))
        node.submit(
            replace(request(4, prompt[:9], max_tokens=3, num_samples=2, temperature=1.0, seed=3), adapter=uses[0])
        )
        node.finish(1, 2, 3, 4)
        node.assert_quiet()
        tokens.append(node.sink.tokens)
    assert tokens[0] == tokens[1]
    assert len({tuple(value) for value in list(tokens[0].values())[:3]}) > 1
