"""Too little room, late answers, cancels at any moment: everything ends, nothing leaks, and tokens do not change."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from cachemgr.results import Acquired, SequenceReport
from common.errors import Aborted, Internal, ResourceExhausted
from common.tokens import pack_tokens
from decoder.admission import PATIENCE
from decoder.cache_api import AbortAsked, AbortDone, CreditReclaimed, Growth, Replacement, Reported
from decoder.inprocess import InProcessClient
from tests.decoder.rig import BLOCK_TOKENS, Node, greedy_oracle, prompt_of, request, solo


def test_preempted_sequences_resume_with_the_same_tokens() -> None:
    """Six growing streams on a pool for three: some give way, and no token is changed, lost or told twice."""
    node = Node(num_blocks=24)
    for number in range(6):
        node.submit(request(number, prompt_of(2 * BLOCK_TOKENS, seed=number), max_tokens=40))
    node.finish(*range(6))
    for number in range(6):
        assert node.sink.tokens[number, 0] == greedy_oracle(prompt_of(2 * BLOCK_TOKENS, seed=number), 40)
        assert node.sink.ended[number] == (40, node.sink.ended[number][1])
    assert node.manager.snapshot().preemptions > 0
    node.assert_quiet()


def test_penalties_count_the_same_after_a_preemption() -> None:
    """Row 34: what was generated before a sequence lost its blocks is penalised after it as if it had kept them; and
    so is what a full hit did not compute."""
    penalties = {"frequency_penalty": 1.05, "repetition_penalty": 1.3, "max_tokens": 40}
    items = [request(number, prompt_of(2 * BLOCK_TOKENS, seed=number), **penalties) for number in range(6)]
    node = Node(num_blocks=24)
    for item in items:
        node.submit(item)
    node.finish(*range(6))
    for item in items:
        assert node.sink.tokens[item.number, 0] == solo(item)[0]
        plain = greedy_oracle(item.prompt.tolist(), 40)
        assert node.sink.tokens[item.number, 0] != plain, "control: the penalties matter"
    assert node.manager.snapshot().preemptions > 0
    node.submit(request(9, prompt_of(2 * BLOCK_TOKENS, seed=5), **penalties))
    node.finish(9)
    assert node.sink.tokens[9, 0] == solo(items[5])[0]
    assert node.sink.cached[9] == 2 * BLOCK_TOKENS - 1
    node.assert_quiet()


def test_preempted_requests_that_store_nothing_resume_too() -> None:
    """Without a cache to resume from the whole sequence is computed again, with the same tokens."""
    node = Node(num_blocks=16)
    for number in range(5):
        node.submit(request(number, prompt_of(8, seed=number), max_tokens=30, no_read=True, no_store=True))
    node.finish(*range(5))
    for number in range(5):
        assert node.sink.tokens[number, 0] == greedy_oracle(prompt_of(8, seed=number), 30)
    assert node.manager.snapshot().preemptions > 0
    assert node.manager.snapshot().cached_blocks == 0
    node.assert_quiet()


@pytest.mark.parametrize("replaces", [True, False])
def test_nobody_gives_way_for_blocks_that_are_about_to_go_back(replaces: bool) -> None:
    """What is held twice goes back once the answer that says so is acknowledged, with the next ask. So that answer
    refuses nobody who stands still, though it brought no block; another one does."""
    node = Node()
    node.submit(request(1, prompt_of(20), max_tokens=40))
    node.until(lambda: (1, 0) in node.sink.tokens)
    loop = node.engine._loop
    (sequence,), credit = loop._scheduler.running, loop._scheduler.credit
    assert sequence.lease is not None
    same = Replacement(sequence.lease, 0, sequence.table[:1].copy())
    credit.clear()
    assert credit.settle(1, in_need=True)[0] == 1
    loop.intake.handle(Reported(1, np.zeros(0, np.int32), (same,) * replaces, (), node.manager.revision))
    assert credit.is_refused == (not replaces)


@pytest.mark.parametrize("ends", ["with the answer before", "with the same answer", "after it was told"])
def test_what_was_lent_to_a_sequence_that_is_over_goes_back(ends: str) -> None:
    """A block that came for one sequence alone is returned, or told with its last report; nothing keeps it."""
    node = Node()
    node.submit(request(1, prompt_of(20), max_tokens=40))
    node.until(lambda: (1, 0) in node.sink.tokens)
    loop, manager = node.engine._loop, node.manager
    (sequence,), credit = loop._scheduler.running, loop._scheduler.credit
    lease, none = sequence.lease, np.zeros(0, np.int32)
    assert lease is not None
    block = manager.credit(node.session, 1, 0)
    grown = Reported(1, none, (), (), 0, grown=(Growth(lease, block),))
    over = Reported(0, none, (), ((lease, Internal("refused")),), 0)
    for answer in {"after it was told": [grown], "with the same answer": [grown, over]}.get(ends, [over, grown]):
        loop.intake.handle(answer)
    if ends == "after it was told":
        assert int(block[0]) in sequence.table
        node.finish(1)
    else:
        assert int(block[0]) in credit.blocks
        node.until(lambda: manager.list_sessions().items[0].credit_blocks == 0)
    assert not len(credit)


def test_hits_are_counted_once_for_each_request() -> None:
    """A preempted request that finds its own blocks again is no hit: cached_tokens stay those of its admission."""
    node = Node(num_blocks=16)
    for number in range(4):
        node.submit(request(number, prompt_of(8, seed=number), max_tokens=30))
    node.finish(*range(4))
    snapshot = node.manager.snapshot()
    assert snapshot.preemptions > 0
    assert (snapshot.hits, snapshot.misses, snapshot.hit_tokens) == (0, 4, 0)
    assert set(node.sink.cached.values()) == {0}


def test_two_large_prompts_never_wait_for_each_other() -> None:
    """Two prompts that fit one at a time run one after the other."""
    node = Node(num_blocks=32)
    for number in (1, 2):
        node.submit(request(number, prompt_of(20 * BLOCK_TOKENS, seed=number)))
    node.finish(1, 2)
    for number in (1, 2):
        assert node.sink.tokens[number, 0] == greedy_oracle(prompt_of(20 * BLOCK_TOKENS, seed=number), 8)
    node.assert_quiet()


def test_late_answers_let_nobody_overtake() -> None:
    """A small request that was granted blocks behind one that found the pool full gives them back and waits."""
    node = Node(num_blocks=12, lateness=lambda: 2)
    node.submit(request(0, prompt_of(22), max_tokens=12))
    node.until(lambda: (0, 0) in node.sink.tokens)
    node.submit(request(1, prompt_of(9 * BLOCK_TOKENS, seed=1), max_tokens=3))
    node.submit(request(2, prompt_of(2, seed=2), max_tokens=2))
    node.until(lambda: node.sink.done(0))
    assert not {1, 2} & set(node.sink.cached), "there would have been room for the small one"
    node.finish(1, 2)
    for number, prompt, count in ((1, prompt_of(9 * BLOCK_TOKENS, seed=1), 3), (2, prompt_of(2, seed=2), 2)):
        assert node.sink.tokens[number, 0] == greedy_oracle(prompt, count)
    snapshot = node.manager.snapshot()
    assert (snapshot.hits, snapshot.misses) == (0, 3), "each request is counted once"
    node.assert_quiet()


def reserve(node: Node, how: str) -> None:
    """Five of the node's blocks are kept for another tenant: by its floor, by a pin, or (the control) not at all."""
    manager, name, root = node.manager, TenantId("other"), b"o" * 32
    tokens = pack_tokens(np.array(prompt_of(5 * BLOCK_TOKENS, seed=99), np.int32))
    session = manager.attach(decoder_name="decoder-9", process_id=2, now_ns=0)
    lease = manager.acquire(session, tenant=name, root=root, tokens=tokens, request_id="other", sample=0, now_ns=0)
    assert isinstance(lease, Acquired)
    done = SequenceReport(lease.lease_id, sealed_tokens=5 * BLOCK_TOKENS, release=True)
    manager.report(session, [done], returned=np.zeros(0, np.int32), wanted=0, applied_revision=0, now_ns=0)
    manager.detach(session, process_dead=True, now_ns=0)
    assert manager.snapshot().cached_blocks == 5
    manager.set_quota(name, Quota(floor_blocks=5 * (how == "floor"), pin_blocks=5))
    if how == "pin":
        assert manager.pin(name, root=root, tokens=tokens, now_ns=0).num_blocks == 5


