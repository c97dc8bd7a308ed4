"""The timing audit: what one tenant has cached cannot be told from how fast another one is answered."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import make_request
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node
from tests.e2e.statistics import ks_probability

B = 16
PROMPT_TOKENS = 6 * B + 5
TIMES = 250  # of each kind, reliability.md
DIFFERENT = 1e-8
ALIKE = 1e-3
ROUNDS = 50  # prompts before the cache is emptied, so that they all fit


@pytest.fixture(scope="module")
def timed_node(tiny_model: Path) -> Iterator[Node]:
    """A node where a missing block costs two steps of 2 ms and more, and with room for all prompts of a round."""
    options = ["--threads", "1", "--chunk-tokens", "32"]
    with Node(tiny_model, pool_blocks=1024, options=options, faults=["step_delay=0.002"]) as node:
        yield node


def first_token_seconds(node: Node, prompt: list[int], key: str) -> tuple[float, int]:
    """Time to the one token of a prompt, and what was cached of it."""
    begun = time.perf_counter()
    result = node.generate(make_request(prompt, new=1), key=key)
    return time.perf_counter() - begun, result.cached_tokens


def audit(node: Node, model: Path, seed: int, *, warm_key: str, timed_key: str) -> tuple[float, set[int]]:
    """The probability that prompts which `warm_key` has sent and prompts which nobody has are answered alike to
    `timed_key`; and the numbers of cached tokens that it was told."""
    source = random.Random(seed)
    times: dict[bool, list[float]] = {True: [], False: []}
    told: set[int] = set()
    for number in range(2 * TIMES // ROUNDS):
        node.fresh()
        prompts = Prompts(model, seed + number)
        plan = [(prompts.tokens(PROMPT_TOKENS), kind) for kind in [True, False] * (ROUNDS // 2)]
        for prompt, is_warm in plan:
            if is_warm:
                node.generate(make_request(prompt, new=1), key=warm_key)
        source.shuffle(plan)
        for prompt, is_warm in plan:
            seconds, cached = first_token_seconds(node, prompt, timed_key)
            times[is_warm].append(seconds)
            told.add(cached)
    assert min(map(len, times.values())) >= TIMES
    return ks_probability(times[True], times[False]), told


def test_another_tenants_cache_cannot_be_timed(timed_node: Node, tiny_model: Path, seed: int) -> None:
    """Across tenants the times are alike; within one tenant, the positive control, they are not."""
    other = timed_node.new_tenant("audited")
    within, told = audit(timed_node, tiny_model, seed, warm_key=timed_node.key, timed_key=timed_node.key)
    assert within < DIFFERENT
    assert told == {0, PROMPT_TOKENS - 1}
    # One audit in a thousand is below ALIKE by chance; a leak is so each time.
    across = []
    for number in (1, 2):
        probability, told = audit(
            timed_node, tiny_model, seed + 1000 * number, warm_key=timed_node.key, timed_key=other
        )
        assert told == {0}
        across.append(probability)
        if probability > ALIKE:
            break
    assert max(across) > ALIKE


def test_the_statistic_tells_like_from_unlike() -> None:
    """Two halves of one sample are alike, a shifted one is not; a known value of the statistic."""
    source = random.Random(1)
    values = [source.gauss(0, 1) for _ in range(600)]
    assert ks_probability(values[:300], values[300:]) > 0.01
    assert ks_probability(values[:300], [value + 1 for value in values[300:]]) < DIFFERENT
    assert ks_probability(range(50), [value + 15 for value in range(50)]) == pytest.approx(0.0171, abs=0.002)  # D = 0.3
