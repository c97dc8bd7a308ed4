"""Adoption with layer groups: what is a hit afterwards reads what was written, from the window blocks that it had."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from cachemgr.adoption import LIMBO
from cachemgr.journal import IndexJournal
from cachemgr.journal_format import Sections, write_header
from cachemgr.manager import CacheManager
from cachemgr.nodes import Tree
from cachemgr.recovery import recover
from common.errors import InvalidArgument
from tests.cachemgr.adoption_rig import DyingRig, wander
from tests.cachemgr.journal_rig import identity

WINDOW = 6  # tokens; blocks have 4


def rig_of(num_blocks: int = 32, num_window_blocks: int = 12) -> DyingRig:
    """A manager of two groups that can die."""
    return DyingRig(num_blocks=num_blocks, window_tokens=WINDOW, num_window_blocks=num_window_blocks)


def attached(rig: DyingRig) -> dict[int, int]:
    """Block -> its window block, as the manager has it."""
    return dict(rig.manager.window_pairs(np.arange(1, rig.num_blocks + 1, dtype=np.int32)).tolist())


def test_what_was_cached_is_a_hit_afterwards() -> None:
    """Each listed block has the window block that it had, and no prompt is cached less far than before."""
    rig = rig_of()
    for tokens in (range(1, 12), [*range(1, 9), 77, 78, 79], range(40, 54)):
        rig.serve(tokens)
    before = attached(rig)
    rig.die()
    rig.come_back()
    assert attached(rig) == before != {}
    assert rig.serve([*range(1, 12), 5]) == 11
    assert rig.serve([*range(40, 54), 5]) == 14
    rig.check()


def test_a_hit_ends_where_the_journal_lost_a_window_block() -> None:
    """A damaged entry: the block is listed and has none; what needs it is computed again, and reads nothing else."""
    rig = rig_of()
    rig.serve(range(1, 14))
    table = [view.block for view in rig.manager.list_blocks().items if view.published]
    rig.journal._windows[table[2]] += np.uint64(1)
    rig.die()
    rig.come_back()
    assert rig.manager.check_integrity() == [] and table[2] not in attached(rig)
    assert rig.serve([*range(1, 14), 5]) == 8
    rig.check()


@pytest.mark.parametrize("seed", range(60))
def test_everybody_comes_back_and_nothing_is_lost(seed: int) -> None:
    """A death at a random moment of random work, a few times over: every sequence is kept, but for a branch whose copy
    has not run from a block that its parent left unlisted as it ended; all read what they wrote and go on to their end,
    and afterwards both pools are whole."""
    rng = random.Random(seed)
    rig = rig_of(rng.choice((12, 24, 48)), rng.choice((9, 12)))
    rig.attach()
    for _ in range(4):
        wander(rig, rng, 40)
        listed, before = rig.manager.snapshot().indexed_blocks, attached(rig)
        rig.die()
        assert rig.manager.snapshot().indexed_blocks == listed and attached(rig) == before
        held = list(rig.sequences)
        rig.come_back()
        tables = {block for sequence in held for block in sequence.table}
        orphans = [s for s in held if s.copy is not None and s.copy.source not in tables]
        assert [s for s in held if s not in rig.sequences and s not in orphans] == []
        rig.check()
    for sequence in list(rig.sequences):
        rig.finish(sequence)
    for session in list(rig.credit):
        rig.report(session=session, returned=list(rig.credit[session]))
    rig.quiet()
    windows = rig.manager.snapshot().windows
    assert windows is not None and windows.needed_blocks == 0


@pytest.mark.parametrize("seed", range(30))
def test_of_two_decoders_one_is_dead(seed: int) -> None:
    """What the dead one held is free once the other has claimed, its window blocks too; the other lost nothing."""
    rng = random.Random(seed)
    rig = rig_of(24, 10)
    dead = rig.attach()
    wander(rig, rng, 80)
    rig.die()
    rig.sequences = [sequence for sequence in rig.sequences if sequence.session != dead]
    del rig.credit[dead]
    held = list(rig.sequences)
    rig.come_back()
    assert [s for s in held if s not in rig.sequences and s.copy is None] == []
    rig.check()
    for sequence in list(rig.sequences):
        rig.finish(sequence)
    for session in list(rig.credit):
        rig.report(session=session, returned=list(rig.credit[session]))
    rig.quiet()


@pytest.mark.parametrize("seed", range(40))
def test_what_a_decoder_says_of_window_blocks_is_believed_only_where_the_journal_agrees(seed: int) -> None:
    """One pair of what is presented is changed or left out: its sequence is refused, whoever does not need that block
    goes on, and nothing that anybody holds is read or freed wrongly."""
    rng = random.Random(seed)
    rig = rig_of(24, 10)
    wander(rig, rng, 80)
    rig.report(returned=list(rig.credit[rig.session]))
    rig.mirrors = rig.windows_of
    needed = [sequence for sequence in rig.sequences if len(rig.said(rig.session, [sequence]))]
    if not needed:
        return
    victim = rng.choice(needed)
    block = int(rng.choice(rig.said(rig.session, [victim]))[0])
    mirror, was = rig.windows_of[rig.session], rig.windows_of[rig.session][block]
    mirror[block] = rng.choice([number for number in range(12) if number != was])
    rig.die()
    wrong = [s for s in rig.sequences if block in rig.said(rig.session, [s])[:, 0].tolist()]
    held = list(rig.sequences)
    answers = rig.come_back()
    assert victim in wrong and victim not in rig.sequences
    kept = [bool(lease) for answer in answers for lease in answer.leases]
    assert len(kept) == len(held) and all(not lease or s not in wrong for s, lease in zip(held, kept, strict=True))
    rig.check()
    rig.report()
    assert rig.manager.check_integrity() == []


def test_credit_is_claimed_with_its_window_blocks_alone() -> None:
    """Where the decoder says others, the claim is refused whole, and the right one is taken."""
    rig = rig_of()
    rig.report(wanted=2)
    credit = rig.credit[rig.session]
    rig.die()
    mirror = rig.mirrors[rig.session]
    mirror[credit[0]], mirror[credit[1]] = mirror[credit[1]], mirror[credit[0]]
    with pytest.raises(InvalidArgument, match="credit_blocks"):
        rig.claim(rig.session, [], credit)
    mirror[credit[0]], mirror[credit[1]] = mirror[credit[1]], mirror[credit[0]]
    rig.claim(rig.session, [], credit)
    assert rig.manager.check_integrity() == []


def test_window_blocks_of_a_late_process_are_given_to_nobody_until_it_is_dead() -> None:
    """Its quarantined blocks keep theirs, though nobody holds those blocks and room is wanted."""
    rig = rig_of(12, 9)
    late = rig.attach()
    lost = rig.acquire(range(30, 38), session=late)
    rig.report(session=late, wanted=2)
    theirs = {rig.windows_of[late][block] for block in (*lost.table, *rig.credit[late])}
    rig.die()
    rig.sequences.remove(lost)
    rig.manager.finish_adoption(writers={late}, now_ns=0)
    assert rig.manager.check_integrity() == []
    session = rig.attach()
    granted = rig.manager.credit(session, 12, 0)
    got = set(rig.manager.window_pairs(granted)[:, 1].tolist())
    assert len(theirs) == 4 and len(got) == 5 and not got & theirs
    assert rig.manager.process_gone(LIMBO) == 4
    assert len(rig.manager.credit(session, 12, 0)) == 4
    assert rig.manager.check_integrity() == []


def test_what_the_ends_of_paths_need_goes_last_afterwards_and_the_oldest_first() -> None:
    """Room is wanted after the death: the beginnings of both prompts go, the older one's first; then its end."""
    rig = rig_of(32, 8)
    tables = []
    for first in (1, 40):
        sequence = rig.acquire(range(first, first + 13))
        tables.append(list(sequence.table))
        rig.finish(sequence)
    rig.die()
    rig.come_back()
    gone: list[set[int]] = []
    for _ in range(3):
        before = attached(rig)
        rig.report(wanted=2)
        gone.append(before.keys() - attached(rig).keys())
    assert gone == [set(tables[0][:2]), set(tables[1][:2]), set(tables[0][2:])]
    rig.report(returned=list(rig.credit[rig.session]))
    assert rig.serve([*range(40, 53), 5]) == 13
    rig.check()


