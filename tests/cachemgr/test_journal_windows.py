"""The window blocks in the index journal: what was told is read back, and a damaged entry is none."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cachemgr.journal import IndexJournal
from cachemgr.journal_format import Sections, read_header
from cachemgr.recovery import recover
from tests.cachemgr.journal_rig import Died, Fate, identity, make_memory, mortal

BLOCKS, TOKENS, WINDOWS = 24, 4, 9


def run(*numbers: int) -> np.ndarray:
    """A run of blocks."""
    return np.array(numbers, np.intp)


def told(journal: IndexJournal) -> dict[int, int]:
    """Block -> window block, as a reader finds it."""
    found = recover(journal).windows
    return {int(block): int(found[block]) for block in np.flatnonzero(found)}


def test_what_was_told_last_of_a_block_is_read_back() -> None:
    """Random attaching, detaching and moving against a dictionary, through readers of the same memory."""
    rng, memory = random.Random(1), make_memory(BLOCKS, TOKENS, WINDOWS)
    journal, has = IndexJournal(memory), dict[int, int]()
    for _ in range(200):
        free = [number for number in range(1, WINDOWS + 1) if number not in has.values()]
        bare = [number for number in range(1, BLOCKS + 1) if number not in has]
        if free and rng.random() < 0.6:
            count = rng.randint(1, len(free))
            has.update(fresh := dict(zip(rng.sample(bare, count), rng.sample(free, count), strict=True)))
            journal.has_windows(run(*fresh), np.array([*fresh.values()], np.int32))
        elif has:
            gone = rng.sample(sorted(has), rng.randint(1, len(has)))
            journal.has_windows(run(*gone), np.zeros(len(gone), np.int32))
            for block in gone:
                del has[block]
        assert told(IndexJournal(memory.copy())) == has


@pytest.mark.parametrize("bit", range(0, 64, 5))
def test_a_damaged_entry_is_none_and_the_others_stay(bit: int) -> None:
    """Any bit of an entry: the block is read as one without a window block."""
    journal = IndexJournal(make_memory(BLOCKS, TOKENS, WINDOWS))
    journal.has_windows(run(3, 4, 20), np.array([1, 7, 9], np.int32))
    assert told(journal) == {3: 1, 4: 7, 20: 9}
    journal._windows[4] ^= np.uint64(1) << np.uint64(bit)
    assert told(journal) == {3: 1, 20: 9}


def test_an_entry_in_another_place_and_one_beyond_the_pool_are_none() -> None:
    """An entry says whose it is; a window block that is not there is nobody's."""
    journal = IndexJournal(make_memory(BLOCKS, TOKENS, WINDOWS))
    journal.has_windows(run(3, 5), np.array([1, WINDOWS + 1], np.int32))
    journal._windows[4] = journal._windows[3]
    assert told(journal) == {3: 1}


def test_a_window_block_that_two_blocks_claim_is_nobodys() -> None:
    """Neither can be believed; what is adopted next does not find them again."""
    journal = IndexJournal(make_memory(BLOCKS, TOKENS, WINDOWS))
    journal.has_windows(run(3, 4, 5), np.array([2, 2, 6], np.int32))
    assert told(journal) == {5: 6}
    journal.keep_only(run())
    assert told(journal) == {5: 6} and np.count_nonzero(journal._windows) == 1


@pytest.mark.parametrize("lives", range(8))
def test_a_death_between_two_stores_leaves_what_was_there_or_what_came(lives: int) -> None:
    """A window block goes from one block to another: whoever reads afterwards finds it at one of them or at none."""
    memory = make_memory(BLOCKS, TOKENS, WINDOWS)
    IndexJournal(memory).has_windows(run(3), np.array([2], np.int32))
    journal = IndexJournal(mortal(memory, Fate(lives, random.Random(lives))))
    try:
        journal.has_windows(run(3), np.array([0], np.int32))
        journal.has_windows(run(8), np.array([2], np.int32))
    except Died:
        pass
    assert told(IndexJournal(memory)) in ({3: 2}, {}, {8: 2})


def test_without_groups_there_is_no_column_and_the_sizes_are_as_before() -> None:
    """The header says how many window blocks there are; a file of another size than it says is no journal."""
    assert Sections.of(BLOCKS, TOKENS).rows == Sections.of(BLOCKS, TOKENS).windows
    assert recover(IndexJournal(make_memory(BLOCKS, TOKENS))).windows.tolist() == []
    memory = make_memory(BLOCKS, TOKENS, WINDOWS)
    found = read_header(memory)
    assert found is not None and found[0] == identity(BLOCKS, TOKENS, WINDOWS)
    assert read_header(memory[: Sections.of(BLOCKS, TOKENS).end]) is None
