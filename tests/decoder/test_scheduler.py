"""The scheduler alone, against a pool of counters: policy, budgets, and that everything admitted ends."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.admission import MAX_ACQUIRES, MAX_PASSES, PATIENCE, AdmissionQueue
from decoder.credit import LEAN_STEPS, SLACK_BLOCKS, Credit
from decoder.scheduler import HOLD_STEPS, Plan, Scheduler
from decoder.sequence import LeaseId, Sequence, SequenceId, SequenceState
from decoder.windows import Windows
from tests.decoder.rig import request

BLOCK = 4


def make(
    number: int, length: int, *, max_tokens: int = 8, priority: int = 0, is_trunk: bool = False, **tenant: Any
) -> Sequence:
    item = replace(request(number, [5] * length, max_tokens=max_tokens, priority=priority), **tenant)
    return Sequence(SequenceId(number), item, 0, number, is_trunk=is_trunk)


def refuse(queue: AdmissionQueue, sequence: Sequence) -> None:
    """The daemon's answer for `sequence`: the pool is full."""
    answered, in_turn = queue.answered(sequence.sequence_id)
    queue.full(answered, in_turn=in_turn)


class Pool:
    """A daemon of counters: all-or-nothing acquires, credit as far as there is room."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks + 1))

    def take(self, count: int) -> np.ndarray:
        taken, self.free = self.free[:count], self.free[count:]
        return np.array(taken, np.int32)

    def give(self, blocks: Any) -> None:
        self.free.extend(int(block) for block in blocks)
        assert len(self.free) == len(set(self.free))


class Rig:
    """Steps a scheduler the way the engine does, with every sequence generating token 9."""

    def __init__(self, num_blocks: int = 32, **options: Any) -> None:
        self.pool = Pool(num_blocks)
        self.num_blocks = num_blocks
        self.scheduler = Scheduler(
            **{"block_tokens": BLOCK, "num_blocks": num_blocks, "max_batch": 4, "chunk_tokens": 16, **options}
        )
        self.ended: list[int] = []
        self.outgrown: list[int] = []
        self.preempted: list[int] = []
        self.last_lease = 0

    def admit(self) -> bool:
        sequence = self.scheduler.next_admission()
        if sequence is None:
            return False
        _, in_turn = self.scheduler.queue.answered(sequence.sequence_id)
        needed = self.scheduler.blocks_for(sequence.num_tokens)
        if needed > len(self.pool.free):
            self.scheduler.queue.full(sequence, in_turn=in_turn)
            return False
        self.last_lease += 1
        self.scheduler.admit(sequence, LeaseId(self.last_lease), self.pool.take(needed), 0, None)
        return True

    def release(self, sequence: Sequence) -> None:
        self.pool.give(sequence.table)
        sequence.drop_lease()

    def end(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self.release(sequence)
        self.scheduler.remove(sequence)

    def step(self) -> Plan:
        scheduler = self.scheduler
        while self.admit():
            pass
        plan = scheduler.schedule()
        for sequence in plan.preempted:
            self.preempted.append(int(sequence.sequence_id))
            self.release(sequence)
        for sequence, _ in plan.outgrown:
            self.outgrown.append(int(sequence.sequence_id))
            self.end(sequence)
        plan.drop_ended()
        wanted, returned = scheduler.credit.settle(scheduler.need_soon(), in_need=bool(plan.lacking))
        self.pool.give(returned)
        if len(returned):
            scheduler.queue.retry()
        granted = self.pool.take(min(wanted, len(self.pool.free)))
        scheduler.credit.grant(granted.tolist())
        scheduler.credit.answered(wanted, len(granted))
        assert len(plan.decodes) + len(plan.chunks) <= scheduler.max_batch
        assert sum(count for _, count in plan.chunks) <= max(1, scheduler.chunk_tokens - len(plan.decodes))
        for sequence, count in [*((one, 1) for one in plan.decodes), *plan.chunks]:
            assert 1 <= count <= sequence.remaining
            sequence.num_computed += count
            assert scheduler.blocks_for(sequence.num_computed) <= sequence.num_blocks
            if sequence.remaining == 0:
                sequence.append_token(9)
                if sequence.num_generated >= sequence.request.stopping.max_tokens:
                    self.ended.append(int(sequence.sequence_id))
                    self.end(sequence)
        return plan

    def run(self, count: int, limit: int = 5000) -> None:
        for _ in range(limit):
            if len(self.ended) + len(self.outgrown) >= count:
                break
            self.step()
        else:
            raise AssertionError(f"{self.ended} ended of {count}")
        self.step()
        assert len(self.pool.free) == self.num_blocks, "every block came back"


# ---- steps


def test_decodes_come_before_prefills_and_share_the_step() -> None:
    """A running decode is in every step while a long prompt is computed beside it in what is left of the budget."""
    rig = Rig(chunk_tokens=16)
    rig.scheduler.enqueue(make(1, 3, max_tokens=30))
    rig.step()
    rig.scheduler.enqueue(make(2, 60))
    for _ in range(4):
        plan = rig.step()
        assert [int(sequence.sequence_id) for sequence in plan.decodes] == [1]
        assert [(int(sequence.sequence_id), count) for sequence, count in plan.chunks] == [(2, 15)]


def test_a_long_prompt_does_not_hold_short_ones_up() -> None:
    """The first gets half of a step at least, the shortest of the others the rest, so short ones start at once."""
    rig = Rig(num_blocks=64, chunk_tokens=16)
    for number, length in ((1, 100), (2, 30), (3, 6)):
        rig.scheduler.enqueue(make(number, length))
    plan = rig.step()
    assert [(int(sequence.sequence_id), count) for sequence, count in plan.chunks] == [(1, 8), (3, 6), (2, 2)]


def test_a_lone_prompt_gets_the_whole_budget() -> None:
    """What nobody else wants goes back to the first."""
    rig = Rig(num_blocks=64, chunk_tokens=16)
    rig.scheduler.enqueue(make(1, 100))
    assert [count for _, count in rig.step().chunks] == [16]


def test_a_prefill_moves_even_where_decodes_fill_the_budget() -> None:
    """With as many decodes as the budget has tokens, one prefill token a step is computed all the same."""
    rig = Rig(num_blocks=64, max_batch=8, chunk_tokens=4)
    for number in range(1, 6):
        rig.scheduler.enqueue(make(number, 1, max_tokens=40))
    while len(rig.step().decodes) < 5:
        pass
    rig.scheduler.enqueue(make(9, 10))
    plan = rig.step()
    assert (len(plan.decodes), [count for _, count in plan.chunks]) == (5, [1])


def test_paused_sequences_are_left_out() -> None:
    """A paused sequence computes nothing and holds its place; when it goes on it is in the next step."""
    rig = Rig()
    sequence = make(1, 3, max_tokens=30)
    rig.scheduler.enqueue(sequence)
    rig.step()
    sequence.paused = True
    assert not rig.step().has_work
    assert sequence.state is SequenceState.RUNNING
    sequence.paused = False
    assert rig.step().decodes == [sequence]


# ---- admission


def test_order_is_by_priority_then_arrival() -> None:
    """Higher priority first; within one priority nobody overtakes."""
    rig = Rig(max_batch=1)
    for number, priority in ((1, 0), (2, 1), (3, 0), (4, 1)):
        rig.scheduler.enqueue(make(number, 3, priority=priority))
    rig.run(4)
    assert rig.ended == [2, 4, 1, 3]


def test_nobody_overtakes_a_head_that_finds_the_pool_full() -> None:
    """A small request behind a large one that waits for room does not go first, and the large one gets its turn."""
    rig = Rig(num_blocks=10)
    rig.scheduler.enqueue(make(1, 20, max_tokens=10))
    rig.step()
    rig.scheduler.enqueue(make(2, 30, max_tokens=2))
    rig.scheduler.enqueue(make(3, 2, max_tokens=2))
    rig.run(3)
    assert rig.ended.index(1) < rig.ended.index(2)
    assert 3 not in rig.ended[: rig.ended.index(1)]


def test_acquires_on_their_way_are_bounded_and_answered_in_order() -> None:
    """A few are asked for at once, by rank; an answer to another than the oldest is a defect and is told."""
    queue = AdmissionQueue()
    sequences = [make(number, 3) for number in range(1, MAX_ACQUIRES + 3)]
    for sequence in reversed(sequences):
        queue.add(sequence)
    asked = []
    while (sequence := queue.next()) is not None:
        asked.append(sequence)
    assert asked == sequences[:MAX_ACQUIRES]
    with pytest.raises(ValueError, match="oldest"):
        queue.answered(asked[1].sequence_id)
    assert queue.answered(asked[0].sequence_id) == (asked[0], True)
    assert queue.next() is sequences[MAX_ACQUIRES]


def test_what_was_granted_behind_a_full_pool_goes_back() -> None:
    """When one finds the pool full, those in flight behind it are out of turn, and all are asked for again in order."""
    queue = AdmissionQueue()
    sequences = [make(number, 3) for number in range(1, 5)]
    for sequence in sequences[:3]:
        queue.add(sequence)
    asked = [queue.next() for _ in range(3)]
    assert asked == sequences[:3]
    refuse(queue, sequences[0])
    queue.add(sequences[3])
    queue.retry()
    assert queue.next() is None, "those in flight come first"
    sequence, in_turn = queue.answered(sequences[1].sequence_id)
    assert (sequence, in_turn) == (sequences[1], False)
    queue.add(sequence)
    refuse(queue, sequences[2])
    assert [queue.next() for _ in range(4)] == sequences
    assert queue.answered(sequences[0].sequence_id) == (sequences[0], True)


def test_a_full_pool_stops_the_queue_until_there_may_be_room() -> None:
    """The head that found the pool full is not asked for again until `retry`, or until one of higher rank comes."""
    queue = AdmissionQueue()
    first, second, urgent = make(1, 3), make(2, 3), make(3, 3, priority=1)
    queue.add(first)
    queue.add(second)
    assert queue.next() is first
    refuse(queue, first)
    assert queue.is_blocked
    assert queue.next() is None
    queue.add(urgent)
    assert queue.next() is urgent
    assert queue.next() is None
    queue.retry()
    assert [queue.next(), queue.next()] == [first, second]


def test_an_idle_decoder_tries_others_when_its_head_finds_no_room_again_and_again() -> None:
    """After so many refusals in a row a few behind the head are tried, one at a time; then the head comes first again.
    While anything runs nobody passes."""
    queue = AdmissionQueue()
    sequences = [make(number, 3) for number in range(1, MAX_PASSES + 4)]
    for sequence in sequences:
        queue.add(sequence)
    head, others = sequences[0], sequences[1:]

    def refuse_head(is_idle: bool) -> None:
        queue.retry()
        assert queue.next(is_idle=is_idle) is head
        refuse(queue, head)

    for _ in range(PATIENCE - 1):
        refuse_head(is_idle=True)
        assert queue.next(is_idle=True) is None
    refuse_head(is_idle=True)
    assert queue.next(is_idle=False) is None
    passed = others[:MAX_PASSES]
    for place, sequence in enumerate(passed):
        assert queue.next(is_idle=True) is sequence
        assert queue.next(is_idle=True) is None, "one at a time"
        if place % 2:
            refuse(queue, sequence)
        else:
            assert queue.answered(sequence.sequence_id) == (sequence, True)
            queue.moved()  # as when it is admitted
    refuse_head(is_idle=True)
    assert queue.next(is_idle=True) is None, "patience begins anew"
    assert queue.waiting[0] is head


def test_while_anything_runs_nobody_passes_the_head() -> None:
    """A stream that will leave is waited for, however often the head is refused meanwhile."""
    rig = Rig(num_blocks=10)
    rig.scheduler.enqueue(make(1, 3, max_tokens=3 * PATIENCE * BLOCK))
    rig.step()
    rig.scheduler.enqueue(make(2, 10 * BLOCK - 1, max_tokens=1))
    rig.scheduler.enqueue(make(3, 3, max_tokens=1))
    for _ in range(2 * PATIENCE):
        rig.scheduler.queue.retry()
        assert not rig.admit()
        assert rig.scheduler.next_admission() is None
    assert [int(sequence.sequence_id) for sequence in rig.scheduler.queue.waiting] == [2, 3]


def test_one_that_may_pass_and_ends_or_pauses_is_left_out() -> None:
    """A cancelled or paused one is not tried; with nobody left the head is asked for as before."""
    queue = AdmissionQueue()
    head, gone, paused, last = sequences = [make(number, 3) for number in range(1, 5)]
    for sequence in sequences:
        queue.add(sequence)
    for _ in range(PATIENCE):
        queue.retry()
        assert queue.next(is_idle=True) is head
        refuse(queue, head)
    paused.paused = True
    assert queue.next(is_idle=True) is gone
    refuse(queue, gone)
    queue.discard(last)
    last.state = SequenceState.FINISHED
    assert queue.next(is_idle=True) is None
    queue.retry()
    assert queue.next(is_idle=True) is head


def test_prompts_are_admitted_when_the_next_step_can_begin_them() -> None:
    """A step's worth of prompts is admitted at once; a long one that came first keeps no short one out."""
    rig = Rig(num_blocks=200, max_batch=8, chunk_tokens=16)
    for number in range(1, 8):
        rig.scheduler.enqueue(make(number, 8))
    rig.step()
    assert len(rig.scheduler.running) == 3
    rig = Rig(num_blocks=200, max_batch=8, chunk_tokens=16)
    rig.scheduler.enqueue(make(1, 300))
    rig.scheduler.enqueue(make(2, 200))
    rig.scheduler.enqueue(make(3, 3))
    rig.step()
    assert len(rig.scheduler.running) == 3


