"""Every sampling field: what it does, and that a token is a function of (seed, sample, position) and the tokens before.

Each row of `FIELDS` runs alone, beside others, on a full hit, after a preemption and in a new engine.
"""

from __future__ import annotations

from typing import Any

import pytest

from decoder.sequence import Request
from tests.decoder.rig import VOCAB, Node, prompt_of, request, solo

FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.6},
    {"temperature": 1.0, "seed": 3, "top_k": 7},
    {"temperature": 1.0, "seed": 4, "min_p": 0.2},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.05},
    {"logit_bias": ((7, 3.0), (11, -2.0))},
    {"bad_ids": frozenset(range(0, VOCAB, 2))},
    {"temperature": 1.0, "seed": 5, "min_tokens": 9, "stop_ids": tuple(range(0, VOCAB, 3))},
    {"temperature": 1.0, "seed": 6, "num_samples": 3, "num_logprobs": 2},
]
PROMPT = prompt_of(13, seed=5)


def item(number: int, fields: dict[str, Any]) -> Request:
    return request(number, PROMPT, **{"max_tokens": 24, **fields})


def told(node: Node, number: int) -> dict[int, list[int]]:
    return {sample: tokens for (owner, sample), tokens in node.sink.tokens.items() if owner == number}


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "+".join(fields))
def test_row_34_of_every_field(fields: dict[str, Any]) -> None:
    """Alone, beside neighbours ten times as long, on a full prefix hit, after a preemption, in a new engine: equal."""
    want = solo(item(1, fields))
    busy = Node(num_blocks=64)
    busy.submit(request(2, prompt_of(10 * len(PROMPT), seed=9), max_tokens=30))
    busy.submit(item(1, fields))
    busy.submit(request(3, prompt_of(7, seed=8), max_tokens=30, temperature=1.0, seed=5, frequency_penalty=3.0))
    busy.finish(1, 2, 3)
    busy.submit(item(4, fields))
    busy.finish(4)
    assert busy.sink.cached[4] == len(PROMPT) - 1
    assert told(busy, 1) == told(busy, 4) == want

    node = Node(num_blocks=64)
    node.submit(item(1, fields))
    node.until(lambda: sum(map(len, told(node, 1).values())) >= 2)
    scheduler = node.engine._loop._scheduler
    for sequence in list(scheduler.running):
        node.engine._loop._reporter.release(sequence)
        scheduler.requeue(sequence)
    node.finish(1)
    assert told(node, 1) == want
    for one in (busy, node):
        one.assert_quiet()


@pytest.mark.parametrize("fields", FIELDS[5:11], ids=lambda fields: "+".join(fields))
def test_each_field_changes_what_is_said(fields: dict[str, Any]) -> None:
    """The positive control of the rows above: none of them is without effect on this prompt."""
    base = {name: value for name, value in fields.items() if name in ("temperature", "seed")}
    assert solo(item(1, fields)) != solo(item(1, base))


def test_bad_ids_are_never_drawn_and_never_end_a_sample() -> None:
    """Greedy or sampled, guided towards them by a bias or not; a bad id that is a stop id stops nothing."""
    first = solo(request(1, PROMPT, max_tokens=20))[0]
    bad = frozenset(first)
    for sampling in (
        {},
        {"temperature": 2.0, "seed": 3},
        {"logit_bias": tuple((token, 90.0) for token in sorted(bad))},
    ):
        tokens = solo(request(1, PROMPT, max_tokens=20, bad_ids=bad, stop_ids=tuple(bad), **sampling))[0]
        assert len(tokens) == 20
        assert not bad & set(tokens)
    left = frozenset(range(VOCAB)) - {50}
    assert solo(request(1, PROMPT, max_tokens=6, bad_ids=left))[0] == [50] * 6
