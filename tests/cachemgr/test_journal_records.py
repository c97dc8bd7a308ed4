"""Records of the index journal: blocks of every size, checksums changed by hand, and memory that is given back."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from cachemgr import records
from cachemgr.journal import IndexJournal
from cachemgr.journal_file import create_journal
from cachemgr.recovery import recover
from tests.cachemgr.journal_rig import Entry, World, entries, identity, make_memory

BLOCKS, TOKENS = 24, 4
SIZES = (1, 2, 3, 4, 16)


def read(memory: np.ndarray, block_tokens: int) -> dict[int, Entry]:
    """What a daemon that starts now finds."""
    return entries(recover(IndexJournal(memory.copy())), block_tokens)


@pytest.mark.parametrize("block_tokens", SIZES)
def test_blocks_of_every_size_are_read_back(block_tokens: int) -> None:
    """Also of an odd number of tokens, where a record ends in a word that is no token."""
    memory = make_memory(BLOCKS, block_tokens)
    world = World(IndexJournal(memory), random.Random(block_tokens))
    most = 0
    for _ in range(40):
        world.step()
        assert read(memory, block_tokens) == world.listed
        most = max(most, len(world.listed))
    assert most > 3


def path_of_three(block_tokens: int) -> tuple[np.ndarray, IndexJournal]:
    """Blocks 3, 5 and 7, one after the other; 7 is recorded on its own."""
    memory = make_memory(BLOCKS, block_tokens)
    world = World(IndexJournal(memory), random.Random(0))
    tree = world._tree("alice", 0, 0)
    tokens = np.arange(1, 2 * block_tokens + 1, dtype="<i4").tobytes()
    world.journal.publish("alice", tree, 0, tokens, np.array([3, 5]), 0)
    world.journal.publish("alice", tree, 2, tokens[: 4 * block_tokens], np.array([7]), 5)
    world.journal.flush()
    return memory, IndexJournal(memory)


@pytest.mark.parametrize("block_tokens", SIZES)
def test_a_changed_bit_of_a_checksum_or_a_record_ends_the_path_there(block_tokens: int) -> None:
    """Each bit of the checksum of a block in the middle, and of each word of its record, padding too: the block is
    void, and so is the one below it; put right again, all three are there."""
    memory, journal = path_of_three(block_tokens)
    for bit in range(64):
        journal.checksums[5] ^= np.uint64(1 << bit)
        assert set(read(memory, block_tokens)) == {3}, f"bit {bit} of the checksum"
        journal.checksums[5] ^= np.uint64(1 << bit)
    assert journal.rows.shape[1] == records.HEAD_WORDS + block_tokens + block_tokens % 2
    for word in range(journal.rows.shape[1]):
        for bit in (0, 7, 16, 31):
            journal.rows[5, word] ^= np.uint32(1 << bit)
            assert set(read(memory, block_tokens)) == {3}, f"bit {bit} of word {word}"
            journal.rows[5, word] ^= np.uint32(1 << bit)
    assert set(read(memory, block_tokens)) == {3, 5, 7}


@pytest.mark.parametrize("block_tokens", SIZES)
def test_a_checksum_that_is_not_its_own_makes_no_block(block_tokens: int) -> None:
    """Another record's, an even one, none at all; and a record moved to another place with its checksum, unless it
    stands for the very same block there."""
    memory, journal = path_of_three(block_tokens)
    own = int(journal.checksums[5])
    for other in (int(journal.checksums[3]), int(journal.checksums[7]), own & ~1, 0, 1, own ^ (1 << 64) - 1):
        journal.checksums[5] = other
        assert set(read(memory, block_tokens)) == {3}
    journal.checksums[5] = own
    journal.rows[5], journal.checksums[5] = journal.rows[7].copy(), journal.checksums[7]
    assert set(read(memory, block_tokens)) == {3}


def test_memory_that_is_given_back_is_not_lost(tmp_path: Path) -> None:
    """After `release` nothing of the file counts to this process, and all that was written is there."""
    path = tmp_path / "index.journal"
    world = World(create_journal(path, identity(BLOCKS, TOKENS), 7), random.Random(2))
    for _ in range(10):
        world.step()
    assert resident(path) > 0
    world.journal.release()
    assert resident(path) == 0
    assert read(np.fromfile(path, np.uint8), TOKENS) == world.listed
    world.step()
    assert entries(recover(world.journal), TOKENS) == world.listed


def resident(path: Path) -> int:
    """KiB of a mapped file that count to this process."""
    lines = iter(Path("/proc/self/smaps").read_text("ascii").splitlines())
    return sum(
        int(next(line for line in lines if line.startswith("Rss:")).split()[1])
        for line in lines
        if line.endswith(str(path))
    )