def test_places_are_bounded() -> None:
    """Running, acquiring and promised sequences together never pass max_batch."""
    rig = Rig(max_batch=3)
    for number in range(1, 8):
        rig.scheduler.enqueue(make(number, 2, max_tokens=20))
    rig.step()
    assert len(rig.scheduler.running) == 3
    assert rig.scheduler.promise_places(5) == 0
    rig.end(rig.scheduler.running[0])
    assert rig.scheduler.promise_places(5) == 1
    assert rig.scheduler.next_admission() is None
    rig.scheduler.drop_promise(1)
    assert rig.scheduler.next_admission() is not None


@pytest.mark.parametrize("state", ["waiting", "acquiring", "running", "finished"])
def test_removing_is_legal_in_every_state_and_twice(state: str) -> None:
    """A sequence can be ended wherever it is; its place is free afterwards."""
    rig = Rig(max_batch=1)
    sequence = make(1, 3)
    rig.scheduler.enqueue(sequence)
    if state == "acquiring":
        rig.scheduler.next_admission()
    if state in ("running", "finished"):
        rig.step()
    if state == "finished":
        rig.end(sequence)
    for _ in range(2):
        rig.end(sequence)
    assert sequence.state is SequenceState.FINISHED
    if state == "acquiring":
        assert rig.scheduler.queue.answered(sequence.sequence_id) == (sequence, True)
    assert rig.scheduler.free_places == 1
    assert not rig.scheduler.running and not rig.scheduler.queue.waiting


