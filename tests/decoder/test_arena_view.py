"""The mapped arena: shared memory and not a copy, and nothing that does not fit is ever mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.arena_frames import ArenaInfo
from common.errors import FailedPrecondition
from common.layout import KvDtype, KvLayout
from decoder import arena_view
from decoder.grouped_arena import GroupedArena

LAYOUT = KvLayout(2, 1, 8, 4, KvDtype.FLOAT32)
NONCE = bytes(range(32))


def info_of(layout: KvLayout, num_blocks: int) -> ArenaInfo:
    sizes = layout.sizes(num_blocks)
    info = ArenaInfo(num_blocks, layout.block_bytes, sizes.arena_bytes, layout.fingerprint(), NONCE)
    return replace(info, num_window_blocks=sizes.num_window_blocks, window_block_bytes=sizes.window_block_bytes)


@pytest.fixture
def memory() -> Iterator[int]:
    """A memory file of nine blocks with the nonce at its start."""
    fd = os.memfd_create("arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, LAYOUT.arena_bytes(8))
    os.pwrite(fd, NONCE, 0)
    yield fd
    os.close(fd)


def hand_over(monkeypatch: pytest.MonkeyPatch, memory: int, info: ArenaInfo) -> list[int]:
    given: list[int] = []

    def fetch(path: Path, token: bytes) -> tuple[int, ArenaInfo]:
        given.append(os.dup(memory))
        return given[-1], info

    monkeypatch.setattr(arena_view, "fetch_arena", fetch)
    return given


@pytest.mark.parametrize(
    ("dtype", "kind"), [(KvDtype.FLOAT32, np.float32), (KvDtype.BFLOAT16, np.uint16), (KvDtype.FLOAT16, np.uint16)]
)
def test_the_array_is_the_memory(monkeypatch: pytest.MonkeyPatch, memory: int, dtype: KvDtype, kind: type) -> None:
    """Shape and type are the layout's; a write is seen through the fd, which is kept until `close`."""
    layout = replace(LAYOUT, dtype=dtype)
    os.ftruncate(memory, layout.arena_bytes(8))
    given = hand_over(monkeypatch, memory, info_of(layout, 8))
    mapped = arena_view.map_arena(Path("x"), b"t" * 16, layout, 8)
    arena = mapped.array
    assert (arena.shape, arena.dtype) == ((9, 2, 2, 1, 4, 8), kind)
    assert arena.flags.writeable and arena.flags.c_contiguous
    arena[3, 1, 0, 0, 2, 5] = 42
    offset = 3 * layout.block_bytes + ((1 * 2 + 0) * 4 * 8 + 2 * 8 + 5) * arena.itemsize
    assert np.frombuffer(os.pread(memory, arena.itemsize, offset), kind)[0] == 42
    os.fstat(given[0])
    mapped.close()
    mapped.close()
    arena[3, 1, 0, 0, 2, 5] = 43
    with pytest.raises(OSError):
        os.fstat(given[0])


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
def test_with_groups_the_window_blocks_are_a_second_array_of_the_same_memory(
    monkeypatch: pytest.MonkeyPatch, memory: int, kv_dtype: str
) -> None:
    """Shapes are those of the two groups; a write into either is seen through the fd where the sizes say."""
    layout = KvLayout.of(3, 1, 8, 4, kv_dtype, 9, (0, 2))
    sizes = layout.sizes(20)
    os.ftruncate(memory, sizes.arena_bytes)
    hand_over(monkeypatch, memory, info_of(layout, 20))
    mapped = arena_view.map_arena(Path("x"), b"t" * 16, layout, 20)
    arena = mapped.array
    assert isinstance(arena, GroupedArena) and mapped.read_nonce() == NONCE
    assert arena.blocks.shape == (21, *layout.full_group.array_shape)
    assert arena.window_blocks.shape == (sizes.num_window_blocks + 1, *layout.window_group.array_shape)
    last = (-1,) * arena.window_blocks.ndim
    arena.blocks[last], arena.window_blocks[last] = 42, 43
    for value, end in ((42, sizes.blocks_bytes), (43, sizes.arena_bytes)):
        item = arena.blocks.itemsize
        assert np.frombuffer(os.pread(memory, item, end - item), arena.blocks.dtype)[0] == value
    assert arena.of.shape == (21,) and not arena.of.any()
    mapped.close()


def test_without_groups_the_arena_is_one_array(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """Positive control."""
    hand_over(monkeypatch, memory, info_of(LAYOUT, 8))
    mapped = arena_view.map_arena(Path("x"), b"t" * 16, LAYOUT, 8)
    assert isinstance(mapped.array, np.ndarray)
    mapped.close()


def test_window_blocks_of_another_number_are_refused(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """Both sides work the number out from the layout; the message has both."""
    layout = KvLayout.of(3, 1, 8, 4, "float32", 9, (0, 2))
    hand_over(monkeypatch, memory, replace(info_of(layout, 20), num_window_blocks=7))
    with pytest.raises(FailedPrecondition, match=r"7 \+ 1 window blocks.*expected.*8 \+ 1 window blocks") as caught:
        arena_view.map_arena(Path("x"), b"t" * 16, layout, 20)
    assert caught.value.reason == "ARENA_SIZE"


def test_another_nonce_is_refused(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """Memory that does not carry the daemon's nonce is not the arena."""
    os.pwrite(memory, b"\xff", 5)
    given = hand_over(monkeypatch, memory, info_of(LAYOUT, 8))
    with pytest.raises(FailedPrecondition) as caught:
        arena_view.map_arena(Path("x"), b"t" * 16, LAYOUT, 8)
    assert caught.value.reason == "ARENA_NONCE"
    with pytest.raises(OSError):
        os.fstat(given[0])


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (info_of(replace(LAYOUT, num_layers=1), 8), "LAYOUT_MISMATCH"),
        (replace(info_of(LAYOUT, 8), num_blocks=7), "ARENA_SIZE"),
        (replace(info_of(LAYOUT, 8), block_bytes=LAYOUT.block_bytes // 2), "ARENA_SIZE"),
        (replace(info_of(LAYOUT, 8), arena_bytes=0), "ARENA_NONCE"),
        (replace(info_of(LAYOUT, 8), arena_bytes=2**60), "ARENA_MAP"),
    ],
)
def test_what_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, memory: int, info: ArenaInfo, reason: str
) -> None:
    """Another fingerprint, size or block is refused with its reason, and no fd stays open."""
    given = hand_over(monkeypatch, memory, info)
    if info.arena_bytes == 0:
        os.pwrite(memory, b"\xff", 0)
    with pytest.raises(FailedPrecondition) as caught:
        arena_view.map_arena(Path("x"), b"t" * 16, LAYOUT, 8)
    assert caught.value.reason == reason
    with pytest.raises(OSError):
        os.fstat(given[0])
