"""Waiting for a prefix that another sequence computes: bounded, fair, and computed once."""

from __future__ import annotations

import numpy as np
import pytest

from cachemgr.manager import CacheManager
from decoder.admission import AdmissionQueue
from decoder.inprocess import InProcessClient
from decoder.prefix_waits import MAX_PATIENCES, PrefixWaits
from decoder.sequence import Sequence, SequenceId
from tests.decoder.rig import BLOCK_TOKENS, Node, RecallModel, prompt_of, request, solo

SECOND = 1_000_000_000
PROMPT = prompt_of(30 * BLOCK_TOKENS, seed=7)


def sequence(number: int, priority: int = 0) -> Sequence:
    """A sequence of its own request, arrived in the order of the numbers."""
    return Sequence(SequenceId(number), request(number, [5, 6, 7], priority=priority), 0, number, is_trunk=False)


def asked(queue: AdmissionQueue) -> int:
    """Number of the sequence that is asked for next; 0 for none."""
    chosen = queue.next()
    return 0 if chosen is None else chosen.sequence_id


def test_a_waiting_sequence_is_passed_and_keeps_its_rank() -> None:
    """Those behind it are asked for meanwhile; when its prefix is there it is the first again."""
    queue = AdmissionQueue()
    first, second, third = (sequence(number) for number in (1, 2, 3))
    for item in (first, second, third):
        queue.add(item)
    assert asked(queue) == 1
    queue.answered(SequenceId(1))
    queue.wait(first, 11, 0, 0)
    assert asked(queue) == 2
    queue.waits.ready(11)
    assert asked(queue) == 1
    assert asked(queue) == 3


def test_a_wait_without_progress_ends_with_the_patience() -> None:
    """It is asked for once more, and if still nothing came, without waiting; never before."""
    waits = PrefixWaits(5.0)
    item = sequence(1)
    waits.begin(item, 11, 0, 0)
    waits.expire(5 * SECOND - 1)
    assert waits.is_waiting(item) and waits.seconds_left(4 * SECOND) == 1.0
    waits.expire(5 * SECOND)
    assert not waits.is_waiting(item) and waits.may_wait(item)
    waits.begin(item, 12, 0, 5 * SECOND)
    assert not waits.is_waiting(item) and not waits.may_wait(item)
    assert waits.seconds_left(5 * SECOND) is None


def test_progress_prolongs_a_wait_chunk_by_chunk() -> None:
    """As long as more of the prompt becomes resident the wait may go on; a producer that stands still ends it."""
    waits = PrefixWaits(5.0)
    item = sequence(1)
    for chunk in range(3):
        now = chunk * 5 * SECOND
        waits.expire(now)
        waits.begin(item, 20 + chunk, chunk * 100, now)
        assert waits.is_waiting(item)
    waits.expire(15 * SECOND)
    waits.begin(item, 30, 200, 15 * SECOND)
    assert not waits.may_wait(item)


def test_a_producer_that_crawls_is_not_waited_for_for_ever() -> None:
    """However steady the progress, a wait lasts some patiences and no more."""
    waits = PrefixWaits(5.0)
    item = sequence(1)
    for second in range(0, MAX_PATIENCES * 5, 4):
        waits.expire(second * SECOND)
        waits.begin(item, 20 + second, second, second * SECOND)
        assert waits.is_waiting(item)
    end = MAX_PATIENCES * 5 * SECOND
    assert waits.seconds_left(end - SECOND) == 1.0
    waits.expire(end)
    assert not waits.is_waiting(item)
    waits.begin(item, 99, 10_000, end)
    assert not waits.is_waiting(item) and not waits.may_wait(item)


def test_producers_that_die_one_after_the_other_do_not_prolong_a_wait() -> None:
    """Word that the first has died starts no new patience while nothing came of it."""
    waits = PrefixWaits(5.0)
    item = sequence(1)
    for number in range(5):
        waits.begin(item, 40 + number, 0, number * SECOND)
        waits.ready(40 + number)
    waits.begin(item, 50, 0, 5 * SECOND)
    assert not waits.is_waiting(item) and not waits.may_wait(item)


