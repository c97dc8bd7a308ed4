"""The index journal: what it was told is what is read back, and nothing else ever is, whatever happens to its bytes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from cachemgr.journal import IndexJournal
from cachemgr.journal_file import boot_id, create_journal, discard_journal, open_journal
from cachemgr.journal_format import Sections
from cachemgr.journal_processes import HolderProcess, HolderTable, start_time_of
from cachemgr.nodes import Tree
from cachemgr.records import RecordHash
from cachemgr.recovery import recover
from common.errors import FailedPrecondition
from tests.cachemgr.journal_rig import Died, Entry, Fate, World, entries, identity, make_memory, mortal

BLOCKS, TOKENS = 24, 4


def read(memory: np.ndarray) -> dict[int, Entry]:
    """What a daemon that starts now finds."""
    return entries(recover(IndexJournal(memory.copy())), TOKENS)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_what_was_published_and_not_unpublished_is_read_back(seed: int, each: bool) -> None:
    """After any series of publications and evictions, a reader finds exactly the blocks that are listed."""
    memory = make_memory(BLOCKS, TOKENS)
    world = World(IndexJournal(memory), random.Random(seed), each=each)
    most = 0
    for _ in range(60):
        world.step()
        assert read(memory) == world.listed
        most = max(most, len(world.listed))
    assert most > 3


def test_a_journal_that_was_read_goes_on() -> None:
    """A new daemon writes on in the journal of the one before it, and the next one finds the records of both."""
    memory = make_memory(BLOCKS, TOKENS)
    world = World(IndexJournal(memory), random.Random(1))
    for life in range(6):
        journal = IndexJournal(memory)
        journal.keep_only(recover(journal).blocks)
        journal.set_epoch(8 + life)
        world.journal = journal
        for _ in range(10):
            world.step()
        assert read(memory) == world.listed
    assert IndexJournal(memory).epoch == 13


def test_single_blocks_are_recorded_when_the_step_is_over_and_before_any_is_unlisted() -> None:
    """Publications of one block wait for `flush`, and none of them survives its own eviction."""
    memory = make_memory(BLOCKS, TOKENS)
    world = World(IndexJournal(memory), random.Random(1))
    tree = world._tree("alice", 0, 0)
    tokens = np.arange(TOKENS, dtype="<i4").tobytes()
    world.journal.publish("alice", tree, 0, tokens, np.array([3]), 0)
    world.journal.publish("alice", tree, 1, tokens, np.array([5]), 3)
    assert read(memory) == {}
    world.journal.unpublish(np.array([5]))
    assert set(read(memory)) == {3}
    world.journal.publish("alice", tree, 1, tokens, np.array([6]), 3)
    world.journal.publish("alice", tree, 2, tokens, np.array([7]), 6)
    world.journal.flush()
    assert set(read(memory)) == {3, 6, 7}


def test_what_is_erased_leaves_no_token_behind() -> None:
    """A purge takes the tokens of its blocks out of the file, where an eviction only strikes them off."""
    memory = make_memory(BLOCKS, TOKENS)
    world = World(IndexJournal(memory), random.Random(1))
    tokens = np.array([0x5EC4E7] * TOKENS * 2, "<i4").tobytes()
    world.journal.publish("alice", world._tree("alice", 0, 0), 0, tokens, np.array([3, 5]), 0)
    world.journal.unpublish(np.array([5]))
    assert memory.tobytes().count(b"\xe7\xc4\x5e") == 2 * TOKENS
    world.journal.erase(np.array([3, 5]))
    assert memory.tobytes().count(b"\xe7\xc4\x5e") == 0
    assert read(memory) == {}


def deaths(seed: int, each: bool) -> int:
    """Runs a world again and again, each time with one store more before its death. Returns how often it died."""
    lives = 0
    while True:
        memory = make_memory(BLOCKS, TOKENS)
        fate = Fate(lives, random.Random(seed * 1000 + lives))
        world = World(IndexJournal(mortal(memory, fate)), random.Random(seed), each=each)
        try:
            for _ in range(25):
                world.step()
        except Died:
            world.check_after_death(read(memory), f"{lives} stores")
            lives += 1
            continue
        assert read(memory) == world.listed
        return lives


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_death_between_or_inside_any_two_stores_leaves_whole_paths_of_before_or_after(seed: int, each: bool) -> None:
    """Killed at any store, half of it done: what is read is the state before the step or after it, block by block, no
    block lacks its parent, and no block that the step did not touch is lost."""
    assert deaths(seed, each) > (30 if each else 50)


def test_single_blocks_of_many_sequences_are_recorded_as_each_by_itself() -> None:
    """The same bytes, whether they are of one tree or of several, also where a tree has no slot left."""
    for owners in (("a",), ("a", "b", "a"), ("a", "x" * 1000, "b")):
        trees = [Tree(number + 1, owner.ljust(32, ".")[:32].encode()) for number, owner in enumerate(owners)]
        chosen = [trees[number % len(trees)] for number in range(7)]
        names = ["", *owners]
        texts = [np.full(TOKENS, number, "<i4").tobytes() for number in range(7)]
        written = []
        for together in (True, False):
            memory = make_memory(BLOCKS, TOKENS)
            journal = IndexJournal(memory)
            for number, tree in enumerate(chosen):
                journal.publish(names[tree.owner], tree, 0, texts[0], np.array([1 + number]), 0)
            if together:
                journal.publish_each(
                    names, chosen, np.ones(7, np.int32), texts, np.arange(11, 18), range(1, 8),
                    priorities=[number % 2 for number in range(7)], expiries=[0, 0, 0, 0, 0, 0, 1 << 40],
                )  # fmt: skip
            else:
                for number, tree in enumerate(chosen):
                    journal.publish(
                        names[tree.owner], tree, 1, texts[number], np.array([11 + number]), 1 + number,
                        priority=number % 2, expires_ns=(number == 6) << 40,
                    )  # fmt: skip
                journal.flush()
            written.append(memory.tobytes())
            expected = 14 - 2 * sum(len(names[tree.owner]) > 100 for tree in chosen)
            assert len(read(memory)) == expected
        assert written[0] == written[1]


def damaged(seed: int) -> tuple[dict[int, Entry], dict[int, Entry]]:
    """(read, written) after random damage to the parts of a journal that are in use."""
    rng = random.Random(seed)
    memory = make_memory(BLOCKS, TOKENS)
    world = World(IndexJournal(memory), rng)
    for _ in range(20):
        world.step()
    at = Sections.of(BLOCKS, TOKENS)
    low = rng.choice((at.owners, at.trees, at.checksums, at.rows, at.rows))
    high = {at.owners: at.trees, at.trees: at.checksums, at.checksums: at.rows, at.rows: at.end}[low]
    places = [low + rng.randrange(high - low) for _ in range(rng.choice((1, 1, 2, 8)))]
    kind = rng.randrange(3)
    for place in places:
        if kind == 0:
            memory[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            memory[place] = rng.randrange(256)
        else:  # bytes of another record, as a torn copy would leave them
            other = low + rng.randrange(high - low)
            size = min(rng.choice((4, 8, 48)), high - place, high - other)
            memory[place : place + size] = memory[other : other + size].copy()
    return read(memory), world.listed


def test_no_damaged_record_is_ever_believed() -> None:
    """Over thousands of seeded flips, overwritten bytes and torn copies, everything that is read was written so, and no
    block is read without all those before it."""
    lost = 0
    for seed in range(3000):
        found, written = damaged(seed)
        assert found.items() <= written.items(), f"seed {seed}: a wrong record was believed"
        assert all(entry[2] == 0 or entry[2] in found for entry in found.values()), f"seed {seed}: a path is broken"
        lost += len(found) < len(written)
    assert lost > 500  # the damage does reach records


def test_the_damage_would_be_believed_without_the_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control of the test before: with a checksum that always fits, wrong records are read."""
    with monkeypatch.context() as patch:
        patch.setattr(RecordHash, "checksums", lambda _self, rows, _stamps, _salts: np.ones(len(rows), np.uint64))
        patch.setattr(RecordHash, "chained", lambda _self, rows, *_rest: np.ones(len(rows), np.uint64))
        wrong = 0
        for seed in range(300):
            found, written = damaged(seed)
            wrong += not found.items() <= written.items()
        assert wrong > 20