def test_a_large_index_with_window_blocks_is_read_quickly() -> None:
    """As without them: 100,000 blocks, a third of them with window blocks, within a bound far above what it takes."""
    count, tokens, nodes = 100_000, 16, 1_000
    each, windows = count // nodes, count // 3
    memory = np.zeros(Sections.of(count, tokens, windows).end, np.uint8)
    write_header(memory, identity(count, tokens, windows), 7)
    journal, rng = IndexJournal(memory), np.random.default_rng(1)
    for node in range(nodes):
        blocks = np.arange(1 + node * each, 1 + (node + 1) * each)
        packed = rng.integers(0, 50_000, each * tokens).astype("<i4").tobytes()
        journal.publish("alice", Tree(1, b"%032d" % (node % 50)), 0, packed, blocks, 0)
    journal.flush()
    chosen = np.sort(rng.choice(np.arange(1, count + 1), windows, replace=False))
    journal.has_windows(chosen, np.arange(1, windows + 1, dtype=np.int32))
    manager = CacheManager(
        num_blocks=count, block_tokens=tokens, window_tokens=512, num_window_blocks=windows, epoch=8, journal=journal
    )
    started = time.process_time()
    listed = manager.adopt(recover(journal), 0)
    seconds = time.process_time() - started
    assert len(listed) == count and len(manager.window_pairs(listed.astype(np.int32))) == windows
    assert manager.check_integrity() == []
    assert seconds < 20
    print(f"{count} blocks adopted in {seconds:.2f} s")