def test_without_patience_nobody_waits() -> None:
    """`wait_seconds` 0 turns it off."""
    assert not PrefixWaits(0.0).may_wait(sequence(1))
    assert PrefixWaits(1.0).may_wait(sequence(1))


def test_ends_and_losses_leave_nothing_behind() -> None:
    """A sequence that ends while it waits, and a session that is lost or away, forget their waits."""
    queue = AdmissionQueue()
    first, second = sequence(1), sequence(2)
    queue.wait(first, 11, 0, 0)
    queue.wait(second, 12, 0, 0)
    queue.discard(first)
    queue.waits.ready(11)
    assert len(queue.waits) == 1
    queue.recall()
    queue.waits.ready(12)
    assert len(queue.waits) == 0
    assert asked(queue) == 2


class Pair:
    """Two engines over one cache manager and one arena, stepped by hand; their clock is `now_ns`."""

    def __init__(self, num_blocks: int = 128, **options: object) -> None:
        self.now_ns = 0
        model = RecallModel()
        arena = model.arena(num_blocks)
        self.manager = CacheManager(num_blocks=num_blocks, block_tokens=BLOCK_TOKENS, epoch=1)
        self.peers: dict[object, InProcessClient] = {}
        self.nodes = [
            Node(
                num_blocks, model=RecallModel(), manager=self.manager, arena=arena, peers=self.peers,
                clock_ns=lambda: self.now_ns, **options,
            )
            for _ in range(2)
        ]  # fmt: skip

    def computed(self) -> int:
        """Tokens that the models of both computed."""
        return sum(tokens for node in self.nodes for _, tokens in node.model.batches)

    def settle(self) -> None:
        """Step both until nothing moves."""
        for _ in range(2000):
            if not any([node._step() for node in self.nodes]):  # noqa: C419 - both step
                return
        raise AssertionError("they do not come to rest")


def test_two_decoders_compute_one_prompt_once() -> None:
    """The second waits for the first and reads its blocks: one prefill between them, and right tokens from both."""
    pair = Pair(chunk_tokens=16)
    items = [request(1, PROMPT, max_tokens=6), request(2, [*PROMPT, 9], max_tokens=6)]
    first, second = pair.nodes
    first.submit(items[0])
    first.step(3)
    second.submit(items[1])
    pair.settle()
    assert first.sink.tokens[1, 0] == solo(items[0])[0]
    assert second.sink.tokens[2, 0] == solo(items[1])[0]
    assert second.sink.cached[2] == len(PROMPT)
    assert pair.computed() == len(PROMPT) + 1 + 2 * 5
    shot = pair.manager.snapshot()
    assert (shot.waits, shot.hits, shot.misses, shot.hit_tokens) == (1, 1, 1, len(PROMPT))
    assert not pair.manager.check_integrity()


def test_without_waiting_both_compute() -> None:
    """The control: with the option off the same two compute twice, and end with one copy."""
    pair = Pair(chunk_tokens=16, wait_seconds=0.0)
    first, second = pair.nodes
    first.submit(request(1, PROMPT, max_tokens=2))
    first.step(3)
    second.submit(request(2, PROMPT, max_tokens=2))
    pair.settle()
    assert pair.manager.snapshot().waits == 0
    assert pair.computed() > 1.5 * len(PROMPT)
    assert pair.manager.snapshot().indexed_blocks == 30 + 1