@pytest.mark.parametrize("length", [2 * BLOCK_TOKENS, 18 * BLOCK_TOKENS])
@pytest.mark.parametrize("how", ["floor", "pin", "none"])
def test_what_floors_and_pins_leave_bounds_a_sequence_and_stops_nobody(how: str, length: int) -> None:
    """One that outgrows what is left, or a prompt that is larger at once, ends with numbers, and those behind it are
    served. Without floor and pin the same request is served to its end."""
    node = Node(num_blocks=20)
    reserve(node, how)
    count = 19 * BLOCK_TOKENS - length
    node.submit(request(0, prompt_of(length), max_tokens=count))
    for number in (1, 2):
        node.submit(request(number, prompt_of(6, seed=number)))
    node.finish(0, 1, 2)
    for number in (1, 2):
        assert node.sink.tokens[number, 0] == greedy_oracle(prompt_of(6, seed=number), 8)
    told = node.sink.tokens.get((0, 0), [])
    assert told == greedy_oracle(prompt_of(length), count)[: len(told)]
    if how == "none":
        assert len(told) == count
    else:
        error = node.sink.failed[0]
        assert isinstance(error, ResourceExhausted)
        assert (error.reason, error.usable) == ("EXCEEDS_USABLE", 15)
        assert error.needed == max(16, -(-length // BLOCK_TOKENS))
        assert len(told) == max(0, 15 * BLOCK_TOKENS - length + 1)
    if how == "pin":
        node.manager.unpin(node.manager.list_pins().items[0].pin)
    node.assert_quiet()


def test_a_head_that_others_keep_out_does_not_stop_an_idle_decoder() -> None:
    """Blocks that a stopped decoder may still write let a large prompt wait; small ones behind it are served, and it is
    served once the blocks are back."""
    node = Node(num_blocks=20)
    stopped = node.manager.attach(decoder_name="decoder-9", process_id=2, now_ns=0)
    node.manager.acquire(
        stopped, tenant=TenantId("other"), root=b"o" * 32, tokens=bytes(4 * 5 * BLOCK_TOKENS), request_id="other",
        sample=0, now_ns=0,
    )  # fmt: skip
    node.manager.detach(stopped, process_dead=False, now_ns=0)
    node.submit(request(0, prompt_of(17 * BLOCK_TOKENS)))
    for number in range(1, 4):
        node.submit(request(number, prompt_of(6, seed=number)))
    for tries in range(PATIENCE):
        assert not node.sink.cached, tries
        node.step(4)
        node.engine._loop._next_retry_ns = 0  # time passes
    node.until(lambda: all(node.sink.done(number) for number in range(1, 4)))
    assert not node.sink.done(0)
    node.manager.process_gone(stopped)
    node.engine._loop._next_retry_ns = 0
    node.finish(0)
    assert node.sink.tokens[0, 0] == greedy_oracle(prompt_of(17 * BLOCK_TOKENS), 8)
    node.assert_quiet()


def test_two_decoders_on_one_pool_both_finish() -> None:
    """Two engines that outgrow a shared pool together give way in turn, and read each other's blocks."""
    peers: dict[Any, InProcessClient] = {}
    first = Node(num_blocks=20, peers=peers)
    second = Node(manager=first.manager, arena=first.arena, peers=peers)
    nodes = (first, second)
    shared = prompt_of(3 * BLOCK_TOKENS)
    for node in nodes:
        for number in range(3):
            node.submit(request(number, shared + prompt_of(3, seed=number), max_tokens=25))
    for _ in range(4000):
        for node in nodes:
            node.step()
        assert not first.manager.check_integrity()
        if all(node.sink.done(number) for node in nodes for number in range(3)):
            break
        first.engine._loop._next_retry_ns = second.engine._loop._next_retry_ns = 0  # time passes
    for node in nodes:
        for number in range(3):
            assert node.sink.tokens[number, 0] == greedy_oracle(shared + prompt_of(3, seed=number), 25)
    assert first.manager.snapshot().hits > 0
    for node in nodes:
        node.settle()
    first.assert_quiet()


@pytest.mark.parametrize("lateness", [0, 1, 3])
@pytest.mark.parametrize("steps", range(0, 16, 2))
def test_a_cancel_at_any_moment_ends_a_request_for_good(steps: int, lateness: int) -> None:
    """Queued, acquiring, in the middle of a prefill, decoding: no token after the next step, and no block stays."""
    node = Node(lateness=lambda: lateness)
    node.submit(request(1, prompt_of(40), max_tokens=40))
    node.submit(request(2, prompt_of(9, seed=1), max_tokens=20))
    node.step(steps)
    for _ in range(2):
        node.engine.cancel(node.sink, 1)
    node.step()
    told = len(node.sink.tokens.get((1, 0), []))
    node.finish(2)
    assert len(node.sink.tokens.get((1, 0), [])) == told < 40
    assert node.sink.ended[1][0] == told
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(9, seed=1), 20)
    node.assert_quiet()


def test_a_cancelled_turn_may_be_continued_by_another_request() -> None:
    """After a cancel a request with the same start reads at most what was computed, and says what it says alone."""
    node = Node()
    node.submit(request(1, prompt_of(30), max_tokens=50))
    node.until(lambda: len(node.sink.tokens.get((1, 0), [])) == 5)
    node.engine.cancel(node.sink, 1)
    other = prompt_of(30) + node.sink.tokens[1, 0] + prompt_of(5, seed=1)
    node.submit(request(2, other))
    node.finish(2)
    assert node.sink.tokens[2, 0] == greedy_oracle(other, 8)
    assert 30 <= node.sink.cached[2] <= 35
    node.assert_quiet()


def test_a_sink_that_goes_takes_its_requests_with_it() -> None:
    """After disconnect nothing of it runs or waits, it is told nothing more, and unknown ids are harmless."""
    node = Node(max_batch=2)
    for number in range(4):
        node.submit(request(number, prompt_of(9, seed=number), max_tokens=50))
    node.step(5)
    results = node.sink.num_results
    node.engine.disconnect(node.sink)
    node.engine.cancel(node.sink, 1)
    node.engine.consumed(node.sink, 99, 5)
    node.settle()
    assert (node.engine.num_requests, node.sink.num_results) == (0, results)
    node.assert_quiet()


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_abort_by_request_id_is_answered_after_the_end(steps: int) -> None:
    """A running or queued request ends with ABORTED; an unknown one is not found; a repeat is harmless."""
    node = Node(max_batch=1)
    node.submit(request(1, prompt_of(9), max_tokens=50))
    node.submit(request(2, prompt_of(8), max_tokens=5))
    node.step(steps)
    for abort_id, name in enumerate(("request-1", "request-1", "request-9"), 1):
        node.engine._inbox.put(AbortAsked(abort_id, name))
    node.finish(1, 2)
    assert isinstance(node.sink.failed[1], Aborted)
    assert node.client.aborts_answered == [AbortDone(1, True), AbortDone(2, False), AbortDone(3, False)]
    assert node.sink.tokens[2, 0] == greedy_oracle(prompt_of(8), 5)
    node.assert_quiet()


def test_credit_that_is_asked_back_is_returned() -> None:
    """After a reclaim the unused credit is back with the next step, and the sequence goes on with the same tokens."""
    node = Node()
    node.submit(request(1, prompt_of(7), max_tokens=30))
    node.step(4)
    assert node.manager.snapshot().credit_blocks > 0
    node.engine._inbox.put(CreditReclaimed(10))
    node.engine.step()
    assert node.manager.snapshot().credit_blocks == 0
    node.finish(1)
    assert node.sink.tokens[1, 0] == greedy_oracle(prompt_of(7), 30)
    node.assert_quiet()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_happens_every_request_ends_as_if_alone(seed: int) -> None:
    """Random loads on small pools, late answers, cancels, slow readers: all end, all equal solo, nothing is held."""
    chance = random.Random(seed)
    node = Node(
        num_blocks=chance.choice((11, 16, 30)),
        max_batch=chance.choice((2, 4, 8)),
        chunk_tokens=chance.choice((16, 24, 64)),
        window_tokens=chance.choice((3, 8, 1000)),
        lateness=lambda: chance.choice((0, 0, 1, 2, 5)),
    )
    shared = prompt_of(chance.randrange(1, 20), seed=seed % 7)
    items = [
        request(
            number,
            (shared if chance.random() < 0.6 else []) + prompt_of(chance.randrange(1, 12), seed=chance.randrange(4)),
            max_tokens=chance.randrange(1, 14),
            priority=chance.randrange(2),
            num_samples=chance.choice((1, 1, 1, 2, 3)),
            temperature=chance.choice((0.0, 1.0)),
            seed=chance.randrange(100),
            frequency_penalty=chance.choice((0.0, 0.0, 1.05)),
            no_store=chance.random() < 0.2,
        )
        for number in range(chance.randrange(2, 12))
    ]
    cancelled: set[int] = set()
    waiting = list(items)

    def act() -> None:
        if waiting and chance.random() < 0.5:
            node.submit(waiting.pop(0))
        if chance.random() < 0.05:
            number = chance.choice(items).number
            cancelled.add(number)
            node.engine.cancel(node.sink, number)
        if chance.random() < 0.05:
            node.engine._inbox.put(CreditReclaimed(chance.randrange(1, 4)))
        for item in items:
            told = sum(len(tokens) for (number, _), tokens in node.sink.tokens.items() if number == item.number)
            if chance.random() < 0.3:
                node.engine.consumed(node.sink, item.number, told)

    for _ in range(3000):
        act()
        node.step()
        node.engine._loop._next_retry_ns = 0  # time passes
        assert not node.manager.check_integrity()
        if not waiting and all(node.sink.done(item.number) for item in items):
            break
    assert not node.sink.failed, (seed, node.sink.failed)
    for item in items:
        expected = solo(item)
        assert item.number in node.sink.ended, (seed, item.number)
        for sample, tokens in expected.items():
            got = node.sink.tokens.get((item.number, sample), [])
            if item.number in cancelled:
                assert got == tokens[: len(got)], (seed, item.number, sample)
            else:
                assert got == tokens, (seed, item.number, sample)
    node.assert_quiet()
    assert np.isnan(node.arena).any(), "blocks are poisoned when freed: a stale read would have shown"
