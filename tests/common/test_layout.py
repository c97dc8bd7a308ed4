"""The KV layout: sizes, and a fingerprint that tells every geometry apart."""

from __future__ import annotations

import dataclasses

import pytest

from common.layout import KvDtype, KvLayout

BASE = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=16, dtype=KvDtype.BFLOAT16)


def test_block_of_an_eight_billion_model_is_two_mebibytes() -> None:
    """The size that the VMM granularity was chosen for."""
    assert BASE.block_bytes == 2 * 1024**2
    assert BASE.arena_bytes(7) == 8 * BASE.block_bytes
    assert [BASE.blocks_for(n) for n in (1, 15, 16, 17)] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 31}, {"num_kv_heads": 4}, {"head_dim": 64}, {"block_tokens": 32}, {"dtype": KvDtype.FLOAT16}],
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
        ({"quantization": "int3"}, "quantization"),
    ],
)
def test_impossible_geometry_is_refused_by_name(change: dict[str, object], said: str) -> None:
    """A size that no kernel serves is refused, naming the field."""
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(BASE, **change)  # type: ignore[arg-type]