# ---- room


def test_the_youngest_of_the_lowest_priority_gives_way_and_comes_back_first() -> None:
    """Preemption takes the lowest rank; the preempted goes before what arrived later."""
    rig = Rig(num_blocks=6, max_batch=3)
    rig.scheduler.enqueue(make(1, 7, max_tokens=12))
    rig.scheduler.enqueue(make(2, 7, max_tokens=12, priority=1))
    rig.scheduler.enqueue(make(3, 7, max_tokens=12))
    rig.scheduler.enqueue(make(4, 7, max_tokens=12))
    while not rig.preempted:
        rig.step()
    assert rig.preempted[0] == 3
    assert [int(sequence.sequence_id) for sequence in rig.scheduler.queue.waiting][:1] == [3]
    rig.run(4)
    assert rig.ended[0] == 2, "the highest rank is never preempted for another"


def test_a_beam_group_gives_way_as_a_whole() -> None:
    """When one member of a group has to give way all do; others keep their places, and nobody is admitted meanwhile."""
    rig = Rig(num_blocks=9)
    first, *members = [make(number, 7, max_tokens=20) for number in range(1, 5)]
    for member in members:
        member.group = rig
    for sequence in (first, *members):
        rig.scheduler.enqueue(sequence)
    while not rig.preempted:
        rig.step()
    assert sorted(rig.preempted) == [2, 3, 4]
    assert rig.scheduler.running == [first]
    assert rig.scheduler.next_admission() is None


