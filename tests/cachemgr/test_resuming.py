"""Deadlines, going away and coming back, in the core: what one side did and the other did not hear is made one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cachemgr.ids import LeaseId, SessionId
from cachemgr.leases import DEFAULT_GRACE_NS, DEFAULT_LEASE_NS
from cachemgr.results import CopyPlan, SequenceReport
from cachemgr.resuming import Held, Resumed
from common.errors import FailedPrecondition, InvalidArgument
from tests.cachemgr.core_rig import Rig, Running, pack

SECOND = 1_000_000_000
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def held_of(sequence: Running) -> Held:
    """What the sequence's decoder presents."""
    return Held(
        sequence.lease_id,
        pack(sequence.tokens),
        np.array(sequence.table, np.int32),
        sequence.computed if sequence.copy is None else 0,
        sequence.copy,
    )


def come_back(rig: Rig, *held: Held, credit: list[int] | None = None) -> Resumed:
    """The rig's session goes away and comes back with `held` and its credit."""
    session = rig.session
    rig.manager.away(session, 0)
    credit = rig.credit[session] if credit is None else credit
    done = rig.manager.resume(session, held, np.array(credit, np.int32), 0)
    rig.credit[session] = list(credit)
    rig.revision[session] = done.revision
    kept = {item.lease_id for item, lease in zip(held, done.leases, strict=True) if lease}
    rig.sequences = [sequence for sequence in rig.sequences if sequence.lease_id in kept]
    for sequence in rig.sequences:
        sequence.taken, sequence.copied, sequence.reported = [], False, len(sequence.tokens)
        for swap in done.replacements:
            if swap.lease_id == sequence.lease_id:
                sequence.table[swap.first_index : swap.first_index + len(swap.blocks)] = swap.blocks.tolist()
    rig.check()
    return done


def with_credit(rig: Rig, count: int) -> None:
    rig.report(wanted=count)
    assert len(rig.credit[rig.session]) == count


def wind_up(rig: Rig) -> None:
    """Everything ends and nothing is left."""
    for sequence in list(rig.sequences):
        rig.finish(sequence)
    rig.report(returned=rig.credit[rig.session])
    rig.quiet()


# ---- deadlines


def test_a_session_lapses_after_silence_and_every_operation_puts_it_off() -> None:
    """Silent for the lease time: found by the tick, again and again, and still heard; one that speaks is not found."""
    rig = Rig()
    manager, silent = rig.manager, rig.session
    speaking = rig.attach()
    for second in range(1, 10):
        manager.heartbeat(speaking, second * SECOND)
    assert manager.tick(DEFAULT_LEASE_NS - 1) == []
    assert manager.tick(DEFAULT_LEASE_NS) == [silent]
    assert manager.tick(DEFAULT_LEASE_NS) == [silent], "only who knows its process ends it"
    manager.credit(silent, 0, DEFAULT_LEASE_NS)
    assert manager.tick(DEFAULT_LEASE_NS + 1) == []
    assert manager.tick(9 * SECOND + DEFAULT_LEASE_NS) == [speaking]


def test_a_broken_stream_has_the_grace_time_and_can_do_nothing_in_it() -> None:
    """Away: its operations are refused and counted, nothing of it is freed. It lapses after the grace time, but never
    before its lease has run out: its decoder goes on until then."""
    rig = Rig()
    sequence = rig.acquire(PROMPT)
    rig.compute(sequence)
    before = rig.manager.snapshot()
    rig.manager.away(rig.session, 0)
    with pytest.raises(FailedPrecondition):
        rig.report(rig.message(sequence, release=True))
    with pytest.raises(FailedPrecondition):
        rig.manager.heartbeat(rig.session, 0)
    early, late = rig.session, rig.attach()
    rig.manager.away(late, DEFAULT_LEASE_NS - SECOND)
    after = rig.manager.snapshot()
    assert (after.leases, after.active_blocks) == (before.leases, before.active_blocks) == (1, 3)
    assert after.fenced_operations == before.fenced_operations + 2 == 2
    assert rig.manager.tick(DEFAULT_LEASE_NS - 1) == []
    assert rig.manager.tick(DEFAULT_LEASE_NS) == [early]
    assert rig.manager.tick(DEFAULT_LEASE_NS - SECOND + DEFAULT_GRACE_NS - 1) == [early]
    assert rig.manager.tick(DEFAULT_LEASE_NS - SECOND + DEFAULT_GRACE_NS) == [early, late]


def test_one_that_came_back_is_served_and_counts_anew() -> None:
    """After a resume the same operations work, and the deadline is a whole lease away."""
    rig = Rig()
    sequence = rig.acquire(PROMPT)
    rig.compute(sequence)
    assert come_back(rig, held_of(sequence)).leases == [sequence.lease_id]
    assert rig.manager.tick(DEFAULT_LEASE_NS - 1) == []
    wind_up(rig)


