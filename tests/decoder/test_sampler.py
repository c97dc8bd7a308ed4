"""The sampler against a plain oracle: distributions, filters, penalties, ties, extremes, independence of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.penalties import SeenTokens
from decoder.philox import philox, uniforms
from decoder.sampler import Draw, _pick, logprobs, sample, seen_by
from decoder.sequence import SamplingParams

VOCAB = 60


def row_of(seed: int, vocab: int = VOCAB, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def draw(logits: np.ndarray, position: int = 0, row: int = 0, index: int = 0, **options: Any) -> int | None:
    masked = frozenset(options.pop("masked", ()))
    seen = options.pop("seen", None)
    params = SamplingParams(**{"seed": 1, **options})
    return sample(np.atleast_2d(logits), [Draw(row, params, index, position, masked, seen)])[0].token


def oracle_probabilities(
    logits: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p, by full sorts in float64."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        weights[order[top_k:]] = 0
    if top_p < 1:
        sums = np.cumsum(weights[order]) / weights.sum()
        keep = int(np.argmax(sums >= top_p)) + 1
        weights[order[keep:]] = 0
    weights[weights < min_p] = 0
    return weights / weights.sum()


# ---- random numbers


def test_philox_gives_the_published_vectors() -> None:
    """The known answers of Random123 for philox4x32-10."""
    counters = np.array([[0] * 4, [0xFFFFFFFF] * 4, [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], np.uint64).T
    keys = np.array([[0, 0], [0xFFFFFFFF] * 2, [0xA4093822, 0x299F31D0]], np.uint64).T
    words = [[int(word) for word in column] for column in philox(counters, keys).T]
    assert words == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


def test_draws_are_uniform_and_differ_by_each_part_of_their_name() -> None:
    """Seed (all 64 bits), sample and position each give another number, in [0, 1), spread evenly."""
    numbers = uniforms([7] * 20_000, [0] * 20_000, list(range(20_000)))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)
    names = [(1, 0, 0), (2, 0, 0), (1 + 2**32, 0, 0), (2**64 - 1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)]
    assert len(set(uniforms(*(list(part) for part in zip(*names, strict=True))).tolist())) == len(names)


# ---- greedy


def test_greedy_takes_the_first_of_equals() -> None:
    """Ties go to the smaller id, alone and in a batch."""
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1, [9, 30]] = 4
    draws = [Draw(row, SamplingParams(temperature=0.0), 0, 0) for row in range(3)]
    assert [one.token for one in sample(logits, draws)] == [0, 9, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-20, 1e-6, 1e-4])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    """Tiny temperatures neither overflow nor draw anything but the likeliest token."""
    for seed in range(30):
        assert draw(row_of(seed), position=seed, temperature=temperature) == int(row_of(seed).argmax())


@pytest.mark.parametrize("temperature", [1e10, 1e30, 1e38, 1e300])
def test_the_hottest_temperatures_are_flat(temperature: float) -> None:
    """Huge temperatures draw every token about as often, and never a masked one."""
    tokens = [draw(row_of(1), position=place, temperature=temperature, masked=[5]) for place in range(6000)]
    counts = np.bincount(np.array(tokens), minlength=VOCAB)
    assert counts[5] == 0
    assert np.abs(np.delete(counts, 5) - 6000 / 59).max() < 6 * np.sqrt(6000 / 59)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_gives_no_token_and_harms_no_other(bad: float) -> None:
    """NaN or infinity is told for its row alone."""
    logits = np.stack([row_of(1), row_of(2)])
    logits[0, 17] = bad
    draws = [Draw(row, SamplingParams(temperature=value), 0, 0) for row in (0, 1) for value in (0.0, 1.0)]
    tokens = [one.token for one in sample(logits, draws)]
    assert tokens[:2] == [None, None]
    assert tokens[2] == int(row_of(2).argmax())
    assert tokens[3] is not None


def test_rows_are_looked_at_alone_or_together_with_the_same_result() -> None:
    """All rows of a step, some of them or one: each gives its own likeliest token, or none where it is not finite."""
    logits = np.stack([row_of(seed) for seed in range(6)])
    logits[1, 17], logits[2, 3], logits[4] = np.nan, np.inf, -np.inf
    logits[5, 4] = -np.inf  # as a model may mask a token
    wanted = {row: int(logits[row].argmax()) if row in (0, 3, 5) else None for row in range(6)}
    padded = np.pad(logits, ((0, 0), (0, 5)), constant_values=1e9)[:, :VOCAB]
    for rows in (range(6), range(5, -1, -1), (0, 1, 2, 3, 4, 5, 3), (1, 3, 5), (4,), (5,)):
        draws = [Draw(row, SamplingParams(temperature=0.0), 0, 0) for row in rows]
        for values in (logits, padded):
            assert [one.token for one in sample(values, draws)] == [wanted[row] for row in rows]


# ---- distributions


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 2.5, "top_k": 7},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 2.0, "min_p": 0.1},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 3.0, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "top_k": VOCAB + 5},
    ],
)
def test_frequencies_are_those_of_the_oracle(options: dict[str, Any]) -> None:
    """Over many positions each token comes as often as the filtered distribution says, and no other comes."""
    num_draws = 20_000
    logits = row_of(3, scale=2.0)
    params = SamplingParams(seed=9, **options)
    drawn = sample(logits[None], [Draw(0, params, 0, position) for position in range(num_draws)])
    counts = np.bincount(np.array([one.token for one in drawn]), minlength=VOCAB)
    expected = num_draws * oracle_probabilities(
        logits,
        temperature=params.temperature,
        top_k=params.top_k if params.top_k < VOCAB else 0,
        top_p=params.top_p,
        min_p=params.min_p,
    )
    assert counts[expected == 0].sum() == 0
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected) + 5).all()


def test_a_large_vocabulary_is_searched_to_its_end() -> None:
    """Runs of a large vocabulary, the last shorter one too, are reached in proportion."""
    logits = np.full(5000, -20, np.float32)
    logits[[0, 511, 512, 4608, 4999]] = 0
    tokens = [draw(logits, position=place, temperature=1.0) for place in range(3000)]
    counts = {token: tokens.count(token) for token in (0, 511, 512, 4608, 4999)}
    assert sum(counts.values()) >= 2990
    assert all(abs(count - 600) < 130 for count in counts.values())


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_no_number_picks_a_token_without_weight(number: float) -> None:
    """The very first and last numbers pick a token that has weight, though the runs around it have none."""
    weights = np.zeros(3000, np.float32)
    weights[[700, 1400]] = 1.0
    assert _pick(weights, number) in (700, 1400)


def test_a_wide_nucleus_is_found_beyond_its_first_guess() -> None:
    """top_p of a flat distribution keeps as many of a large vocabulary as the share asks for, smaller ids first."""
    logits = np.zeros(3000, np.float32)
    tokens = {draw(logits, position=place, temperature=1.0, top_p=0.5) for place in range(4000)}
    assert tokens <= set(range(1500))
    assert len(tokens) > 1200


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.01, 50),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.001, 1.0),
    min_p=st.floats(0, 1),
)
def test_a_token_is_always_one_the_filters_keep(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Whatever the parameters, the token has a probability under the oracle (or sits on a filter's very edge)."""
    logits = row_of(seed)
    token = draw(logits, position=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert token is not None
    kept = oracle_probabilities(
        logits, temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-5), min_p=max(0.0, min_p - 1e-5)
    )
    assert kept[token] > 0


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), others=st.integers(0, 12), place=st.integers(0, 12))
def test_a_token_does_not_depend_on_the_batch(seed: int, others: int, place: int) -> None:
    """The same row, parameters and name give the same token wherever it stands among whatever others."""
    params = SamplingParams(temperature=1.2, top_p=0.95, seed=seed)
    alone = sample(row_of(5)[None], [Draw(0, params, 2, 77)])[0].token
    rows = [row_of(100 + number) for number in range(others)]
    place = min(place, others)
    rows.insert(place, row_of(5))
    draws = [Draw(number, SamplingParams(temperature=0.7, seed=number), 0, number) for number in range(others + 1)]
    draws[place] = Draw(place, params, 2, 77)
    assert sample(np.stack(rows), draws)[place].token == alone


