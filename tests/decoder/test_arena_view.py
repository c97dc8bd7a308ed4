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

LAYOUT = KvLayout(2, 1, 8, 4, KvDtype.FLOAT32)
NONCE = bytes(range(32))


def info_of(layout: KvLayout, num_blocks: int) -> ArenaInfo:
    size = layout.arena_bytes(num_blocks)
    return ArenaInfo(num_blocks, layout.block_bytes, size, layout.fingerprint(), NONCE)


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
