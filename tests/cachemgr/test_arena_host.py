"""HostArena: sealed, sparse, nonce in the null block, poison confined to the blocks named."""

from __future__ import annotations

import fcntl
import os

import numpy as np
import pytest

from cachemgr.arena.host import HostArena
from common.arena_sizes import ArenaSizes

NONCE = bytes(range(32))


@pytest.fixture
def arena():
    made = HostArena(ArenaSizes(4, 256), nonce=NONCE)
    yield made
    made.close()


def test_size_counts_the_null_block(arena):
    """The file holds one block more than are usable."""
    assert os.fstat(arena.fileno()).st_size == arena.arena_bytes == 5 * 256


def test_file_can_be_written_but_neither_grow_nor_shrink_nor_be_unsealed(arena):
    """Resizing and further sealing are refused by the kernel; writing is not."""
    os.pwrite(arena.fileno(), b"x", 300)
    for size in (arena.arena_bytes - 1, arena.arena_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fileno(), size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_memory_is_taken_only_when_written():
    """A pool far larger than the machine's memory costs nothing until it is used."""
    arena = HostArena(ArenaSizes(1 << 20, 1 << 20), nonce=NONCE)
    try:
        assert os.fstat(arena.fileno()).st_blocks * 512 <= 1 << 16
    finally:
        arena.close()


def test_nonce_begins_the_null_block(arena):
    """The first 32 bytes are the nonce."""
    assert os.pread(arena.fileno(), 32, 0) == NONCE


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_poison_fills_named_blocks_with_nan_and_no_other(arena, dtype):
    """Every element of a poisoned block is NaN; the neighbours keep their bytes."""
    os.pwrite(arena.fileno(), b"\x01" * 256, 256)
    arena.poison(np.array([2, 4], dtype=np.int32))
    for block, expected in ((2, True), (4, True), (1, False), (3, False)):
        values = np.frombuffer(os.pread(arena.fileno(), 256, block * 256), dtype=dtype)
        assert bool(np.isnan(values).all()) is expected
    assert os.pread(arena.fileno(), 32, 0) == NONCE


@pytest.mark.parametrize("block", [0, 5, -1])
def test_poison_refuses_the_null_block_and_blocks_beyond(arena, block):
    """No knob may overwrite the nonce or memory outside the pool."""
    with pytest.raises(ValueError, match=r"not in 1\.\.4"):
        arena.poison(np.array([block], dtype=np.int32))


@pytest.mark.parametrize(("num_blocks", "block_bytes", "nonce"), [(0, 256, NONCE), (1, 16, NONCE), (1, 256, b"short")])
def test_impossible_sizes_are_refused_by_name(num_blocks, block_bytes, nonce):
    """A wrong size or nonce raises ValueError before any memory is made."""
    with pytest.raises(ValueError, match=r"num_blocks|block_bytes|nonce"):
        HostArena(ArenaSizes(num_blocks, block_bytes), nonce=nonce)


def test_close_is_repeatable_and_final(arena):
    """After close there is no fd to hand over."""
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.fileno()


def test_window_blocks_are_poisoned_and_nothing_beside_them():
    """A window block is filled where the layout says that it lies; the blocks and its neighbours stay as they were."""
    sizes = ArenaSizes(4, 256, 3, 512)
    arena = HostArena(sizes, nonce=NONCE)
    assert os.fstat(arena.fileno()).st_size == sizes.arena_bytes == 4096 + 4 * 512
    arena.poison_windows(np.array([1, 3], dtype=np.int32))
    assert os.pread(arena.fileno(), 5 * 256, 0) == NONCE + bytes(5 * 256 - len(NONCE))
    wanted = bytes(512) + b"\xff" * 512 + bytes(512) + b"\xff" * 512
    assert os.pread(arena.fileno(), 4 * 512, sizes.window_offset) == wanted
    for block in (0, 4):
        with pytest.raises(ValueError, match=r"not in 1\.\.3"):
            arena.poison_windows(np.array([block], dtype=np.int32))
    arena.close()


def test_an_arena_without_groups_has_no_window_blocks():
    """Nothing comes after the blocks, and no window block can be named."""
    arena = HostArena(ArenaSizes(4, 256), nonce=NONCE)
    assert arena.arena_bytes == 5 * 256
    with pytest.raises(ValueError, match=r"not in 1\.\.0"):
        arena.poison_windows(np.array([1], dtype=np.int32))
    arena.close()