def test_after_a_preemption_the_blocks_go_to_who_needed_them() -> None:
    """Nobody is admitted for a while, unless somebody leaves; then the queue moves again."""
    rig = Rig(num_blocks=6, max_batch=3)
    for number in (1, 2, 3):
        rig.scheduler.enqueue(make(number, 7, max_tokens=16))
    while not rig.preempted:
        rig.step()
    assert rig.scheduler.next_admission() is None
    for _ in range(HOLD_STEPS):
        rig.scheduler._hold = max(0, rig.scheduler._hold - 1)
    sequence = rig.scheduler.next_admission()
    assert sequence is not None
    refuse(rig.scheduler.queue, sequence)
    rig.run(3)


def test_paused_sequences_give_way_first() -> None:
    """Where a block lacks, a paused sequence gives way before a running one, though it came first."""
    rig = Rig(num_blocks=5, max_batch=2)
    first, second = make(1, 7, max_tokens=20), make(2, 7, max_tokens=10)
    rig.scheduler.enqueue(first)
    rig.scheduler.enqueue(second)
    rig.step()
    rig.step()
    first.paused = True
    while not rig.ended:
        rig.step()
    assert rig.preempted == [1]
    assert rig.ended == [2]
    first.paused = False
    rig.run(2)


def test_a_paused_sequence_makes_room_for_the_queue() -> None:
    """A head that finds the pool full takes the place of a stopped reader, who waits until it reads again."""
    rig = Rig(num_blocks=5, max_batch=2)
    first = make(1, 12, max_tokens=6)
    rig.scheduler.enqueue(first)
    rig.step()
    first.paused = True
    rig.scheduler.enqueue(make(2, 15, max_tokens=2))
    while not rig.ended:
        rig.step()
    assert (rig.preempted, rig.ended) == ([1], [2])
    first.paused = False
    rig.run(2)


