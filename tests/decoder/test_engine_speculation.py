"""Speculative decoding in the engine: guesses change no token, cost nobody anything, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from decoder.draft_pace import FIRST_LENGTH, FIRST_REST, LONGEST_REST, MAX_MISSES, DraftPace
from decoder.sequence import IntArray, Request, SpeculationMode, SpeculationParams, StoppingParams
from decoder.sequence import Sequence as Running
from decoder.speculation import lookup
from tests.decoder.rig import BLOCK_TOKENS, VOCAB, Node, RecallModel, prompt_of, request, solo

LOOKUP = SpeculationParams(SpeculationMode.PROMPT_LOOKUP, 8)


class Teller:
    """Guesses from known answers, by number and sample, wrong with a probability."""

    def __init__(self, answers: dict[int, dict[int, list[int]]], wrong: float, seed: int = 0) -> None:
        self._answers = answers
        self._wrong = wrong
        self._random = np.random.default_rng(seed)
        self.guesses: list[tuple[Running, list[int]]] = []

    def propose(self, wanted: Sequence[tuple[Running, int]]) -> list[IntArray]:
        """See Drafter."""
        drafts = []
        for sequence, count in wanted:
            answer = self._answers[sequence.request.number][sequence.sample]
            draft = np.array(answer[sequence.num_generated : sequence.num_generated + count], np.int32)
            draft = np.where(self._random.random(len(draft)) < self._wrong, (draft + 1) % VOCAB, draft).astype(np.int32)
            self.guesses.append((sequence, draft.tolist()))
            drafts.append(draft)
        return drafts


def without_end(item: Request) -> Request:
    """A request whose answer goes on where that of `item` ends, so that guesses past the end are right ones too."""
    if item.stopping.min_tokens:
        return item
    return replace(item, stopping=StoppingParams(item.stopping.max_tokens + 16))


def telling(node: Node, items: Sequence[Request], wrong: float, seed: int = 0) -> Teller:
    """A node whose guesses are those of a `Teller`."""
    teller = Teller({item.number: solo(without_end(item)) for item in items}, wrong, seed)
    node.engine._loop._speculator._drafters[SpeculationMode.PROMPT_LOOKUP] = teller
    return teller


def spoken(node: Node, item: Request) -> dict[int, list[int]]:
    """The tokens of each sample."""
    return {sample: node.sink.tokens[item.number, sample] for sample in range(item.sampling.num_samples)}


def indexed(node: Node) -> list[tuple[list[int], list[int]]]:
    """Every node of the index: all tokens from the root to its end, and its blocks."""
    found = []
    for item in node.manager._state.index.forest.nodes.values():
        tokens, above = b"", item
        while above is not None:
            tokens, above = above.edge + tokens, above.parent
        found.append((np.frombuffer(tokens, "<i4").tolist(), item.blocks.tolist()))
    return found


def assert_only_answers_are_indexed(node: Node, answers: Sequence[list[int]]) -> int:
    """What the index lists is what was said, and what lies in its blocks; how many tokens of answers there are."""
    longest = 0
    for tokens, blocks in indexed(node):
        assert any(tokens == answer[: len(tokens)] for answer in answers), tokens
        first = (-(-len(tokens) // BLOCK_TOKENS) - len(blocks)) * BLOCK_TOKENS
        stored = node.arena[blocks, 0, 0, 0, :, 0].reshape(-1)[: len(tokens) - first]
        assert stored.tolist() == tokens[first:]
        longest = max(longest, len(tokens))
    return longest


KINDS: list[dict[str, Any]] = [
    {"max_tokens": 41},
    {"max_tokens": 30, "temperature": 1.0, "seed": 5},
    {"max_tokens": 30, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "seed": 6},
    {"max_tokens": 33, "repetition_penalty": 1.8, "presence_penalty": 1.0, "frequency_penalty": 0.7},
    {"max_tokens": 33, "temperature": 1.0, "seed": 7, "frequency_penalty": 2.0, "logit_bias": ((5, 3.0),)},
    {"max_tokens": 30, "min_tokens": 17, "stop_ids": range(0, VOCAB, 2), "seed": 8, "temperature": 1.0},
    {"max_tokens": 60, "stop_ids": range(90, 95), "seed": 9, "temperature": 1.0},
    {"max_tokens": 25, "num_samples": 3, "temperature": 1.0, "seed": 10},
    {"max_tokens": 1},
    {"max_tokens": 2},
]


@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("blocks", [512, 34])
def test_every_way_of_choosing_tokens_is_as_without_guesses(wrong: float, blocks: int) -> None:
    """Greedy, sampled, penalised, biased, masked, stopped, with samples, on a pool that forces preemption too: the
    tokens and their log-probabilities are those of plain decoding, whatever share of the guesses is right."""
    items = [
        request(number, prompt_of(5 + 3 * number, number), num_logprobs=2, speculation=LOOKUP, **kind)
        for number, kind in enumerate(KINDS)
    ]
    plain = Node(num_blocks=512)
    node = Node(num_blocks=blocks, chunk_tokens=32, lateness=lambda: 1)
    telling(node, items, wrong)
    for item in items:
        plain.submit(replace(item, speculation=None))
        node.submit(item)
    plain.finish(*range(len(items)))
    node.finish(*range(len(items)))
    for item in items:
        assert spoken(node, item) == solo(item), item.number
        for sample in range(item.sampling.num_samples):
            assert node.sink.logprobs[item.number, sample] == plain.sink.logprobs[item.number, sample]
            assert node.sink.finished[item.number, sample] == plain.sink.finished[item.number, sample]
        assert node.sink.ended[item.number][0] == plain.sink.ended[item.number][0]
    drafted = sum(node.sink.drafts[item.number][0] for item in items)
    accepted = sum(node.sink.drafts[item.number][1] for item in items)
    assert drafted
    assert {0.0: accepted > 0.8 * drafted, 1.0: accepted == 0}.get(wrong, 0 < accepted < drafted)
    if blocks < 100:
        assert node.manager.snapshot().preemptions
        node.assert_quiet()
        return
    if not wrong:
        assert len(node.model.batches) < 0.5 * len(plain.model.batches)
    node.assert_quiet()
    listed = {tuple(tokens) for tokens, _ in indexed(node)}
    for item in items:  # all but the last token, which was never computed
        computed = (*item.prompt.tolist(), *solo(item)[0])[:-1]
        assert item.sampling.num_samples > 1 or computed in listed, item.number


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.1, "seed": 3}])
def test_prompt_lookup_takes_fewer_steps_where_text_repeats(sampling: dict[str, Any]) -> None:
    """A model that repeats itself is guessed right: the same tokens in far fewer steps, and the count of both."""
    answers, steps = [], []
    for speculation in (None, LOOKUP):
        node = Node(model=RecallModel(window=1))
        node.submit(request(1, prompt_of(9), max_tokens=120, speculation=speculation, **sampling))
        node.finish(1)
        answers.append(node.sink.tokens[1, 0])
        steps.append(len(node.model.batches))
        node.assert_quiet()
    assert answers[0] == answers[1]
    drafted, accepted = node.sink.drafts[1]
    assert 0 < accepted <= drafted
    assert accepted == steps[0] - steps[1], "each right guess saves one step"
    if not sampling:
        assert steps[1] < 0.4 * steps[0]


def test_wrong_guesses_are_never_published() -> None:
    """Row 12: six requests share five blocks and guess wrongly half the time, one is cancelled midway: what is indexed
    is what was said, and the blocks hold it."""
    shared = prompt_of(5 * BLOCK_TOKENS, 99)
    items = [
        request(number, shared + prompt_of(number, number), max_tokens=45, speculation=LOOKUP) for number in range(6)
    ]
    node = Node(num_blocks=256, chunk_tokens=96)
    teller = telling(node, items, 0.3)
    for item in items:
        node.submit(item)
    node.until(lambda: len(node.sink.tokens.get((3, 0), [])) >= 12)
    node.engine.cancel(node.sink, 3)
    node.finish(*(number for number in range(6) if number != 3))
    for item in items:
        told = node.sink.tokens[item.number, 0]
        assert told == solo(item)[0][: len(told)]
        assert len(told) == 45 or item.number == 3
    answers = [item.prompt.tolist() + solo(item)[0] for item in items]
    assert_only_answers_are_indexed(node, answers)
    assert sum(node.sink.drafts[number][0] > node.sink.drafts[number][1] for number in (0, 1, 2, 4, 5)) == 5
    assert any(guess != solo(s.request)[0][s.num_generated :][: len(guess)] for s, guess in teller.guesses)
    node.assert_quiet()


def test_a_commit_that_counts_wrong_guesses_is_seen() -> None:
    """The positive control of row 12: with wrong guesses counted as computed, the index lists what nobody said."""
    item = request(1, prompt_of(9), max_tokens=45, speculation=LOOKUP)
    node = Node()
    telling(node, [item], 0.5)
    node.submit(item)
    counted: Callable[[Running, int, int], None] = node.engine._loop._committer._count_drafts

    def too_many(sequence: Running, drafted: int, accepted: int) -> None:
        sequence.num_computed += min(drafted, sequence.remaining) - accepted
        counted(sequence, drafted, accepted)

    node.engine._loop._committer._count_drafts = too_many  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        node.finish(1)
        assert spoken(node, item) == solo(item)
        assert_only_answers_are_indexed(node, [item.prompt.tolist() + solo(item)[0]])


def test_guesses_take_only_what_a_step_leaves() -> None:
    """While a long prompt is computed nobody guesses; alone, a step is never larger than its bound."""
    items = [request(number, prompt_of(6, number), max_tokens=40, speculation=LOOKUP) for number in range(4)]
    node = Node(num_blocks=256, chunk_tokens=8)
    telling(node, items, 0.0)
    for item in items:
        node.submit(item)
    node.until(lambda: all(len(node.sink.tokens.get((n, 0), [])) > 8 for n in range(4)))
    node.submit(request(9, prompt_of(64, 9), max_tokens=2))
    node.finish(0, 1, 2, 3, 9)
    assert max(tokens for _, tokens in node.model.batches) <= 8
    assert all(spoken(node, item) == solo(item) for item in items)
    node.assert_quiet()


def test_a_reader_that_stops_pauses_a_guessing_sample() -> None:
    """The window holds with guesses as well, up to those of one step, and reading goes on where it was."""
    item = request(1, prompt_of(9), max_tokens=60, speculation=LOOKUP)
    node = Node(window_tokens=10)
    telling(node, [item], 0.0)
    node.submit(item)
    node.settle()
    told = len(node.sink.tokens[1, 0])
    assert 10 < told <= 10 + 1 + LOOKUP.draft_tokens
    node.engine.consumed(node.sink, 1, 60)
    node.finish(1)
    assert spoken(node, item) == solo(item)
    node.assert_quiet()


def test_a_drafter_that_fails_ends_nothing() -> None:
    """An error while guessing makes the step a plain one."""

    class Broken:
        def propose(self, wanted: Sequence[tuple[Running, int]]) -> list[IntArray]:
            raise ValueError("no guess")

    item = request(1, prompt_of(9), max_tokens=20, speculation=LOOKUP)
    node = Node()
    node.engine._loop._speculator._drafters[SpeculationMode.PROMPT_LOOKUP] = Broken()
    node.submit(item)
    node.finish(1)
    assert spoken(node, item) == solo(item)
    assert node.sink.drafts[1] == (0, 0)


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([], 4, []),
        ([1], 4, []),
        ([1, 2, 3], 4, []),
        ([7, 7], 4, []),
        ([7, 7, 7], 4, [7]),
        ([1, 2, 8, 9, 1, 2], 4, [8, 9, 1, 2]),
        ([1, 2, 8, 9, 1, 2], 1, [8]),
        ([1, 2, 8, 1, 2, 9, 1, 2], 2, [9, 1]),  # the latest of two
        ([5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2], 2, [8, 6]),  # three tokens before two
    ],
)
def test_lookup_finds_what_followed(tokens: list[int], count: int, expected: list[int]) -> None:
    """The latest occurrence of the last three tokens, else of the last two, says what may come next."""
    assert lookup(np.array(tokens, np.int32), count).tolist() == expected


def test_the_pace_follows_what_was_right() -> None:
    """It doubles to its bound, falls to what was right, rests where nothing is, longer each time, and recovers."""
    pace = DraftPace(8)
    assert pace.length == FIRST_LENGTH
    pace.record(4, 4)
    assert pace.length == 8
    pace.record(8, 2)
    assert pace.length == 3
    rests = []
    for _ in range(7):
        while pace.length:
            pace.record(pace.length, 0)
        rests.append(0)
        while not pace.length:
            pace.passed()
            rests[-1] += 1
    assert rests == [min(LONGEST_REST, FIRST_REST * 2**k) for k in range(7)]
    assert pace.length == 1
    pace.record(1, 1)
    assert pace.length == 2
    for _ in range(MAX_MISSES):
        pace.record(pace.length, 0)
    while not pace.length:
        pace.passed()
        rests[0] -= 1
    assert rests[0] == 0, "one right guess makes the next rest the shortest again"
