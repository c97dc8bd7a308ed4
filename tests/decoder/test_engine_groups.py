"""The engine with models of which some layers have a window: window blocks go and come, and change no bit of what is
said.

The oracle is the same model without groups of layers on a pool that is large enough to keep everything. Freed blocks
and window blocks, those taken back early among them, are NaN throughout.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from cachemgr import reports, window_blocks
from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from decoder.models.llama import CausalLM
from decoder.sequence import BeamParams, Request, SpeculationMode, SpeculationParams
from tests.decoder.model_rig import empty_arena
from tests.decoder.rig import Node, request
from tests.decoder.test_models_groups import FAMILIES, load_both
from tests.tiny_families import VOCABULARY

B: Final = 16
WINDOW: Final = 40
ANSWER: Final = 260
NOTHING: Final = {"no_read": True, "no_store": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, CausalLM]:
    """A tiny Gemma 3 of five layers, four with a window of 40 tokens, in blocks of 16: with groups, and without."""
    return load_both(tmp_path_factory.mktemp("grouped"), "gemma3-five")


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def node_of(model: CausalLM, num_blocks: int, num_window_blocks: int = 0, **options: Any) -> Node:
    """A node whose pool has so many blocks, and where there are groups so many window blocks."""
    arena = empty_arena(model, num_blocks, num_window_blocks)
    return Node(num_blocks, model=model, arena=arena, **{"chunk_tokens": 64, "window_tokens": 4096, **options})


def said(node: Node, *items: Request) -> dict[tuple[int, int], tuple[list[int], Any]]:
    """Tokens and log-probabilities of every sample of requests that ran together."""
    for item in items:
        node.submit(item)
    node.finish(*(item.number for item in items))
    assert not node.sink.failed, node.sink.failed
    wanted = {item.number for item in items}
    return {key: (tokens, node.sink.logprobs[key]) for key, tokens in node.sink.tokens.items() if key[0] in wanted}


def alone(plain: CausalLM, item: Request) -> dict[tuple[int, int], tuple[list[int], Any]]:
    """What a request says without groups, by itself and with nothing cached."""
    return said(node_of(plain, 128), replace(item, speculation=None, **NOTHING))


def reclaimed(node: Node) -> int:
    """Window blocks that were taken from blocks which are still there."""
    windows = node.manager._state.window_blocks
    assert windows is not None
    return windows.num_reclaimed


@pytest.mark.parametrize("name", list(FAMILIES))
def test_an_answer_many_windows_long(tmp_path: Path, name: str) -> None:
    """In every family that has windows in some layers: an answer on window blocks for one window and a chunk is, bit by
    bit, that of the model without groups; nobody gives way for it."""
    grouped, plain = load_both(tmp_path, name)
    item = request(1, prompt_of(60, 1), max_tokens=ANSWER + 100, num_logprobs=3)
    most = grouped.layout.window_reach + 5
    node = node_of(grouped, 40, most)
    assert said(node, item) == alone(plain, item)
    assert node.manager.snapshot().preemptions == 0
    assert reclaimed(node) > 0 or most * B > ANSWER
    node.assert_quiet()


def test_a_window_block_taken_too_early_is_seen(
    models: tuple[CausalLM, CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control: where the cache manager takes window blocks that are still read, the poison in them shows."""
    monkeypatch.setattr(window_blocks, "loose_of", lambda windows, *arguments: np.flatnonzero(windows.of))
    monkeypatch.setattr(window_blocks, "count_loose", lambda windows, *arguments: np.count_nonzero(windows.of))
    node = node_of(models[0], 64, models[0].layout.window_reach + 2)
    for number in (1, 2):
        node.submit(request(number, prompt_of(30, number), max_tokens=ANSWER))
    for _ in range(ANSWER + 20):
        node.step()
    assert node.sink.failed


def test_streams_that_press_each_other(models: tuple[CausalLM, CausalLM]) -> None:
    """Six streams, with samples, guesses and beams, on little of both kinds of blocks: some give way, all say what they
    say alone; what their windows have read is far more than there is at once."""
    guesses = SpeculationParams(SpeculationMode.PROMPT_LOOKUP, 4)
    items = [
        request(1, prompt_of(150, 1), max_tokens=90, num_logprobs=2),
        request(2, prompt_of(70, 2), max_tokens=120, num_logprobs=2, temperature=0.8, seed=5),
        request(3, prompt_of(90, 3), max_tokens=60, num_samples=3, temperature=0.9, seed=7),
        request(4, prompt_of(60, 4) * 2, max_tokens=80, speculation=guesses),
        request(5, prompt_of(100, 5), max_tokens=70, beam=BeamParams(3)),
        request(6, prompt_of(130, 6), max_tokens=60, **NOTHING),
    ]
    wanted = {item.number: alone(models[1], item) for item in items}
    for num_blocks, num_window_blocks in ((80, 28), (40, 28), (30, 30)):
        node = node_of(models[0], num_blocks, num_window_blocks)
        together = said(node, *items)
        for item in items:
            got = {key: value for key, value in together.items() if key[0] == item.number}
            assert got == wanted[item.number], (item.number, num_blocks)
        node.assert_quiet()


