"""The engine with a model whose layers all have a window: what is passed goes, and changes no bit of what is said.

The oracle is the same model on a pool that is large enough to keep everything. Freed blocks are NaN throughout.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachemgr import reports, windows
from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from decoder.sequence import BeamParams, Request, SpeculationMode, SpeculationParams
from decoder.weights import load_model
from decoder.weights.loader import read_tokens
from tests.decoder.rig import Node, request
from tests.tiny_families import VOCABULARY, make_family

B = 16
WINDOW = 40
ANSWER = 260  # six windows and more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Mistral with a window of 40 tokens in both layers and blocks of 16, in float32."""
    folder: Path = tmp_path_factory.mktemp("windowed")
    make_family(folder, "mistral")
    return load_model(folder, "float32", B)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def node_of(model: Any, num_blocks: int, **options: Any) -> Node:
    arena = np.full((num_blocks + 1, *model.layout.block_shape), np.nan, np.float32)
    return Node(num_blocks, model=model, arena=arena, **{"chunk_tokens": 64, "window_tokens": 4096, **options})


def said(node: Node, *items: Request) -> dict[tuple[int, int], tuple[list[int], Any]]:
    """Tokens and log-probabilities of every sample of requests that ran together."""
    for item in items:
        node.submit(item)
    node.finish(*(item.number for item in items))
    assert not node.sink.failed, node.sink.failed
    wanted = {item.number for item in items}
    return {key: (tokens, node.sink.logprobs[key]) for key, tokens in node.sink.tokens.items() if key[0] in wanted}


def least_blocks(model: Any) -> int:
    """Blocks that one sequence of this model reads at once, and one to write."""
    return model.layout.window_tokens // B + 2


def test_a_model_says_how_far_it_reads_back(model: Any) -> None:
    """All layers must have a window, and one that ends within the context; attention in spans reads whole ones."""
    config = model.config
    assert model.layout.window_tokens in (WINDOW, WINDOW + 255)
    assert (read_tokens(config, in_spans=False), read_tokens(config, in_spans=True)) == (WINDOW, WINDOW + 255)
    whole = replace(config.layers[0], window=None)
    assert read_tokens(replace(config, layers=(config.layers[0], whole)), in_spans=False) == 0
    wide = replace(config.layers[0], window=60)
    assert read_tokens(replace(config, layers=(config.layers[0], wide)), in_spans=False) == 60
    assert read_tokens(replace(config, max_position=WINDOW), in_spans=False) == 0


@pytest.mark.parametrize("no_store", [True, False])
def test_an_answer_longer_than_the_pool(model: Any, no_store: bool) -> None:
    """An answer of many windows on a pool of little more than one is, bit by bit, that of a pool that keeps all."""
    item = request(1, prompt_of(30, 1), max_tokens=ANSWER, num_logprobs=3, no_store=no_store, no_read=no_store)
    small = least_blocks(model) + 2
    assert small * B < ANSWER
    want = said(node_of(model, 64), item)
    node = node_of(model, small)
    assert said(node, item) == want
    assert node.manager.snapshot().preemptions == 0
    node.assert_quiet()


