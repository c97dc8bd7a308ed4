"""The KV layout: sizes, and a fingerprint that tells every geometry apart."""

from __future__ import annotations

import dataclasses

import pytest

from common.layout import KV_DTYPES, QUANTIZATIONS, KvDtype, KvLayout

BASE = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=16, dtype=KvDtype.BFLOAT16)


def test_block_of_an_eight_billion_model_is_two_mebibytes() -> None:
    """The size that the VMM granularity was chosen for."""
    assert BASE.block_bytes == 2 * 1024**2
    assert BASE.arena_bytes(7) == 8 * BASE.block_bytes
    assert [BASE.blocks_for(n) for n in (1, 15, 16, 17)] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 31},
        {"num_kv_heads": 4},
        {"head_dim": 64},
        {"block_tokens": 32},
        {"dtype": KvDtype.FLOAT16},
        {"quantization": "int8"},
        {"quantization": "fp8_e4m3"},
        {"window_tokens": 4096},
    ],
)
def test_every_number_changes_the_fingerprint(change: dict[str, object]) -> None:
    """Layouts that differ in one number never have one fingerprint; equal ones always do."""
    assert BASE.fingerprint() == dataclasses.replace(BASE).fingerprint()
    assert dataclasses.replace(BASE, **change).fingerprint() != BASE.fingerprint()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"block_tokens": 24}, "block_tokens"),
        ({"window_tokens": -1}, "window_tokens"),
        ({"quantization": "int3"}, "quantization"),
        ({"quantization": "int8", "dtype": KvDtype.FLOAT32}, "dtype is float32; beside int8 scales are bfloat16"),
    ],
)
def test_impossible_geometry_is_refused_by_name(change: dict[str, object], said: str) -> None:
    """A size that no kernel serves is refused, naming the field."""
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(BASE, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_names_of_types_lead_to_layouts(kv_dtype: str) -> None:
    """Each name gives a layout of its own, and the layout its name."""
    layouts = {name: KvLayout.of(2, 3, 64, 16, name) for name in KV_DTYPES}
    assert layouts[kv_dtype].kv_dtype == kv_dtype
    assert [name for name in KV_DTYPES if layouts[name].fingerprint() == layouts[kv_dtype].fingerprint()] == [kv_dtype]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_dtype", QUANTIZATIONS)
def test_a_quantised_block_holds_elements_and_scales(kv_dtype: str, head_dim: int) -> None:
    """(head_dim + 2) bytes a token, head and plane, scales last: 1.9 times the tokens of bfloat16 and more."""
    layout = KvLayout.of(2, 3, head_dim, 16, kv_dtype)
    rows = 2 * 2 * 3 * 16
    assert (layout.scales_offset, layout.block_bytes) == (rows * head_dim, rows * (head_dim + 2))
    assert layout.array_shape == (layout.block_bytes,)
    assert KvLayout.of(2, 3, head_dim, 16, "bfloat16").token_bytes >= 1.9 * layout.token_bytes