def test_a_sequence_alone_that_outgrows_the_pool_is_told_so() -> None:
    """It uses the whole pool first, and nobody is preempted for what can never fit."""
    rig = Rig(num_blocks=6)
    rig.scheduler.enqueue(make(1, 4, max_tokens=100))
    rig.scheduler.enqueue(make(2, 4, max_tokens=3))
    rig.run(2)
    assert (rig.outgrown, rig.ended) == ([1], [2])


def test_what_a_window_has_passed_counts_for_nothing() -> None:
    """A sequence outgrows the pool by what it still reads: of 5 blocks in a pool of 4 it has passed one; without a
    window, or with one of which a key lies in each block, it is told so."""
    for window, ended in ((0, False), (14, False), (13, True), (4, True)):
        rig = Rig(num_blocks=4, windows=Windows(window, BLOCK))
        sequence = make(1, 4 * BLOCK, max_tokens=8)
        rig.scheduler.enqueue(sequence)
        rig.step()
        sequence.num_computed = 4 * BLOCK
        while sequence.num_tokens <= 4 * BLOCK:
            sequence.append_token(9)
        assert (len(rig.scheduler.schedule().outgrown) == 0) is ended, window


def test_with_groups_a_window_lets_no_block_go() -> None:
    """Where other layers read all keys, a sequence outgrows the pool whatever its windows have passed, and counts for
    all its blocks when somebody has to give way; but its table may be shorter than its prompt."""
    rig = Rig(num_blocks=4, windows=Windows(4, BLOCK, grouped=True))
    sequence = make(1, 4 * BLOCK, max_tokens=8)
    rig.scheduler.enqueue(sequence)
    rig.step()
    sequence.num_computed = 4 * BLOCK
    sequence.append_token(9)
    assert len(rig.scheduler.schedule().outgrown) == 1
    assert not rig.scheduler.windows.fit(100)
    rig = Rig(num_blocks=32, chunk_tokens=2 * BLOCK, windows=Windows(4, BLOCK, grouped=True))
    sequence = make(2, 20 * BLOCK, max_tokens=8)
    rig.scheduler.enqueue(sequence)
    assert rig.scheduler.next_admission() is sequence
    rig.scheduler.queue.answered(sequence.sequence_id)
    rig.scheduler.admit(sequence, LeaseId(9), rig.pool.take(1), 0, None)
    assert rig.scheduler.schedule().chunks == [(sequence, BLOCK)]
    assert rig.scheduler.need_soon() == 1


def test_credit_is_asked_ahead_and_given_back() -> None:
    """Decodes find their blocks without waiting; when nothing runs no credit is held."""
    rig = Rig()
    rig.scheduler.enqueue(make(1, 4, max_tokens=60))
    rig.step()
    for _ in range(59):
        assert rig.step().decodes
    rig.step()
    assert len(rig.scheduler.credit) == 0


# ---- the credit alone


