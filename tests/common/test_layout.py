"""The KV layout: sizes, and a fingerprint that tells every geometry apart."""

from __future__ import annotations

import dataclasses
from typing import Any

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


def grouped(**changes: Any) -> KvLayout:
    """Six layers, of which the third and the last read all keys; the others 40."""
    sizes: dict[str, Any] = {
        "num_layers": 6, "num_kv_heads": 1, "head_dim": 8, "block_tokens": 16, "kv_dtype": "float16",
        "window_tokens": 40, "window_layers": (0, 1, 3, 4),
    }  # fmt: skip
    return KvLayout.of(**{**sizes, **changes})


def test_layers_with_a_window_lie_in_window_blocks_and_the_others_in_blocks() -> None:
    layout = grouped()
    assert [layout.place_of(layer) for layer in range(6)] == [
        (True, 0), (True, 1), (False, 0), (True, 2), (True, 3), (False, 1),
    ]  # fmt: skip
    assert layout.block_bytes == layout.full_group.block_bytes == 2 * 2 * 8 * 2 * 16
    assert layout.window_group.block_bytes == 2 * layout.block_bytes
    assert layout.token_bytes * 16 == layout.block_bytes + layout.window_group.block_bytes
    assert layout.block_shape[0] == 2 and layout.window_group.block_shape[0] == 4


def test_window_blocks_stand_behind_the_blocks_and_suffice_for_two_sequences() -> None:
    layout = grouped()
    assert layout.window_reach == 5
    assert [layout.num_window_blocks(count) for count in (4, 12, 30, 31, 3000)] == [4, 10, 10, 11, 1000]
    offset = layout.window_offset(30)
    assert offset % 4096 == 0 and 0 <= offset - 31 * layout.block_bytes < 4096
    assert layout.arena_bytes(30) == offset + 11 * layout.window_group.block_bytes


@pytest.mark.parametrize("layout", [grouped(), grouped(window_tokens=4000), grouped(window_layers=())])
def test_the_most_blocks_that_fit_into_bytes(layout: KvLayout) -> None:
    """So many blocks fit with their window blocks, the null ones on top, and one more does not."""
    for num_bytes in (0, layout.block_bytes, 70_000, 1_234_567):
        count = layout.blocks_in(num_bytes)

        def taken(count: int) -> int:
            windows = layout.num_window_blocks(count)
            return count * layout.block_bytes + (windows * layout.window_group.block_bytes if windows else 0)

        assert taken(count) <= num_bytes < taken(count + 1)


def test_without_groups_there_are_no_window_blocks() -> None:
    layout = grouped(window_layers=())
    assert layout.num_window_blocks(1000) == 0 and layout.full_group is layout
    assert layout.arena_bytes(30) == 31 * layout.block_bytes
    with pytest.raises(ValueError, match="no window blocks"):
        _ = layout.window_group


def test_groups_are_part_of_the_fingerprint() -> None:
    prints = {
        grouped().fingerprint(),
        grouped(window_layers=()).fingerprint(),
        grouped(window_layers=(0,)).fingerprint(),
        grouped(window_share=2).fingerprint(),
    }
    assert len(prints) == 4
    assert grouped(window_layers=(), window_share=2).fingerprint() == grouped(window_layers=()).fingerprint()


def test_the_share_of_window_blocks_is_the_layouts() -> None:
    """One for each block, for two or for three; in sizes, and in what fits into bytes."""
    for share in (1, 2, 3):
        layout = grouped(window_share=share)
        assert layout.num_window_blocks(3000) == 3000 // share
        assert layout.bytes_per_block == layout.block_bytes + layout.window_group.block_bytes / share
        assert layout.blocks_in(int(3000 * layout.bytes_per_block) + 1) == 3000
        assert layout.full_group == grouped(window_share=3).full_group
        assert layout.window_group == grouped(window_share=3).window_group


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_tokens": 0}, "both or neither"),
        ({"window_layers": (1, 0)}, "ascending"),
        ({"window_layers": (0, 6)}, "0..5"),
        ({"window_layers": tuple(range(6))}, "all layers"),
        ({"window_share": 0}, "window_share is 0"),
        ({"window_share": 4}, "allowed is 1..3"),
    ],
)
def test_window_layers_that_make_no_group_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped(**changes)