# ---- biases, masks, penalties


def test_a_bias_adds_to_its_logit_alone() -> None:
    """A bias of 100 forces a token, of -100 keeps it out, and the logits that were handed in stay as they are."""
    logits = row_of(4)
    before = logits.copy()
    best = int(logits.argmax())
    assert draw(logits, temperature=0.0, logit_bias=((11, 100.0),)) == 11
    assert draw(logits, temperature=0.0, logit_bias=((best, -100.0),)) == int(np.argsort(logits)[-2])
    assert np.array_equal(logits, before)


def test_masked_ids_are_never_drawn() -> None:
    """Masked ids do not come, greedily or not, even against a bias."""
    logits = row_of(6)
    best = int(logits.argmax())
    assert draw(logits, temperature=0.0, masked=[best]) != best
    for place in range(500):
        assert draw(logits, position=place, temperature=1.0, masked=[best], logit_bias=((best, 100.0),)) != best


def test_penalties_are_those_of_their_definition() -> None:
    """Repetition by prompt and answer, presence and frequency by the answer, against a plain loop."""
    params = SamplingParams(repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.9)
    prompt, answer = [3, 3, 8, 20], [8, 5, 5, 5]
    logits = row_of(7)
    expected = logits.astype(np.float64)
    for token in set(prompt + answer):
        expected[token] = expected[token] / 1.7 if expected[token] > 0 else expected[token] * 1.7
    for token in set(answer):
        expected[token] -= 0.4 + 0.9 * answer.count(token)
    seen = SeenTokens(len(prompt))
    seen.advance(np.array(prompt + answer[:1], np.int32))
    seen.advance(np.array(prompt + answer, np.int32))
    adjusted = logits.copy()
    seen.apply(adjusted, params)
    np.testing.assert_allclose(adjusted, expected, rtol=1e-6)