def test_one_ask_is_on_its_way_at_a_time() -> None:
    """A second ask waits for the answer; a short answer stops asking ahead until room changed or need is real."""
    credit = Credit()
    assert credit.settle(3, in_need=False)[0] == 3
    assert credit.settle(5, in_need=False)[0] == 0
    credit.answered(3, 0)
    assert credit.settle(3, in_need=False)[0] == 0
    assert not credit.is_refused
    assert credit.settle(3, in_need=True)[0] == 3
    credit.answered(3, 1)
    assert credit.is_refused
    credit.room_changed()
    assert credit.settle(3, in_need=False)[0] == 3


def test_who_was_lent_a_block_of_its_own_makes_nobody_give_way() -> None:
    """Where an ask in need brought blocks for some that stood still, the next one may too: it is not refused. What came
    for a sequence that is over goes back at once, and is presented until then."""
    credit = Credit()
    assert credit.settle(3, in_need=True)[0] == 3
    credit.answered(3, 0, may_follow=True)
    assert not credit.is_refused
    assert credit.settle(3, in_need=False)[0] == 0, "but nothing is asked for ahead of need"
    assert credit.settle(3, in_need=True)[0] == 3
    credit.answered(3, 0)
    assert credit.is_refused
    credit.grant([4])
    credit.send_back([9])
    assert credit.blocks.tolist() == [4, 9]
    asked, returned = credit.settle(3, in_need=False)
    assert (asked, returned.tolist(), credit.blocks.tolist()) == (0, [9], [4])
    credit.send_back([9])
    credit.clear()
    assert not len(credit.blocks)


def test_surplus_goes_back() -> None:
    """What is far above the need goes back, and everything where nothing is needed."""
    credit = Credit()
    credit.grant(range(1, 30))
    asked, returned = credit.settle(5, in_need=False)
    assert (asked, len(returned), len(credit)) == (0, 24, 5)
    credit.grant(range(40, 40 + 5 + SLACK_BLOCKS))
    assert len(credit.settle(5, in_need=False)[1]) == 0
    assert len(credit.settle(0, in_need=False)[1]) == 10 + SLACK_BLOCKS
    assert len(credit) == 0


def test_after_a_reclaim_nothing_is_asked_ahead() -> None:
    """Reclaimed blocks go back at once, and for a while need is counted for the next step alone."""
    credit = Credit()
    credit.grant([1, 2, 3])
    credit.reclaim(2)
    assert credit.ahead_steps == 1
    assert len(credit.settle(3, in_need=False)[1]) == 2
    for _ in range(LEAN_STEPS):
        credit.settle(1, in_need=False)
    assert credit.ahead_steps > 1


# ---- liveness


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_everything_that_came_in_ends(seed: int) -> None:
    """Random loads on random pools, with pauses and cancels: all end or are told they cannot, and all blocks return."""
    chance = random.Random(seed)
    num_blocks = chance.randrange(4, 40)
    rig = Rig(num_blocks, max_batch=chance.randrange(1, 8), chunk_tokens=chance.choice((1, 4, 16, 64)))
    fresh = [
        make(
            number,
            chance.randrange(1, BLOCK * (num_blocks - 1)),
            max_tokens=chance.randrange(1, 40),
            priority=chance.randrange(-1, 2),
        )
        for number in range(1, chance.randrange(2, 14))
    ]
    everyone = list(fresh)
    gone = 0
    for _ in range(20_000):
        if fresh and chance.random() < 0.4:
            rig.scheduler.enqueue(fresh.pop())
        if chance.random() < 0.02:
            sequence = chance.choice(everyone)
            if sequence not in fresh and sequence.state is not SequenceState.FINISHED:
                rig.end(sequence)
                gone += 1
        for sequence in everyone:
            if chance.random() < 0.05:
                sequence.paused = not sequence.paused
            if chance.random() < 0.5:
                sequence.paused = False
        rig.step()
        running = [sequence for sequence in rig.scheduler.running if not sequence.paused]
        assert len(running) <= rig.scheduler.max_batch
        if not fresh and len(rig.ended) + len(rig.outgrown) + gone == len(everyone):
            break
    else:
        raise AssertionError((seed, rig.ended, rig.outgrown, gone, len(everyone)))
    rig.step()
    assert sorted(rig.pool.free) == list(range(1, num_blocks + 1))
    for number in rig.outgrown:
        item = everyone[number - 1].request
        assert len(item.prompt) + item.stopping.max_tokens - 1 > num_blocks * BLOCK
