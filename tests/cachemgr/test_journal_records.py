"""Records of the index journal: blocks of every size, checksums changed by hand, and writes to the file beside its
mapping."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from cachemgr import journal_rows, records
from cachemgr.journal import IndexJournal
from cachemgr.journal_file import create_journal, open_journal
from cachemgr.recovery import recover
from tests.cachemgr.journal_rig import Died, Entry, World, entries, identity, make_memory

BLOCKS, TOKENS = 24, 4
SIZES = (1, 2, 3, 4, 16)


def read(memory: np.ndarray, block_tokens: int) -> dict[int, Entry]:
    """What a daemon that starts now finds."""
    return entries(recover(IndexJournal(memory.copy())), block_tokens)


def read_file(path: Path) -> dict[int, Entry]:
    """The same, of a file."""
    again = open_journal(path, b"b" * 16)
    assert again is not None
    return entries(recover(again), TOKENS)


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


@pytest.mark.parametrize("seed", range(4))
def test_what_is_written_to_the_file_is_what_would_be_stored(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that go by writes, in any order of their blocks and in pieces, leave the same bytes as stores in memory."""
    monkeypatch.setattr(journal_rows, "LEAST_RUN", 1)
    calls = []
    whole = os.pwrite

    def in_pieces(fd: int, data: memoryview, offset: int) -> int:
        calls.append(len(data))
        return whole(fd, data[: max(1, len(data) // 2)], offset)

    monkeypatch.setattr(os, "pwrite", in_pieces)
    path, memory = tmp_path / "index.journal", make_memory(BLOCKS, TOKENS)
    worlds = [
        World(create_journal(path, identity(BLOCKS, TOKENS), 7), random.Random(seed)),
        World(IndexJournal(memory), random.Random(seed)),
    ]
    for step in range(40):
        for world in worlds:
            world.step()
        if step % 5 == 0:
            worlds[0].journal.release()
    assert path.read_bytes() == memory.tobytes()
    assert read_file(path) == worlds[1].listed
    assert len(calls) > 40


@pytest.mark.parametrize(
    ("blocks", "writes"),
    [
        (range(20, 60), 1),
        (range(60, 20, -1), 1),
        ([*range(20, 40), *range(60, 80)], 2),
        ([*range(80, 60, -1), *range(40, 20, -1)], 2),
        (range(20, 100, 2), 0),
        (range(20, 30), 0),
    ],
)
def test_only_long_runs_are_written(
    blocks: range | list[int], writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One write for each run of neighbours, upwards or downwards; scattered blocks and few go through the mapping."""
    path = tmp_path / "index.journal"
    world = World(create_journal(path, identity(120, TOKENS), 7), random.Random(0))
    calls = []
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: calls.append(offset) or whole(fd, data, offset))
    tokens = np.arange(len(blocks) * TOKENS, dtype="<i4")
    world.journal.publish("alice", world._tree("alice", 0, 0), 0, tokens.tobytes(), np.array(blocks), 0)
    assert len(calls) == writes
    found = read_file(path)
    assert [found[block][3:] for block in blocks] == [
        (place, tuple(range(place * TOKENS, (place + 1) * TOKENS))) for place in range(len(blocks))
    ]


def test_a_death_inside_a_write_leaves_whole_paths_of_before_or_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in any write, a part of it done: as after a death in any store of the mapping."""
    monkeypatch.setattr(journal_rows, "LEAST_RUN", 1)
    whole = os.pwrite
    path, lives, over = tmp_path / "index.journal", 0, False
    while not over:
        left, torn = lives, random.Random(lives)

        def mortal(fd: int, data: memoryview, offset: int, torn: random.Random = torn) -> int:
            nonlocal left
            left -= 1
            if left >= 0:
                return whole(fd, data, offset)
            whole(fd, data[: torn.randrange(len(data) + 1)], offset)
            raise Died

        world = World(create_journal(path, identity(BLOCKS, TOKENS), 7), random.Random(5))
        over = True
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", mortal)
            try:
                for _ in range(25):
                    world.step()
            except Died:
                over = False
        world.check_after_death(read_file(path), f"{lives} writes")
        lives += 1
    assert lives > 15


def test_a_write_that_fails_lists_nothing_and_the_journal_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is not on record, nor is what hangs below it; what comes afterwards is."""
    monkeypatch.setattr(journal_rows, "LEAST_RUN", 2)
    path = tmp_path / "index.journal"
    world = World(create_journal(path, identity(BLOCKS, TOKENS), 7), random.Random(0))
    tree, tokens = world._tree("alice", 0, 0), np.arange(2 * TOKENS, dtype="<i4").tobytes()

    def refuse(_fd: int, _data: memoryview, _offset: int) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        world.journal.publish("alice", tree, 0, tokens, np.array([3, 4]), 0)
    world.journal.publish("alice", tree, 2, tokens, np.array([5, 6]), 4)
    world.journal.publish("alice", tree, 0, tokens, np.array([8, 9]), 0)
    assert set(read_file(path)) == {8, 9}


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