def test_prompts_longer_than_the_window_blocks(models: tuple[CausalLM, CausalLM]) -> None:
    """Three prompts whose windows together, and each as a whole, are more than there are window blocks."""
    items = [
        request(1, prompt_of(500, 1), max_tokens=60, num_logprobs=2),
        request(2, prompt_of(420, 2), max_tokens=90, num_samples=2, temperature=0.8, seed=3),
        request(3, prompt_of(450, 3), max_tokens=40, **NOTHING),
    ]
    node = node_of(models[0], 128, models[0].layout.window_reach + 15)
    together = said(node, *items)
    for item in items:
        assert {key: value for key, value in together.items() if key[0] == item.number} == alone(models[1], item)
    node.assert_quiet()


def test_hits_need_what_the_next_token_reads(models: tuple[CausalLM, CausalLM]) -> None:
    """A prompt whose blocks are all cached is a hit for its whole length where its last window is there, also where it
    goes on and where it is sampled; where another took those window blocks, for what is left; always the same bits."""
    prompt = prompt_of(500, 1)
    node = node_of(models[0], 128, models[0].layout.window_reach + 15)
    numbers = iter(range(1, 100))

    def ask(tokens: list[int], **options: Any) -> tuple[int, Any]:
        item = request(next(numbers), tokens, max_tokens=30, num_logprobs=2, **options)
        want = [value for _, value in sorted(alone(models[1], replace(item, number=item.number)).items())]
        got = [value for _, value in sorted(said(node, item).items())]
        assert got == want
        return node.sink.cached[item.number]

    many = {"num_samples": 3, "temperature": 0.8, "seed": 5}
    if models[0].layout.window_tokens != WINDOW:  # attention in spans reads further back: all is right, less is gone
        for tokens in (prompt, prompt, prompt[:100], prompt_of(480, 9), [*prompt[:300], 5]):
            ask(tokens)
        return
    assert ask(prompt) == 0
    assert ask(prompt) == 499
    assert ask(prompt, **many) == 499
    assert ask([*prompt, *prompt_of(40, 2)]) >= 500
    part = ask(prompt[:100])  # its window blocks went with the rest of the prompt
    assert part == 0
    assert ask(prompt[:100]) == 99
    ask(prompt_of(480, 9))
    assert ask([*prompt[:300], 5]) < 300
    assert ask([*prompt[:300], 5]) == 300
    node.assert_quiet()


def test_a_conversation_is_gone_on_with(models: tuple[CausalLM, CausalLM]) -> None:
    """Samples and copies inside a block: a prompt that parts from a cached one in the middle of a block copies both
    kinds of blocks."""
    node = node_of(models[0], 64, 24)
    first = request(1, prompt_of(110, 1), max_tokens=20, num_logprobs=2)
    second = request(2, [*first.prompt.tolist()[:105], 7, 8, 9], max_tokens=20, num_logprobs=2)
    assert said(node, first) == alone(models[1], first)
    assert said(node, second) == alone(models[1], second)
    assert node.sink.cached[2] == 105
    assert node.manager.snapshot().cow_copies >= 1
    node.assert_quiet()


@pytest.mark.parametrize("lent", [True, False])
def test_a_floor_that_takes_the_pool_stops_nobody_of_its_tenant(
    models: tuple[CausalLM, CausalLM], monkeypatch: pytest.MonkeyPatch, lent: bool
) -> None:
    """Where a tenant's idle blocks fill a floor of the whole pool there is no credit: its prompt that may read nothing
    goes beyond its first table by what is lent to it alone, each block with a window block. Control: without that it
    gives way."""
    grouped, plain = models
    if not lent:
        monkeypatch.setattr(reports, "lend_own", lambda *_: [])
    item = request(1, prompt_of(400, 1), max_tokens=40, num_logprobs=2, **NOTHING)
    node = node_of(grouped, 40, grouped.layout.window_reach + 5)
    node.manager.set_quota(TenantId("acme"), Quota(floor_blocks=40))
    for number in range(100, 104):
        said(node, request(number, prompt_of(10 * B, number), max_tokens=2))
    assert node.manager.snapshot().cached_blocks == 40
    if lent:
        assert said(node, item) == alone(plain, item)
        assert node.manager.snapshot().preemptions == 0
        node.assert_quiet()
    else:
        node.submit(item)
        node.until(lambda: node.manager.snapshot().preemptions > 0)