@pytest.mark.parametrize("end", ["cancel", "stop"])
def test_if_the_first_dies_the_second_computes(end: str) -> None:
    """Killed in the middle, the first leaves what it sealed; the second goes on from there, at once."""
    pair = Pair(chunk_tokens=16)
    item = request(2, PROMPT, max_tokens=4)
    first, second = pair.nodes
    first.submit(request(1, PROMPT, max_tokens=4))
    first.step(4)
    second.submit(item)
    second.step(3)
    assert pair.manager.snapshot().waits == 1
    if end == "cancel":
        first.engine.cancel(first.sink, item.number.__class__(1))
        first.step(2)
    else:
        first.client.abandon(1)
    second.settle()
    assert second.sink.tokens[2, 0] == solo(item)[0]
    assert 0 < second.sink.cached[2] < len(PROMPT) - 1
    assert not pair.manager.check_integrity()


def test_a_first_that_stands_still_is_not_waited_for_for_ever() -> None:
    """A producer that pauses costs the patience, and no more."""
    pair = Pair(chunk_tokens=16, wait_seconds=2.0)
    item = request(2, PROMPT, max_tokens=4)
    first, second = pair.nodes
    first.submit(request(1, PROMPT, max_tokens=4))
    first.step(4)
    second.submit(item)
    second.step(4)
    pair.now_ns = 2 * SECOND - 1
    second.step(4)
    assert not second.sink.cached
    pair.now_ns = 2 * SECOND
    second.settle()
    assert second.sink.tokens[2, 0] == solo(item)[0]
    pair.settle()
    assert not pair.manager.check_integrity()


def test_others_are_served_while_one_waits() -> None:
    """A request behind a waiting one of the same decoder is not held up by it."""
    pair = Pair(chunk_tokens=16)
    first, second = pair.nodes
    first.submit(request(1, PROMPT, max_tokens=4))
    first.step(3)
    second.submit(request(2, PROMPT, max_tokens=4))
    second.submit(request(3, prompt_of(9, seed=3), max_tokens=3))
    second.settle()
    assert 3 in second.sink.ended and 2 not in second.sink.cached
    pair.settle()
    assert second.sink.tokens[2, 0] == solo(request(2, PROMPT, max_tokens=4))[0]


def test_within_one_decoder_a_prompt_is_computed_once() -> None:
    """Six requests with one prompt at once: one prefill, six right answers."""
    node = Node(num_blocks=128, chunk_tokens=64)
    items = [request(number, [*PROMPT, number], max_tokens=5) for number in range(1, 7)]
    for item in items:
        node.submit(item)
    node.finish(*range(1, 7))
    for item in items:
        assert node.sink.tokens[item.number, 0] == solo(item)[0]
    prefilled = sum(tokens - decodes for decodes, tokens in node.model.batches)
    assert prefilled < len(PROMPT) + 6 * BLOCK_TOKENS
    node.assert_quiet()


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_waits_cancels_and_shared_prompts_is_right(seed: int) -> None:
    """Random shared prompts on two decoders, with cancels: every answer equals solo, and both come to rest."""
    random = np.random.default_rng(seed)
    pair = Pair(num_blocks=64, chunk_tokens=12)
    stems = [prompt_of(40, seed=90 + number) for number in range(3)]
    sent: dict[tuple[int, int], object] = {}
    for number in range(1, 31):
        which = int(random.integers(2))
        stem = stems[random.integers(3)]
        item = request(number, [*stem[: random.integers(1, 41)], *prompt_of(3, seed=number)], max_tokens=4)
        pair.nodes[which].submit(item)
        sent[which, number] = item
        for node in pair.nodes:
            node.step(int(random.integers(3)))
        if random.integers(4) == 0:
            pair.nodes[which].engine.cancel(pair.nodes[which].sink, item.number)
            del sent[which, number]
        assert not pair.manager.check_integrity()
    for _ in range(50):
        pair.settle()
        if all(pair.nodes[which].sink.done(number) for which, number in sent):
            break
        pair.now_ns += SECOND
    for (which, number), item in sent.items():
        assert pair.nodes[which].sink.tokens[number, 0] == solo(item)[0]  # type: ignore[arg-type]
    assert pair.manager.snapshot().leases == 0
    assert not pair.manager.check_integrity()