def test_a_session_that_is_over_does_not_come_back() -> None:
    """Detached, or never there: refused, counted, and what was quarantined stays so."""
    rig = Rig()
    sequence = rig.acquire(PROMPT)
    old, held = rig.session, held_of(sequence)
    rig.manager.away(old, 0)
    rig.manager.detach(old, process_dead=False, now_ns=0)
    rig.sequences = []
    for session in (old, SessionId(99)):
        with pytest.raises(FailedPrecondition):
            rig.manager.resume(session, [held], np.zeros(0, np.int32), 0)
    with pytest.raises(FailedPrecondition):
        rig.manager.report(
            old, [SequenceReport(held.lease_id, release=True)], returned=np.zeros(0, np.int32), wanted=0,
            applied_revision=0, now_ns=0,
        )  # fmt: skip
    now = rig.manager.snapshot()
    assert (now.fenced_operations, now.quarantined_blocks, now.leases) == (3, 3, 0)
    assert rig.manager.process_gone(old) == 3
    rig.session = rig.attach()
    rig.check()


# ---- what was lost on the way


def test_a_lost_report_is_taken_over() -> None:
    """Blocks taken from the credit, tokens and seals that were never told are in the books, and published."""
    rig = Rig()
    with_credit(rig, 4)
    sequence = rig.acquire(PROMPT)
    rig.compute(sequence)
    for token in range(20, 30):
        assert rig.grow(sequence, token)
        rig.compute(sequence)
    come_back(rig, held_of(sequence))
    lease = rig.manager.list_leases().items[0]
    assert (lease.num_tokens, lease.sealed_tokens, lease.blocks) == (19, 19, sequence.table)
    assert rig.manager.snapshot().indexed_blocks == 4
    again = rig.acquire([*PROMPT, *range(20, 30)])
    assert again.computed == 16, "what was taken over is found"
    wind_up(rig)


def test_a_report_that_arrived_is_not_taken_twice() -> None:
    """The answer was lost, the report was not: the same state is presented, and nothing changes but the credit."""
    rig = Rig()
    with_credit(rig, 4)
    sequence = rig.acquire(PROMPT)
    rig.compute(sequence)
    held = held_of(sequence)
    rig.report(rig.message(sequence))
    before = rig.manager.list_leases().items
    done = come_back(rig, held)
    assert (done.leases, done.replacements) == ([sequence.lease_id], [])
    assert rig.manager.list_leases().items == before
    wind_up(rig)


def test_an_acquire_and_a_credit_whose_answers_were_lost_are_let_go() -> None:
    """What the decoder does not list is not its own any more; what it lists stays."""
    rig = Rig()
    with_credit(rig, 3)
    kept = rig.acquire(PROMPT)
    rig.manager.acquire(
        rig.session, tenant="a", root=b"a".ljust(32, b"."), tokens=pack([7] * 9), request_id="lost", sample=0, now_ns=0
    )
    rig.manager.credit(rig.session, 5, 0)
    before = rig.manager.snapshot()
    assert (before.leases, before.credit_blocks) == (2, 8)
    come_back(rig, held_of(kept))
    after = rig.manager.snapshot()
    assert (after.leases, after.credit_blocks, after.free_blocks) == (1, 3, before.free_blocks + 5 + 3)
    wind_up(rig)


def test_a_replacement_that_was_not_heard_is_told_again() -> None:
    """The daemon's table has the published block, the decoder's still its own: the answer says so, and the duplicate
    is free once that is acknowledged, not before."""
    rig = Rig()
    first, second = rig.acquire(PROMPT), rig.acquire(PROMPT)
    rig.compute(first)
    rig.compute(second)
    rig.report(rig.message(first))
    own = list(second.table)
    held = held_of(second)
    rig.report(rig.message(second))
    assert second.table != own, "positive control: it was replaced"
    second.table = list(own)
    free = rig.manager.snapshot().free_blocks
    done = come_back(rig, held_of(first), held)
    assert [swap.lease_id for swap in done.replacements] == [second.lease_id]
    assert second.table[:2] == first.table[:2] != own[:2]
    assert rig.manager.snapshot().free_blocks == free
    rig.report()
    assert rig.manager.snapshot().free_blocks == free + 2
    wind_up(rig)


def test_a_copy_that_ran_and_was_not_told_is_taken_over_and_one_that_did_not_stays() -> None:
    """The pin of a copy's source is held exactly as long as the copy has to run."""
    rig = Rig()
    rig.serve(PROMPT)
    ran, waits = rig.acquire([*PROMPT[:7], 70, 71]), rig.acquire([*PROMPT[:6], 80, 81])
    assert ran.copy is not None and waits.copy is not None
    rig.run_copy(ran)
    come_back(rig, held_of(ran), held_of(waits))
    assert rig.manager.snapshot().cow_copies == 1
    rig.compute(waits)
    wind_up(rig)


