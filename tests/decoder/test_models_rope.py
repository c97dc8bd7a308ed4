"""Rotary tables and attention factors against `transformers`' own functions, and the rule of the configured context."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import InvalidArgument
from decoder.models.rope import RopeConfig, frequencies, rotary_tables
from decoder.weights.hugging_face_config import config_from_hugging_face

transformers = pytest.importorskip("transformers")

BASE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
FACTORS = {"short_factor": [1.0 + 0.02 * n for n in range(32)], "long_factor": [1.0 + n for n in range(32)]}


def read(**values: Any) -> Any:
    """The configuration of a Llama with these keys."""
    return config_from_hugging_face({**BASE, **values})


def reference(settings: dict[str, Any], seq_len: int | None = None, **values: Any) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor by the function of `transformers`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(**{**BASE, **values}, rope_parameters={"rope_theta": 5e5, **settings})
    found, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, "cpu", seq_len=seq_len)
    return found.numpy(), float(factor)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16.0,
         "beta_slow": 2.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.2},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.25},
        {"rope_type": "dynamic", "factor": 4.0},
    ],
)  # fmt: skip
def test_scaling_equals_transformers(settings: dict[str, Any]) -> None:
    """Frequencies and attention factor of each scaling, in the new form of a config.json and in the old one."""
    want, factor = reference(dict(settings))
    config = read(rope_parameters={"rope_theta": 5e5, **settings})
    old = {"type" if key == "rope_type" else key: value for key, value in settings.items()}
    assert read(rope_theta=5e5, rope_scaling=old).rope == config.rope
    np.testing.assert_allclose(frequencies(config.rope, config.max_position), want, rtol=1e-6)
    assert config.rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("max_context", [4000, 4096, 4097, 16000])
def test_dynamic_stretches_with_the_configured_context(max_context: int) -> None:
    """Dynamic NTK is, for all sequences, what `transformers` computes for one of the configured length."""
    rope = read(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 5e5}).rope
    want, _ = reference({"rope_type": "dynamic", "factor": 4.0}, seq_len=max_context)
    np.testing.assert_allclose(frequencies(rope, max_context), want, rtol=1e-6)
    plain = frequencies(RopeConfig(5e5, 64), max_context)
    assert np.array_equal(frequencies(rope, max_context), plain) is (max_context <= 4096)
    assert (rope.identity(max_context) == rope.identity(100)) is (max_context <= 4096)


@pytest.mark.parametrize("max_context", [1024, 1025])
def test_longrope_equals_transformers(max_context: int) -> None:
    """Longrope has the short factors up to the trained context, the long ones beyond, and one attention factor."""
    settings = {"rope_type": "longrope", "original_max_position_embeddings": 1024, **FACTORS}
    want, factor = reference(dict(settings), seq_len=max_context)
    rope = read(rope_parameters={"rope_theta": 5e5, **settings}).rope
    np.testing.assert_allclose(frequencies(rope, max_context), want, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12) != 1.0
    assert rope.identity(1024) != rope.identity(1025) == rope.identity(4096)


def test_tables_are_the_angles_of_positions() -> None:
    """Row p of the tables is cos and sin of p times the frequencies, times the attention factor."""
    rope = RopeConfig(1e4, 48, "yarn", factor=4.0, original_context=256, attention_factor=1.5)
    cosines, sines = rotary_tables(rope, 700)
    assert cosines.dtype == sines.dtype == np.float32
    assert cosines.shape == sines.shape == (700, 24)
    angles = torch.arange(700).float()[:, None] * torch.from_numpy(frequencies(rope, 700))
    np.testing.assert_allclose(cosines, (angles.cos() * 1.5).numpy(), atol=2e-6)
    np.testing.assert_allclose(sines, (angles.sin() * 1.5).numpy(), atol=2e-6)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RopeConfig)])
def test_identity_holds_every_field(field: str) -> None:
    """A changed field changes the text that the cache key digests, for at least one scaling that uses it."""
    base = RopeConfig(1e4, 8, "longrope", 2.0, 64, 1.1, 1.0, 4.0, 32.0, 1.0, True, (1.0,) * 4, (2.0,) * 4)
    value = getattr(base, field)
    others: dict[str, Any] = {"kind": "yarn", "truncate": False}
    other = others.get(field, (3.0,) * 4 if isinstance(value, tuple) else value + 2 if field != "kind" else value)
    changed = dataclasses.replace(base, **{field: other})
    contexts = (64, 65)
    assert any(base.identity(context) != changed.identity(context) for context in contexts)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rope_type": "linear", "factor": 0.0}, "factor"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [0.0] * 32}, "long_factor"),
        ({"rope_type": "axial"}, "rope_type"),
        ({"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.01}, "rope.dim"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], name: str) -> None:
    """Settings that give no angles are refused by the name of the key."""
    with pytest.raises(InvalidArgument, match=name):
        read(rope_parameters=settings)