def test_without_windows_it_ends_with_the_pool(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test before: the same request fails where the layout says nothing of a window."""
    monkeypatch.setattr(model, "layout", replace(model.layout, window_tokens=0))
    node = node_of(model, least_blocks(model) + 4)
    node.submit(request(1, prompt_of(30, 1), max_tokens=ANSWER))
    node.finish(1)
    assert 1 in node.sink.failed


def test_a_block_too_many_is_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: where one block more is let go of, the poison in it shows."""
    item = request(1, prompt_of(30, 1), max_tokens=ANSWER, no_store=True, no_read=True)
    right = windows.passed_by
    monkeypatch.setattr(windows, "passed_by", lambda state, count: right(state, count) and right(state, count) + 1)
    node = node_of(model, 64)
    node.submit(item)
    for _ in range(ANSWER + 20):
        node.step()
    assert 1 in node.sink.failed, "what is not finite is refused"


def test_streams_that_press_each_other(model: Any) -> None:
    """Six streams, with samples, guesses and beams, on a pool that holds a few windows: some let go, some give way, all
    say what they say alone; the sum of what they read is far more than the pool."""
    guesses = SpeculationParams(SpeculationMode.PROMPT_LOOKUP, 4)
    items = [
        request(1, prompt_of(150, 1), max_tokens=90, num_logprobs=2),
        request(2, prompt_of(70, 2), max_tokens=120, num_logprobs=2, temperature=0.8, seed=5),
        request(3, prompt_of(90, 3), max_tokens=60, num_samples=3, temperature=0.9, seed=7),
        request(4, prompt_of(60, 4) * 2, max_tokens=80, speculation=guesses),
        request(5, prompt_of(100, 5), max_tokens=70, beam=BeamParams(3)),
        request(6, prompt_of(130, 6), max_tokens=60, no_store=True, no_read=True),
    ]
    node = node_of(model, 28 if model.layout.window_tokens == WINDOW else 80)
    together = said(node, *items)
    for item in items:
        alone = said(node_of(model, 128), replace(item, speculation=None, no_read=True, no_store=True))
        assert {key: value for key, value in together.items() if key[0] == item.number} == alone, item.number
    node.assert_quiet()


def test_prompts_longer_than_the_pool(model: Any) -> None:
    """Two such prompts at once, one of them with samples, press each other: what they say is what they say alone."""
    items = [
        request(1, prompt_of(500, 1), max_tokens=60, num_logprobs=2),
        request(2, prompt_of(420, 2), max_tokens=90, num_samples=2, temperature=0.8, seed=3),
        request(3, prompt_of(450, 3), max_tokens=40, no_store=True, no_read=True),
    ]
    node = node_of(model, 20 if model.layout.window_tokens == WINDOW else 26)
    together = said(node, *items)
    for item in items:
        alone = said(node_of(model, 128), replace(item, no_read=True, no_store=True))
        assert {key: value for key, value in together.items() if key[0] == item.number} == alone, item.number
    node.assert_quiet()


def test_a_window_that_does_not_fit_is_refused(model: Any) -> None:
    """Where the pool is smaller than a window a longer prompt is refused at once, as without windows."""
    node = node_of(model, 3)
    node.submit(request(1, prompt_of(100, 1)))
    node.settle()
    assert node.sink.failed[1].reason == "EXCEEDS_POOL"


def test_a_hit_whose_head_is_gone(model: Any) -> None:
    """A prompt of which nothing is left but what its last token reads is a hit for its whole length, with the bits of a
    miss, also where it goes on and where it is sampled; the freed head is poison. A part of it is computed anew."""
    prompt = prompt_of(500, 1)
    node = node_of(model, 96)
    numbers = iter(range(1, 100))

    def ask(tokens: list[int], **options: Any) -> tuple[int, Any]:
        item = request(next(numbers), tokens, max_tokens=30, num_logprobs=2, **options)
        value = said(node, item)
        return node.sink.cached[item.number], [value[item.number, sample] for sample in range(len(value))]

    many = {"num_samples": 3, "temperature": 0.8, "seed": 5}
    nothing = {"no_read": True, "no_store": True}
    longer, part = [*prompt, *prompt_of(40, 2)], prompt[:100]
    want = [
        ask(prompt, **nothing)[1],
        ask(prompt, **many, **nothing)[1],
        ask(longer, **nothing)[1],
        ask(part, **nothing)[1],
    ]
    ask(prompt)
    gone = node.manager.evict(num_blocks=(500 - model.layout.window_tokens) // B)
    assert gone > 10
    assert ask(prompt) == (499, want[0])
    assert ask(prompt, **many) == (499, want[1])
    assert ask(longer)[1] == want[2]
    assert ask(part) == (0, want[3])
    node.assert_quiet()


def test_prefixes_stay_right_after_blocks_lacked(model: Any) -> None:
    """A prompt that is found, one that was let go of and computed again, and one that leaves it: the same bits."""
    long, short = prompt_of(200, 1), prompt_of(60, 2)
    node = node_of(model, 24 if model.layout.window_tokens == WINDOW else 48)
    numbers = iter(range(1, 100))

    def ask(prompt: list[int], **options: Any) -> tuple[int, Any]:
        item = request(next(numbers), prompt, max_tokens=30, num_logprobs=2, **options)
        (value,) = said(node, item).values()
        return node.sink.cached[item.number], value

    want = {tuple(prompt): ask(prompt, no_read=True, no_store=True)[1] for prompt in (long, short, [*long[:150], 9])}
    assert ask(long) == (0, want[tuple(long)])
    assert ask(long) == (199, want[tuple(long)])
    assert ask([*long[:150], 9]) == (150, want[(*long[:150], 9)])
    both = said(node, request(90, long, max_tokens=150), request(91, short, max_tokens=150))  # more than the pool has
    assert len(both) == 2
    for prompt in (long, short, [*long[:150], 9], long):
        assert ask(prompt)[1] == want[tuple(prompt)]
    assert ask(long)[0] == 199
    node.assert_quiet()


def filled(model: Any) -> Node:
    """A node whose tenant has the whole pool as its floor, and has filled it with what is cached."""
    num_blocks = 20 if model.layout.window_tokens == WINDOW else 64
    node = node_of(model, num_blocks)
    node.manager.set_quota(TenantId("acme"), Quota(floor_blocks=num_blocks))
    for number in range(100, 110):
        said(node, request(number, prompt_of(num_blocks * B // 4, number), max_tokens=2))
    assert node.manager.snapshot().cached_blocks == num_blocks
    return node


def test_a_floor_that_takes_the_pool_stops_nobody_of_its_tenant(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credit is nobody's, so there is none; a prompt longer than the pool that may read nothing grows by what is its
    own tenant's, and gives way to nobody. Without that (the rule before) it begins anew for ever."""
    node = filled(model)
    item = request(1, prompt_of(3 * node.manager.snapshot().total_blocks * B // 2, 1), max_tokens=90, no_read=True)
    want = said(node_of(model, 256), item)
    assert said(node, item) == want
    assert node.manager.snapshot().preemptions == 0
    node.assert_quiet()
    monkeypatch.setattr(reports, "lend_own", lambda *_: [])
    node = filled(model)
    node.submit(item)
    for _ in range(600):
        node.step()
    assert not node.sink.done(1)
    assert node.manager.snapshot().preemptions > 5
