"""Log-probabilities of prompts: each token has its own, of this request's logits, whatever is cached or running."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoder import prompt_logprobs
from decoder.batch import StepBatch
from decoder.outputs import Started
from decoder.sampler import Logprobs, logprobs
from decoder.sequence import BeamParams, Request
from decoder.weights import load_model
from tests.decoder.rig import BLOCK_TOKENS, Node, RecallModel, prompt_of, request, solo
from tests.tiny_models import make_tiny_llama


def scored(number: int, prompt: list[int], top: int = 2, **options: Any) -> Request:
    return replace(request(number, prompt, **options), num_prompt_logprobs=top, no_read=True)


def oracle(prompt: list[int], top: int) -> list[Logprobs]:
    """From one step over the whole prompt, without an engine."""
    model, length = RecallModel(), len(prompt)
    blocks = -(-length // BLOCK_TOKENS)
    batch = StepBatch(
        token_ids=np.array(prompt, np.int32),
        positions=np.arange(length, dtype=np.int32),
        query_starts=np.array([0, length], np.int32),
        context_lens=np.array([length], np.int32),
        block_tables=np.arange(1, blocks + 1, dtype=np.int32)[None],
        logit_rows=np.arange(length - 1, dtype=np.int32),
        num_decodes=int(length == 1),
    )
    rows = model.forward(batch, model.arena(blocks))
    return [logprobs(row, token, top) for row, token in zip(rows, prompt[1:], strict=True)]


def values(started: Started) -> list[Logprobs]:
    return list(started.prompt_logprobs)


@pytest.mark.parametrize("length", [1, 2, BLOCK_TOKENS, BLOCK_TOKENS + 1, 90])
def test_every_token_but_the_first_has_its_own(length: int) -> None:
    """In one chunk or several, one value for each token; and the answer is the same as without."""
    prompt = prompt_of(length)
    for chunk in (16, 512):
        node = Node(num_blocks=64, chunk_tokens=chunk)
        node.submit(scored(1, prompt, max_tokens=5))
        node.finish(1)
        assert values(node.sink.starts[1]) == oracle(prompt, 2)
        assert node.sink.tokens[1, 0] == solo(request(2, prompt, max_tokens=5))[0]
        node.assert_quiet()


def test_a_hit_is_skipped_and_what_was_computed_is_stored() -> None:
    """Where the prompt lies in the cache already it is computed again, and says so; the next plain request reads it.
    The positive control: a request that did read the cache has no logits to score."""
    prompt = prompt_of(BLOCK_TOKENS * 3 + 1)
    node = Node(num_blocks=64)
    for number in (1, 2):
        node.submit(scored(number, prompt))
        node.finish(number)
        assert node.sink.cached[number] == 0
        assert values(node.sink.starts[number]) == oracle(prompt, 2)
    node.submit(request(3, prompt))
    node.finish(3)
    assert node.sink.cached[3] == len(prompt) - 1
    node.submit(replace(scored(4, prompt), no_read=False))
    node.finish(4)
    assert len(values(node.sink.starts[4])) < len(prompt) - 1


@pytest.mark.parametrize("seed", range(12))
def test_neighbours_samples_and_preemption_change_no_value(seed: int) -> None:
    """Scored and plain requests together on a small pool, some of them preempted in the midst of their prompts."""
    chance = random.Random(seed)
    node = Node(num_blocks=26, chunk_tokens=chance.choice((16, 24)), lateness=lambda: chance.choice((0, 1, 3)))
    shared = prompt_of(12, seed=3)
    prompts = {number: shared + prompt_of(chance.randrange(1, 40), seed=number) for number in range(8)}
    for number, prompt in prompts.items():
        options = {"max_tokens": 12, "num_samples": chance.choice((1, 1, 3)), "priority": chance.randrange(3)}
        item = scored(number, prompt, top=number % 3, **options) if number % 3 else request(number, prompt, **options)
        node.submit(item)
        node.step(chance.randrange(6))
    node.finish(*prompts)
    for number, prompt in prompts.items():
        assert values(node.sink.starts[number]) == (oracle(prompt, number % 3) if number % 3 else [])
    node.assert_quiet()


def test_a_beam_search_has_those_of_its_prompt() -> None:
    """They come with the answers of the search."""
    prompt = prompt_of(30)
    node = Node(num_blocks=64)
    node.submit(replace(scored(1, prompt, max_tokens=6), beam=BeamParams(3, 1.0)))
    node.finish(1)
    assert values(node.sink.starts[1]) == oracle(prompt, 2)
    node.assert_quiet()


def test_a_preempted_prompt_goes_on_being_scored() -> None:
    """One that loses its blocks after its prompt was begun is scored once, from where it was."""
    node = Node(num_blocks=40, chunk_tokens=16)
    prompt = prompt_of(90)
    node.submit(scored(1, prompt))
    node.step(4)
    scheduler = node.engine._loop._scheduler
    (sequence,) = scheduler.running
    assert sequence.scores is not None and 0 < len(sequence.scores.values) < len(prompt) - 1
    node.engine._loop._reporter.release(sequence)
    scheduler.requeue(sequence)
    node.finish(1)
    assert values(node.sink.starts[1]) == oracle(prompt, 2)


def test_a_step_holds_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long prompts are and however many at once, the logits of a step are bounded; nothing stands still."""
    monkeypatch.setattr(prompt_logprobs, "SCORED_TOKENS", 8)
    node = Node(num_blocks=128, chunk_tokens=64)
    most = 0

    def count(batch: StepBatch) -> None:
        nonlocal most
        most = max(most, len(batch.logit_rows))

    node.model.on_forward = count
    for number in range(3):
        node.submit(scored(number, prompt_of(70, seed=number)))
    node.finish(0, 1, 2)
    assert 8 <= most <= 8 + 3
    assert [values(node.sink.starts[number]) for number in range(3)] == [
        oracle(prompt_of(70, seed=number), 2) for number in range(3)
    ]


def test_values_equal_transformers(tmp_path: Path) -> None:
    """Of a tiny model in float32, within 1e-4, over blocks and chunks."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = make_tiny_llama(tmp_path / "tiny")
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model: Any = load_model(path, "float32", 16)
    prompt = np.random.default_rng(5).integers(3, 512, 150).tolist()
    arena = np.full((17, *model.layout.block_shape), np.nan, np.float32)
    node = Node(16, model=model, arena=arena, chunk_tokens=70)
    for number in (1, 2):
        node.submit(scored(number, prompt, top=5))
        node.finish(number)
    with torch.no_grad():
        want = torch.log_softmax(reference(torch.tensor([prompt])).logits[0].double(), -1).numpy()
    found = values(node.sink.starts[2])
    assert found == values(node.sink.starts[1])
    for place, (token, value) in enumerate(zip(prompt[1:], found, strict=True)):
        assert value.chosen == pytest.approx(want[place, token], abs=1e-4)
        assert [logprob for _, logprob in value.top] == pytest.approx(np.sort(want[place])[::-1][:5], abs=1e-4)