def test_a_release_that_was_lost_is_told_by_absence() -> None:
    """A lease that is not listed ends; what it had sealed stays cached."""
    rig = Rig()
    sequence = rig.acquire(PROMPT)
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    rig.sequences = []
    come_back(rig)
    now = rig.manager.snapshot()
    assert (now.leases, now.cached_blocks) == (0, 3)
    wind_up(rig)


# ---- what does not fit


def _foreign_block(held: Held, rig: Rig) -> Held:
    other = rig.acquire([50, 51, 52])
    rig.sequences.remove(other)
    return replace(held, blocks=np.append(held.blocks, np.int32(other.table[0])))


MISFITS = {
    "tokens": lambda held, rig: replace(held, tokens=pack([9, *PROMPT[1:]])),
    "fewer tokens": lambda held, rig: replace(held, tokens=held.tokens[:-4]),
    "fewer blocks": lambda held, rig: replace(held, blocks=held.blocks[:-1]),
    "another block": lambda held, rig: replace(held, blocks=np.array([30, *held.blocks[1:]], np.int32)),
    "a block of nobody's credit": lambda held, rig: replace(held, blocks=np.append(held.blocks, np.int32(31))),
    "a block of another lease": _foreign_block,
    "too much sealed": lambda held, rig: replace(held, sealed_tokens=99),
    "a copy that there never was": lambda held, rig: replace(held, copy=CopyPlan(30, int(held.blocks[0]), 2)),
    "a lease that there never was": lambda held, rig: replace(held, lease_id=LeaseId(77)),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_sequence_that_does_not_fit_loses_its_lease_alone(what: str) -> None:
    """Its blocks wait until the decoder has heard of it; the one beside it goes on, and the books add up."""
    rig = Rig()
    bad, good = rig.acquire(PROMPT), rig.acquire([60, *PROMPT])
    rig.compute(good)
    held = MISFITS[what](held_of(bad), rig)
    done = come_back(rig, held, held_of(good))
    assert done.leases == [0, good.lease_id]
    assert rig.manager.snapshot().leases == 1
    rig.report()
    wind_up(rig)


def test_credit_that_is_not_the_sessions_refuses_all_and_changes_nothing() -> None:
    """Blocks of another's credit, twice, or in a table too: InvalidArgument; the true list is taken afterwards."""
    rig = Rig()
    with_credit(rig, 3)
    sequence = rig.acquire(PROMPT)
    rig.compute(sequence)
    mine = rig.credit[rig.session]
    held = held_of(sequence)
    taken = replace(held, blocks=np.append(held.blocks, np.int32(mine[0])))
    rig.manager.away(rig.session, 0)
    before = (rig.manager.snapshot(), rig.manager.list_leases())
    for credit, item in (([*mine, 30], held), (mine + mine[:1], held), ([sequence.table[0]], held), (mine, taken)):
        with pytest.raises(InvalidArgument):
            rig.manager.resume(rig.session, [item], np.array(credit, np.int32), 0)
    with pytest.raises(InvalidArgument):
        rig.manager.resume(rig.session, [held, held], np.array(mine, np.int32), 0)
    assert (rig.manager.snapshot(), rig.manager.list_leases()) == before
    assert come_back(rig, held).leases == [sequence.lease_id]
    wind_up(rig)


def test_a_session_of_another_epoch_or_without_a_deadline_is_found() -> None:
    """CheckIntegrity sees a session that no tick could ever end."""
    rig = Rig()
    session = rig.manager._state.book.session(rig.session)
    assert rig.manager.check_integrity() == []
    session.attached_ns, session.deadline_ns = 5, 0
    assert rig.manager.check_integrity() != []
    session.attached_ns = 0
    session.epoch += 1
    assert rig.manager.check_integrity() != []


def test_credit_in_the_table_of_a_misfit_waits_for_the_acknowledgement() -> None:
    """The decoder may be writing it until it hears that the lease is over: it is free after that, not before."""
    rig = Rig()
    with_credit(rig, 1)
    bad = rig.acquire(PROMPT)
    for token in (20, 21, 22, 23):
        assert rig.grow(bad, token)
    held = replace(held_of(bad), tokens=pack([9] * 13))
    free = rig.manager.snapshot().free_blocks
    assert come_back(rig, held).leases == [0]
    assert rig.manager.snapshot().free_blocks == free
    rig.report()
    assert rig.manager.snapshot().free_blocks == free + 4
    wind_up(rig)
