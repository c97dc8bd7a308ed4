"""The engine with the real model family on a tiny model, fp32 KV: batches, hits and preemptions change no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder.grouped_arena import private_arena
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


SLOW_KV = tuple(pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "bfloat16", "fp8_e4m3"))


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", *SLOW_KV])
def test_reused_and_copied_blocks_have_their_own_scales(tmp_path: Path, kv_dtype: str) -> None:
    """P, evicted, P, hit, forked, cut inside a block: each gives the bits of a miss, whatever blocks held before."""
    model = load_model(make_tiny_llama(tmp_path / "tiny"), "bfloat16", 16, kv_dtype)
    arena = private_arena(model.layout, 12)
    arena.view(np.uint8)[...] = 0xFF
    node = Node(12, model=model, arena=arena, chunk_tokens=64)
    numbers = iter(range(1, 100))

    def ask(prompt: list[int], *, samples: int = 1, **options: Any) -> tuple[int, list[Any]]:
        """Cached tokens, and each sample's tokens and log-probabilities."""
        number = next(numbers)
        many = {"num_samples": samples, "temperature": 0.7, "seed": 3} if samples > 1 else {}
        node.submit(request(number, prompt, max_tokens=9, num_logprobs=2, **many, **options))
        node.finish(number)
        keys = [(number, sample) for sample in range(samples)]
        return node.sink.cached[number], [(node.sink.tokens[key], node.sink.logprobs[key]) for key in keys]

    first, others = prompt_of(45, 1), prompt_of(120, 2)
    branch = first[:37] + prompt_of(9, 3)  # leaves the cached prompt inside a block
    nothing = {"no_read": True, "no_store": True}
    want = ask(first, **nothing)[1]
    assert ask(first)[1] == want
    node.manager.evict(num_blocks=12)
    ask(others)  # the same blocks under other numbers
    node.manager.evict(num_blocks=12)
    for cached in (0, 44):
        assert ask(first) == (cached, want)
    assert ask(branch)[0] == 37
    node.manager.evict(num_blocks=12)
    fork = ask(first, samples=3, **nothing)[1]
    forked_cold, forked_warm = ask(first, samples=3), ask(first, samples=3)
    assert (forked_cold[1], forked_warm) == (fork, (44, fork))
    assert len({tuple(tokens) for tokens, _ in fork}) > 1
    hit = ask(branch)
    assert hit == (37, ask(branch, **nothing)[1])
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
