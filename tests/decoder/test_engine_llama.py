"""The engine with the real model family on a tiny model, fp32 KV: batches, hits and preemptions change no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder.sequence import Request, SpeculationMode, SpeculationParams
from decoder.weights import load_model
from tests.decoder.rig import Node, request
from tests.decoder.test_engine_speculation import Teller
from tests.tiny_models import make_tiny_llama

VOCAB = 512


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A loaded tiny Llama with blocks of 16 tokens and float32 keys and values, weights as `request.param`."""
    folder: Path = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return load_model(folder, request.param, 16, kv_dtype="float32")


def arena_of(model: Any, num_blocks: int) -> np.ndarray:
    return np.full((num_blocks + 1, *model.layout.block_shape), np.nan, np.float32)


def node_of(model: Any, num_blocks: int, **options: Any) -> Node:
    return Node(num_blocks, model=model, arena=arena_of(model, num_blocks), **{"chunk_tokens": 64, **options})


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def solo_tokens(model: Any, item: Request) -> dict[int, list[int]]:
    node = node_of(model, 128)
    fields = {name: getattr(item, name) for name in Request.__dataclass_fields__}
    node.submit(Request(**{**fields, "no_read": True, "no_store": True}))
    node.finish(item.number)
    return {sample: tokens for (_, sample), tokens in node.sink.tokens.items()}


def test_thirty_two_concurrent_requests_equal_their_solo_runs(model: Any) -> None:
    """Mixed lengths with a shared prefix, greedy and sampled, twice: cold and from the cache, all as if alone."""
    shared = prompt_of(41, 1000)
    items = [
        request(
            number,
            (shared if number % 2 else []) + prompt_of(1 + (number * 7) % 60, number),
            max_tokens=4 + number % 13,
            temperature=0.0 if number % 4 else 0.8,
            seed=number,
        )
        for number in range(32)
    ]
    node = node_of(model, 400)
    expected = {item.number: solo_tokens(model, item)[0] for item in items}
    for wave in range(2):
        for item in items:
            fields = {name: getattr(item, name) for name in Request.__dataclass_fields__}
            node.submit(Request(**{**fields, "number": item.number + 100 * wave}))
        node.finish(*(item.number + 100 * wave for item in items))
        for item in items:
            assert node.sink.tokens[item.number + 100 * wave, 0] == expected[item.number], (wave, item.number)
    assert all(node.sink.cached[100 + item.number] == len(item.prompt) - 1 for item in items)
    node.assert_quiet()


def test_preemption_and_samples_change_no_token(model: Any) -> None:
    """Six growing streams and four samples on a 16-block pool: some give way, all say what they say alone."""
    items = [request(number, prompt_of(30, number), max_tokens=40) for number in range(5)]
    items.append(request(9, prompt_of(37, 9), max_tokens=20, num_samples=4, temperature=1.0, seed=6))
    node = node_of(model, 16)
    for item in items:
        node.submit(item)
    node.finish(*(item.number for item in items))
    for item in items:
        got = {sample: tokens for (number, sample), tokens in node.sink.tokens.items() if number == item.number}
        assert got == solo_tokens(model, item), item.number
    assert node.manager.snapshot().preemptions > 0
    node.assert_quiet()


def test_guessed_tokens_change_no_bit(model: Any) -> None:
    """With guesses of which some are right and some wrong, the tokens, and the log-probabilities to the last bit, are
    those of plain decoding, greedy and sampled."""
    plain, node = node_of(model, 64), node_of(model, 64)
    speculation = SpeculationParams(SpeculationMode.PROMPT_LOOKUP, 6)
    items = [
        request(
            number, prompt_of(20 + 4 * number, number), max_tokens=30, num_logprobs=2, speculation=speculation,
            temperature=0.0 if number < 3 else 0.8, seed=number,
        )
        for number in range(6)
    ]  # fmt: skip
    for item in items:
        plain.submit(replace(item, speculation=None))
    plain.finish(*range(6))
    teller = Teller({item.number: {0: plain.sink.tokens[item.number, 0]} for item in items}, 0.3)
    node.engine._loop._speculator._drafters[SpeculationMode.PROMPT_LOOKUP] = teller
    for item in items:
        node.submit(item)
    node.finish(*range(6))
    assert node.sink.tokens == plain.sink.tokens
    assert node.sink.logprobs == plain.sink.logprobs
    drafted, accepted = (sum(column) for column in zip(*node.sink.drafts.values(), strict=True))
    assert 0.3 * drafted < accepted < drafted
    node.assert_quiet()