def test_slots_of_trees_are_used_again_and_validate_no_older_record() -> None:
    """More trees over time than the journal has slots: the newest are recorded, and nothing is told under their name
    that was not theirs."""
    memory = make_memory(BLOCKS, TOKENS)
    world = World(IndexJournal(memory), random.Random(3))
    for number in range(5 * BLOCKS):
        world.publish(owner=f"tenant-{number}")
        world.listed = dict(world.next_listed)
        while len(world.listed) > BLOCKS - 6:
            world.unpublish()
            world.listed = dict(world.next_listed)
        assert read(memory) == world.listed


@pytest.mark.parametrize("together", [False, True])
def test_a_tree_whose_blocks_are_not_stored_yet_keeps_its_slot(together: bool) -> None:
    """Of new trees in one report, for which slots are taken from trees with no block, each has its block recorded."""
    memory = make_memory(BLOCKS, TOKENS)
    journal, text = IndexJournal(memory), np.arange(TOKENS, dtype="<i4").tobytes()
    trees = [Tree(1, number.to_bytes(32, "little")) for number in range(BLOCKS + 2)]
    for tree in trees[:-3]:  # to the first of the others goes the last slot that nobody has had
        journal.publish("a", tree, 0, text, np.array([1]), 0)
        journal.unpublish(np.array([1]))
    numbers = np.arange(2, 5)
    if together:
        journal.publish_each(
            ["", "a"], trees[-3:], np.zeros(3, np.int32), [text] * 3, numbers, [0] * 3,
            priorities=[0] * 3, expiries=[0] * 3,
        )  # fmt: skip
    else:
        for tree, number in zip(trees[-3:], numbers, strict=True):
            journal.publish("a", tree, 0, text, np.array([number]), 0)
        journal.flush()
    assert sorted(recover(IndexJournal(memory.copy())).blocks) == [2, 3, 4]