def test_counts_do_not_depend_on_when_they_are_made() -> None:
    """Counting token by token equals counting all at once, as after a preemption or a fork."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 50).astype(np.int32)
    params = SamplingParams(frequency_penalty=1.05)
    slowly = None
    for length in range(20, 51):
        slowly = seen_by(slowly, params, tokens[:length], 20)
    at_once = seen_by(None, params, tokens, 20)
    rows = [row_of(1), row_of(1)]
    assert slowly is not None and at_once is not None
    slowly.apply(rows[0], params)
    at_once.apply(rows[1], params)
    assert np.array_equal(*rows)
    assert seen_by(None, SamplingParams(), tokens, 20) is None


# ---- numbers at the ends of their ranges

EXTREMES: list[dict[str, Any]] = [
    *[{"repetition_penalty": value} for value in (5e-324, 1e-300, 1e-40, 1e-38, 1e-30, 100.0)],
    {"frequency_penalty": -100.0}, {"frequency_penalty": 100.0}, {"presence_penalty": -100.0},
    {"repetition_penalty": 1e-300, "frequency_penalty": 100.0, "presence_penalty": 100.0},
    {"logit_bias": ((7, 100.0), (8, -100.0))}, {"repetition_penalty": 1e-38, "logit_bias": ((3, 100.0),)},
]  # fmt: skip


@pytest.mark.parametrize("penalties", EXTREMES)
@pytest.mark.parametrize("temperature", [5e-324, 1.1e-4, 1.0, 1.7e308])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 5e-324}, {"top_p": 0.9}, {"min_p": 1.0}])
@pytest.mark.parametrize("scale", [3.0, 1e38])
def test_every_allowed_number_gives_a_token(
    penalties: dict[str, Any], temperature: float, filters: dict[str, Any], scale: float
) -> None:
    """The ends of every documented range, over logits of any finite size, draw a token of the vocabulary, silently."""
    params = SamplingParams(temperature=temperature, seed=1, **penalties, **filters)
    seen = seen_by(None, params, np.array([3, 3, 5, *[7] * 1000], np.int32), 3)
    logits = np.clip(row_of(9, scale=scale), -3.4e38, 3.4e38)
    with np.errstate(invalid="raise", divide="raise"):
        drawn = [sample(logits[None], [Draw(0, params, 0, at, frozenset({1}), seen, 5)])[0] for at in range(20)]
    assert all(one.fault is None and one.token is not None and 0 <= one.token < VOCAB for one in drawn)


def test_a_penalty_close_to_zero_makes_a_seen_likely_token_certain() -> None:
    """Dividing by a tiny number ends at the largest float, so the seen token with a positive logit is always drawn."""
    params = SamplingParams(repetition_penalty=1e-38, seed=1)
    logits = np.full(VOCAB, -1.0, np.float32)
    logits[5] = 2.0
    seen = seen_by(None, params, np.array([5, 6], np.int32), 2)
    assert {sample(logits[None], [Draw(0, params, 0, at, seen=seen)])[0].token for at in range(50)} == {5}


def test_a_row_where_only_masked_tokens_have_weight_gives_none() -> None:
    """Where the model forbids all that the mask leaves, there is no token, and no error."""
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[4] = 1.0
    assert draw(logits, temperature=1.0) == 4, "positive control"
    assert draw(logits, temperature=1.0, masked=[4]) is None
    assert draw(logits, temperature=0.0, masked=[4]) is None


@pytest.mark.parametrize("broken", [{"seed": -1}, {"logit_bias": ((VOCAB, 1.0),)}, {"top_k": "three"}])
def test_a_draw_that_breaks_leaves_its_neighbours_alone(broken: dict[str, Any]) -> None:
    """Parameters that no check would let through end their own draw, and the others are what they are alone."""
    good = SamplingParams(temperature=1.2, seed=4)
    logits = np.stack([row_of(1), row_of(2), row_of(1)])
    bad = SamplingParams(**{"seed": 3, **broken})
    drawn = sample(logits, [Draw(0, good, 0, 7), Draw(1, bad, 0, 7), Draw(2, good, 0, 7)])
    assert drawn[1].token is None and drawn[1].fault is not None
    assert drawn[0].token == drawn[2].token == sample(logits, [Draw(0, good, 0, 7)])[0].token is not None


# ---- log-probabilities


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Temperature, filters and biases change no log-probability; the top are the best, ties by smaller id."""
    logits = row_of(8)
    logits[[2, 40]] = logits.max() + 1
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    params = SamplingParams(temperature=0.3, top_k=3, logit_bias=((7, 50.0),), seed=3)
    drawn = sample(logits[None], [Draw(0, params, 0, 0, num_logprobs=20)])[0]
    assert drawn.token == 7 and drawn.logprobs is not None
    assert drawn.logprobs.chosen == pytest.approx(expected[7], rel=1e-5)
    order = sorted(range(VOCAB), key=lambda token: (-logits[token], token))[:20]
    assert [token for token, _ in drawn.logprobs.top] == order
    assert order[:2] == [2, 40]
    np.testing.assert_allclose([value for _, value in drawn.logprobs.top], expected[order], rtol=1e-5)


def test_logprobs_of_large_logits_do_not_overflow() -> None:
    """Logits of any finite size give finite log-probabilities of at most 0."""
    logits = np.array([3e38, -3e38, 0.0, 2.9e38], np.float32)
    result = logprobs(logits, 0, 4)
    assert result.chosen == 0.0
    assert all(value <= 0 for _, value in result.top)
    assert draw(logits, temperature=1.0) == 0
