"""Where weights lie in a device's memory: from the config alone, aligned, apart, named by a digest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import InvalidArgument
from decoder.models.config import ExpertsConfig, LayerConfig, ModelConfig
from decoder.models.device_layout import ALIGNMENT, FIRST_OFFSET, Place, device_layout
from decoder.models.device_weights import Experts, OwnMemory, load_weights
from decoder.models.rope import RopeConfig
from decoder.weights.loader import expected_shapes

CONFIG = ModelConfig(
    "gemma3_text", 100, 2, 4, 2, 16, 64, 96, 1e-6, RopeConfig(1e6, 16), 128, (2,), None, False,
    layers=(LayerConfig(window=9, local=True), LayerConfig()), local_rope=RopeConfig(1e4, 16),
    qkv_bias=True, qk_norms=True, post_norms=True,
)  # fmt: skip


def test_every_tensor_has_a_place_of_its_own() -> None:
    """Aligned, in order, none over another or over the header; each tensor of the common form is in exactly one."""
    layout = device_layout(CONFIG, torch.bfloat16)
    end, sources = FIRST_OFFSET, list[str]()
    for place in layout.places.values():
        assert place.offset >= end and place.offset % ALIGNMENT == 0
        end = place.offset + place.num_bytes
        sources += place.sources
    assert end <= layout.num_bytes < end + ALIGNMENT
    assert sorted(sources) == sorted(expected_shapes(CONFIG))
    assert len(layout.ropes) == 2


@pytest.mark.parametrize("change", [{"max_position": 129}, {"vocab_size": 101}, {"tie_embeddings": True}])
def test_the_digest_follows_from_the_places(change: dict[str, Any]) -> None:
    """Equal configs have equal digests; another size, tensor or type has another."""
    digest = device_layout(CONFIG, torch.bfloat16).digest()
    assert digest == device_layout(replace(CONFIG), torch.bfloat16).digest()
    assert digest != device_layout(replace(CONFIG, **change), torch.bfloat16).digest()
    assert digest != device_layout(CONFIG, torch.float16).digest()


def test_what_is_filled_is_not_read() -> None:
    """A second load in the same memory reads no tensor, and has the first one's."""
    shapes, numbers = expected_shapes(CONFIG), np.random.default_rng(0)
    memory = OwnMemory(torch.device("cpu"))
    read = list[str]()

    def reading(name: str) -> Any:
        read.append(name)
        return numbers.standard_normal(shapes[name]).astype("f4")

    first = load_weights(CONFIG, reading, torch.float32, lambda done: None, lambda layout: memory)
    assert sorted(read) == sorted(shapes) and memory.filled
    second = load_weights(CONFIG, reading, torch.float32, lambda done: None, lambda layout: memory)
    assert len(read) == len(shapes)
    assert second.layers[1].mlp.gate_up.data_ptr() == first.layers[1].mlp.gate_up.data_ptr()
    assert first.layers[0].qkv.shape == (64 + 2 * 32, 64) and first.layers[0].window == 9


def with_experts(count: int, shared: int = 0) -> ModelConfig:
    """One layer of experts of 32, and one without."""
    layers = (LayerConfig(experts=True), LayerConfig())
    return replace(CONFIG, experts=ExpertsConfig(count, 2, 32, True, shared), layers=layers)


@pytest.mark.parametrize("shared", [0, 48])
def test_experts_lie_together(shared: int) -> None:
    """Every tensor of the common form has a place; those of all experts are one run, the router's gate its last row."""
    config = with_experts(4, shared)
    layout, shapes = device_layout(config, torch.bfloat16), expected_shapes(config)
    sources = [name for place in layout.places.values() for name in place.sources]
    assert sorted(sources) == sorted(shapes)
    numbers = {name: np.random.default_rng(i).random(shapes[name], "f4") for i, name in enumerate(shapes)}
    done: list[float] = []
    memory = OwnMemory(torch.device("cpu"))
    weights = load_weights(config, numbers.__getitem__, torch.float32, done.append, lambda _: memory)
    experts = weights.layers[0].mlp
    assert isinstance(experts, Experts) and not isinstance(weights.layers[1].mlp, Experts)
    prefix = "model.layers.0.mlp."
    assert np.array_equal(experts.gate_up[3, 32:], numbers[f"{prefix}experts.3.up_proj.weight"])
    assert np.array_equal(experts.down[2], numbers[f"{prefix}experts.2.down_proj.weight"])
    assert np.array_equal(experts.router[:4], numbers[f"{prefix}gate.weight"])
    assert (experts.shared is None) == (not shared)
    if experts.shared is not None:
        assert np.array_equal(experts.router[4], numbers[f"{prefix}shared_expert_gate.weight"])
        assert experts.shared.down.shape == (64, 48)
    assert done == [1 / 3, 2 / 3]


def test_more_experts_than_a_router_has_are_refused_by_name() -> None:
    """Before any memory is asked for."""
    with pytest.raises(InvalidArgument, match=r"experts\.count"):
        device_layout(with_experts(1025), torch.float32)
    assert Place("x", (), (3, 5), torch.float32).num_bytes == 60
