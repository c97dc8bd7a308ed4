"""Beam search in the engine: the answers of a naive search, over shared blocks, whatever gives way beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import InvalidArgument, ResourceExhausted
from decoder.beams import blocks_of_group
from decoder.cache_api import CreditReclaimed
from decoder.outputs import EndReason
from decoder.sequence import BeamParams, Request, StoppingParams
from tests.decoder.rig import BLOCK_TOKENS, VOCAB, Node, RecallModel, prompt_of, recall_logits, request, solo
from tests.decoder.test_engine_speculation import LOOKUP, telling

Answer = tuple[tuple[int, ...], int | None]


@lru_cache(maxsize=100_000)
def log_probabilities(tokens: tuple[int, ...]) -> np.ndarray:
    row = recall_logits(tokens).astype(np.float64)
    return np.asarray(row - np.log(np.exp(row - row.max()).sum()) - row.max())


def search(
    prompt: Sequence[int], width: int, penalty: float, stopping: StoppingParams, bad_ids: frozenset[int]
) -> list[Answer]:
    """A naive search over every continuation of every hypothesis: (tokens, stop id) of the best, best first."""
    stops, max_tokens = stopping.stop_ids, stopping.max_tokens
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...], int | None]] = []
    for length in range(1, max_tokens + 1):
        candidates = []
        for total, tokens in running:
            row = log_probabilities((*prompt, *tokens))
            for token in range(VOCAB):
                if token not in bad_ids and (token not in stops or length > stopping.min_tokens):
                    candidates.append((total + row[token], (*tokens, token)))
        candidates.sort(key=lambda item: -item[0])
        for total, tokens in candidates[:width]:
            if tokens[-1] in stops or length == max_tokens:
                stop = tokens[-1] if tokens[-1] in stops else None
                finished.append((total / length**penalty, tokens, stop))
        finished = sorted(finished, key=lambda item: -item[0])[:width]
        running = [item for item in candidates if item[1][-1] not in stops][:width]
        if len(finished) == width and running[0][0] / length**penalty <= finished[-1][0]:
            break
    return [(tokens, stop) for _, tokens, stop in finished]


def answers(node: Node, number: int) -> list[Answer]:
    """What the engine told of each sample."""
    told = sorted(sample for name, sample in node.sink.tokens if name == number)
    return [(tuple(node.sink.tokens[number, s]), node.sink.finished[number, s].stop_id) for s in told]


def beamed(
    number: int, prompt: Sequence[int], width: int, penalty: float = 0.0, n: int | None = None, **fields: Any
) -> Request:
    """A request for a beam search; all its hypotheses unless said."""
    return request(number, prompt, beam=BeamParams(width, penalty), num_samples=n or width, **fields)


def expected(item: Request) -> list[Answer]:
    """The naive answer."""
    assert item.beam is not None
    found = search(
        item.prompt.tolist(), item.beam.width, item.beam.length_penalty, item.stopping, item.sampling.bad_ids
    )
    return found[: item.sampling.num_samples]


CASES = [
    beamed(0, prompt_of(9), 1, max_tokens=12),
    beamed(1, prompt_of(9), 4, max_tokens=14),
    beamed(2, prompt_of(2 * BLOCK_TOKENS), 3, 1.0, n=2, max_tokens=11),
    beamed(3, prompt_of(1), 5, 0.7, max_tokens=9, stop_ids=range(60, 75)),
    beamed(4, prompt_of(13, 4), 4, 1.0, max_tokens=20, stop_ids=range(30)),
    beamed(5, prompt_of(13, 4), 4, -1.0, n=1, max_tokens=20, stop_ids=range(30)),
    beamed(6, prompt_of(7, 6), 3, 2.0, max_tokens=16, min_tokens=9, stop_ids=range(40)),
    beamed(7, prompt_of(6, 7), 16, 1.0, n=3, max_tokens=7, stop_ids=[5]),
    beamed(8, prompt_of(6, 8), 2, max_tokens=1),
    beamed(9, prompt_of(6, 9), 3, max_tokens=9, stop_ids=range(30), bad_ids=frozenset(range(10, 70))),
]


@pytest.mark.parametrize("item", CASES, ids=lambda item: str(item.number))
def test_the_answers_are_those_of_a_naive_search(item: Request) -> None:
    """Widths 1 to 16, length penalties of each sign, stops, min_tokens, fewer answers than beams: tokens, ends and
    counts are those of a search that looks at everything, and nothing is held afterwards."""
    node = Node(num_blocks=256, chunk_tokens=32)
    node.submit(item)
    node.finish(item.number)
    assert answers(node, item.number) == expected(item)
    for sample, (_, stop) in enumerate(expected(item)):
        reason = EndReason.LENGTH if stop is None else EndReason.STOP
        assert node.sink.finished[item.number, sample].reason is reason
    assert node.sink.ended[item.number][0] == sum(len(tokens) for tokens, _ in expected(item))
    node.assert_quiet()


def test_one_beam_is_greedy() -> None:
    """Width 1 says what greedy decoding says."""
    item = beamed(1, prompt_of(11), 1, max_tokens=15)
    assert list(expected(item)[0][0]) == solo(request(1, prompt_of(11), max_tokens=15))[0]


@pytest.mark.parametrize(("blocks", "lateness"), [(512, 0), (512, 2), (40, 1)])
def test_searches_beside_other_work_change_nothing(blocks: int, lateness: int) -> None:
    """Searches and plain requests together, with answers that come late, on a pool that forces whole groups to give way
    too: everybody says what it says alone."""
    items = [*CASES[:7], *(request(20 + n, prompt_of(8 + n, 20 + n), max_tokens=25) for n in range(4))]
    node = Node(num_blocks=blocks, chunk_tokens=24, max_batch=16, lateness=lambda: lateness)
    for item in items:
        node.submit(item)
    node.finish(*(item.number for item in items))
    for item in items:
        if item.beam is None:
            assert node.sink.tokens[item.number, 0] == solo(item)[0]
        else:
            assert answers(node, item.number) == expected(item), item.number
    if blocks < 100:
        assert node.manager.snapshot().preemptions
    node.assert_quiet()


def test_beams_share_blocks_and_copy_where_they_part() -> None:
    """While four beams run, whole blocks of the prompt are in all tables, every partly filled block in one alone, and
    copies were made; together they hold far less than four sequences that share nothing."""
    node = Node(num_blocks=256, chunk_tokens=64)
    item = beamed(1, prompt_of(8 * BLOCK_TOKENS + 3), 4, max_tokens=24)
    node.submit(item)
    most, seen = 0, 0
    while not node.sink.done(1):
        node.step()
        leases = node.manager.list_leases().items
        tables = [lease.blocks for lease in leases]
        most = max(most, len({block for table in tables for block in table}))
        if len(tables) == 4:
            seen += 1
            assert all(table[:8] == tables[0][:8] for table in tables)
            partly = [lease.blocks[-1] for lease in leases if lease.num_tokens % BLOCK_TOKENS]
            assert len(partly) == len(set(partly))
    assert seen > 10
    assert most <= 8 + 4 * 8
    assert node.sink.ended[1][1] >= 3
    assert answers(node, 1) == expected(item)
    node.assert_quiet()


@pytest.mark.parametrize("steps", range(1, 14, 2))
def test_cancel_ends_every_beam(steps: int) -> None:
    """Cancelled at any moment, forks on their way included, a search leaves nothing behind and tells nothing more."""
    node = Node(lateness=lambda: 1)
    node.submit(beamed(1, prompt_of(10), 4, max_tokens=30))
    node.step(steps)
    node.engine.cancel(node.sink, 1)
    node.settle()
    assert not node.sink.tokens
    node.assert_quiet()
    item = beamed(2, prompt_of(10), 3, max_tokens=5)
    node.submit(item)
    node.finish(2)
    assert answers(node, 2) == expected(item)


def test_cancelling_one_answer_leaves_the_search() -> None:
    """A sample that nobody wants any more is not told; the others are."""
    node = Node()
    item = beamed(1, prompt_of(10), 3, max_tokens=9)
    node.submit(item)
    node.step(4)
    node.engine.cancel(node.sink, 1, 0)
    node.finish(1)
    assert answers(node, 1) == expected(item)[1:]
    node.assert_quiet()


def test_groups_take_all_their_places_at_once() -> None:
    """Two searches of three beams on four places take turns; one of more beams than places is refused by name."""
    node = Node(max_batch=4)
    items = [beamed(number, prompt_of(10, number), 3, max_tokens=9) for number in range(2)]
    for item in items:
        node.submit(item)
    node.submit(beamed(9, prompt_of(10), 5, max_tokens=9))
    running = 0
    while not (node.sink.done(0) and node.sink.done(1)):
        node.step()
        running = max(running, len(node.engine._loop._scheduler.running))
    assert running <= 4
    assert [answers(node, item.number) for item in items] == [expected(item) for item in items]
    error = node.sink.failed[9]
    assert isinstance(error, InvalidArgument) and error.field == "beam.width"
    node.assert_quiet()


@pytest.mark.parametrize("no_store", [False, True])
def test_a_search_that_outgrows_the_pool_ends(no_store: bool) -> None:
    """Beams that no pool of this size can hold end with the numbers, at once or when they get there, and no more."""
    node = Node(num_blocks=12)
    node.submit(beamed(1, prompt_of(8), 6, max_tokens=90, no_store=no_store))
    node.submit(beamed(2, prompt_of(8 * BLOCK_TOKENS), 8, max_tokens=90))
    node.finish(1, 2)
    for number in (1, 2):
        error = node.sink.failed[number]
        assert isinstance(error, ResourceExhausted) and error.reason == "EXCEEDS_POOL"
    item = beamed(3, prompt_of(8), 3, max_tokens=9)
    node.submit(item)
    node.finish(3)
    assert answers(node, 3) == expected(item)
    node.assert_quiet()


def test_a_search_that_outgrows_the_window_blocks_ends() -> None:
    """Where some layers have a window: beams that start again and come no further end with the numbers; those that do
    come further are answered in full."""
    node = Node(num_blocks=60, model=RecallModel(group_window=40))
    assert node.manager.num_window_blocks == 24
    node.submit(beamed(1, prompt_of(9, seed=1), 12, max_tokens=60))
    node.finish(1)
    error = node.sink.failed[1]
    assert isinstance(error, ResourceExhausted) and error.reason == "EXCEEDS_POOL"
    assert error.needed is not None and error.needed > 24 and error.usable == 24
    item = beamed(2, prompt_of(9, seed=1), 6, max_tokens=60)
    node.submit(item)
    node.finish(2)
    assert answers(node, 2) == expected(item)
    node.assert_quiet()


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    """With log-probabilities asked for, each token of each answer has its own, and their sum orders the answers."""
    node = Node()
    node.submit(beamed(1, prompt_of(10), 3, max_tokens=8, num_logprobs=2))
    node.finish(1)
    sums = []
    for sample in range(3):
        tokens, logprobs = node.sink.tokens[1, sample], node.sink.logprobs[1, sample]
        rows = [log_probabilities((*prompt_of(10), *tokens[:place])) for place in range(len(tokens))]
        told = [item.chosen for item in logprobs]
        assert np.allclose(told, [row[token] for row, token in zip(rows, tokens, strict=True)], atol=1e-5)
        assert [item.top[0][0] for item in logprobs] == [int(row.argmax()) for row in rows]
        sums.append(sum(told))
    assert sums == sorted(sums, reverse=True)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_happens_searches_and_guesses_are_as_if_alone(seed: int) -> None:
    """Searches, guesses, samples and plain requests on small pools, with late answers, cancels and credit asked back:
    all end, all say what they say alone, and nothing is held. Only beams that a full pool cannot hold may fail."""
    chance = random.Random(seed)
    blocks = chance.choice((12, 18, 30, 60))
    node = Node(
        num_blocks=blocks,
        max_batch=chance.choice((4, 5, 8)),
        chunk_tokens=chance.choice((16, 24, 64)),
        lateness=lambda: chance.choice((0, 0, 1, 2, 5)),
    )
    shared = prompt_of(chance.randrange(1, 20), seed=seed % 7)
    items = [_any_request(number, chance, shared) for number in range(chance.randrange(2, 9))]
    telling(node, [item for item in items if item.beam is None], 0.4)
    cancelled: set[int] = set()
    waiting = list(items)
    for _ in range(4000):
        if waiting and chance.random() < 0.5:
            node.submit(waiting.pop(0))
        if chance.random() < 0.03:
            number = chance.choice(items).number
            cancelled.add(number)
            node.engine.cancel(node.sink, number)
        if chance.random() < 0.05:
            node.engine._inbox.put(CreditReclaimed(chance.randrange(1, 4)))
        node.step()
        node.engine._loop._next_retry_ns = 0  # time passes
        assert not node.manager.check_integrity()
        if not waiting and all(node.sink.done(item.number) or item.number in cancelled for item in items):
            break
    else:
        raise AssertionError(f"seed {seed}: {[item.number for item in items if not node.sink.done(item.number)]}")
    for item in items:
        error = node.sink.failed.get(item.number)
        if error is not None:
            assert item.beam is not None and isinstance(error, ResourceExhausted), (seed, error)
            length = len(item.prompt) + item.stopping.max_tokens
            assert blocks_of_group(BLOCK_TOKENS, len(item.prompt), length, item.beam.width) > blocks, seed
        elif item.number in cancelled:
            continue
        elif item.beam is not None:
            assert answers(node, item.number) == expected(item), (seed, item.number)
        else:
            told = {s: node.sink.tokens[item.number, s] for s in range(item.sampling.num_samples)}
            assert told == solo(item), (seed, item.number)
    for item in items:
        node.engine.cancel(node.sink, item.number)
    node.assert_quiet()
    assert node.engine._loop._scheduler.forking == 0


def _any_request(number: int, chance: random.Random, shared: list[int]) -> Request:
    prompt = (shared if chance.random() < 0.6 else []) + prompt_of(chance.randrange(1, 12), seed=chance.randrange(4))
    fields: dict[str, Any] = {
        "max_tokens": chance.randrange(1, 12),
        "priority": chance.randrange(2),
        "no_store": chance.random() < 0.2,
        "stop_ids": chance.choice(((), (), range(8))),
    }
    if chance.random() < 0.5:
        width = chance.randrange(1, 5)
        return beamed(number, prompt, width, chance.choice((0.0, 1.0)), n=chance.randrange(1, width + 1), **fields)
    return request(
        number, prompt, speculation=chance.choice((None, LOOKUP)), num_samples=chance.choice((1, 1, 2)),
        temperature=chance.choice((0.0, 1.0)), seed=chance.randrange(100), **fields,
    )  # fmt: skip


def test_the_prompt_of_a_search_is_scored_like_any_other() -> None:
    """Log-probabilities of the prompt come with a search too, the same as with a plain request."""
    told = []
    for beam in (None, BeamParams(3)):
        node = Node(chunk_tokens=16)
        node.submit(replace(request(1, prompt_of(23), max_tokens=4, beam=beam), num_prompt_logprobs=1))
        node.finish(1)
        told.append(node.sink.starts[1].prompt_logprobs)
        node.assert_quiet()
    assert told[0] == told[1]
    assert len(told[0]) == 22
