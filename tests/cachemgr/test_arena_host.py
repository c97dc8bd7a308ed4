"""HostArena: sealed, sparse, nonce in the null block, poison confined to the blocks named."""

from __future__ import annotations

import fcntl
import os

import numpy as np
import pytest

from cachemgr.arena.host import HostArena

NONCE = bytes(range(32))


@pytest.fixture
def arena():
    made = HostArena(num_blocks=4, block_bytes=256, nonce=NONCE)
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
    arena = HostArena(num_blocks=1 << 20, block_bytes=1 << 20, nonce=NONCE)
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
        HostArena(num_blocks=num_blocks, block_bytes=block_bytes, nonce=nonce)


def test_close_is_repeatable_and_final(arena):
    """After close there is no fd to hand over."""
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.fileno()