def test_the_file_is_private_and_found_again(tmp_path: Path) -> None:
    """A journal on disk has mode 0600, and opens again with what was written, in this start of the machine alone."""
    path = tmp_path / "index.journal"
    made = create_journal(path, identity(BLOCKS, TOKENS), 7)
    assert path.stat().st_mode & 0o777 == 0o600
    world = World(made, random.Random(2))
    for _ in range(10):
        world.step()
    again = open_journal(path, b"b" * 16)
    assert again is not None
    assert entries(recover(again), TOKENS) == world.listed
    assert open_journal(path, b"c" * 16) is None
    path.chmod(0o640)
    assert open_journal(path, b"b" * 16) is None
    discard_journal(path)
    discard_journal(path)
    assert open_journal(path, b"b" * 16) is None
    assert len(boot_id()) == 16


def test_a_file_of_any_other_length_is_no_journal(tmp_path: Path) -> None:
    """Cut off or lengthened anywhere, the file is refused whole."""
    path = tmp_path / "index.journal"
    create_journal(path, identity(BLOCKS, TOKENS), 7)
    whole = path.stat().st_size
    rng = random.Random(4)
    for size in [0, 1, 4095, 4096, whole - 1, whole + 1, *(rng.randrange(whole) for _ in range(50))]:
        os.truncate(path, size)
        assert open_journal(path, b"b" * 16) is None
    os.truncate(path, whole)


def test_a_damaged_header_is_no_journal(tmp_path: Path) -> None:
    """Any flipped bit of the header's digest or of what it covers is found."""
    path = tmp_path / "index.journal"
    create_journal(path, identity(BLOCKS, TOKENS), 7)
    data = bytearray(path.read_bytes())
    for place in range(8):
        data[place] ^= 1
        path.write_bytes(data)
        path.chmod(0o600)
        assert open_journal(path, b"b" * 16) is None
        data[place] ^= 1
    for place in range(16, 16 + 100):
        data[place] ^= 0x10
        path.write_bytes(data)
        assert open_journal(path, b"b" * 16) is None, f"byte {place}"
        data[place] ^= 0x10
    path.write_bytes(data)
    assert open_journal(path, b"b" * 16) is not None


def test_no_room_for_the_file_is_said_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is a refusal that names the bytes, and leaves no half file behind."""

    def refuse(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(FailedPrecondition, match="No space left"):
        create_journal(tmp_path / "index.journal", identity(BLOCKS, TOKENS), 7)
    assert list(tmp_path.iterdir()) == []


def test_processes_are_kept_until_they_are_removed() -> None:
    """A holder is found by the next daemon, renewed in its place, told apart by its start time, and gone once dead."""
    memory = make_memory(BLOCKS, TOKENS)
    table = HolderTable(IndexJournal(memory).processes)
    own = HolderProcess(os.getpid(), start_time_of(os.getpid()), "decoder-0", 1, b"d" * 16)
    older = HolderProcess(os.getpid(), own.start_time - 1, "decoder-0", 1, b"d" * 16)
    assert table.put(own)
    assert table.put(older)
    assert table.put(HolderProcess(own.process_id, own.start_time, "decoder-0", 2, b"e" * 16))
    found = HolderTable(IndexJournal(memory).processes).holders()
    assert [holder.earlier_digest for holder in found if holder.session == 2] == [b"d" * 16]
    assert sorted((holder.start_time, holder.session) for holder in found) == [
        (older.start_time, 1),
        (own.start_time, 2),
    ]
    assert [holder.lives() for holder in found if holder.session == 2] == [True]
    assert not older.lives()
    assert start_time_of(2**22 + 1) == 0
    table.remove(os.getpid())
    assert HolderTable(IndexJournal(memory).processes).holders() == []


def test_a_full_table_of_processes_says_so() -> None:
    """Nobody is given the arena whom the next daemon could not know of."""
    table = HolderTable(IndexJournal(make_memory(BLOCKS, TOKENS)).processes)
    for number in range(1, 1025):
        assert table.put(HolderProcess(number, 5, "decoder-0", number, b"d" * 16))
    assert not table.put(HolderProcess(2000, 5, "decoder-0", 1, b"d" * 16))
    table.remove(17)
    assert table.put(HolderProcess(2000, 5, "decoder-0", 1, b"d" * 16))


def test_who_was_given_a_block_last_is_read_back_or_known_to_be_unknown() -> None:
    """The newest session that was given a block is on record; a damaged record names nobody."""
    memory = make_memory(BLOCKS, TOKENS)
    journal = IndexJournal(memory)
    journal.given(np.array([3, 5]), 7)
    journal.given(np.array([5]), 2**31)
    holders = IndexJournal(memory.copy()).holders()
    assert (holders[3], holders[5], holders[4]) == (7, 2**31, 0)
    place = Sections.of(BLOCKS, TOKENS).holders + 3 * 8
    for bit in range(64):
        memory[place + bit // 8] ^= 1 << bit % 8
        assert journal.holders()[3] == -1
        memory[place + bit // 8] ^= 1 << bit % 8
    assert journal.holders()[3] == 7
