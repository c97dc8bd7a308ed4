"""Row 39 of the cases: layers with a sliding window reuse exactly what they may, through the public service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decoder.kernels import amx
from tests.e2e.client import make_request
from tests.e2e.oracle import Solo
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node
from tests.tiny_models import make_tiny_llama

B = 16
WINDOW = 3 * B


def windowed_model(folder: Path) -> Path:
    """The tiny model, as Mistral with a window of three blocks in every layer."""
    make_tiny_llama(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_answer_is_longer_than_the_pool(tmp_path: Path) -> None:
    """Where every layer has a window, a pool of 24 blocks gives an answer of 30, twice at once, with freed blocks
    poisoned: Equal to its solo run on a pool that holds all of it."""
    model = windowed_model(tmp_path / "windowed")
    prompts = Prompts(model, 40)
    requests = [make_request(prompts.tokens(20), new=30 * B) for _ in range(2)]
    options = ["--threads", "1"]
    with (
        Node(model, pool_blocks=128, options=["--no-prefix-cache", *options]) as alone,
        Node(
            model, pool_blocks=24 if not amx.available() else 56, options=options, faults=["poison_on_free=1"]
        ) as node,
    ):
        expected = Solo(alone)
        for request, result in zip(requests, node.together(requests), strict=True):
            expected.check(request, result)
        node.quiet()


@pytest.mark.slow
def test_row_39_the_same_prompt_again_and_one_that_leaves_it(tmp_path: Path, tiny_model: Path, solo: Solo) -> None:
    """A prompt of eight blocks four times, then one that leaves it in its last block: each Equal to its solo run, and a
    hit; the model without a window, the control, says something else."""
    model = windowed_model(tmp_path / "windowed")
    prompts = Prompts(model, 39)
    tokens = prompts.tokens(8 * B)
    leaving = [*tokens[: 7 * B + 6], *prompts.tokens(10)]
    with (
        Node(model, pool_blocks=64, options=["--no-prefix-cache", "--threads", "1"]) as alone,
        Node(model, options=["--chunk-tokens", "64", "--threads", "1"], faults=["poison_on_free=1"]) as node,
    ):
        expected = Solo(alone)
        cached = []
        for prompt in (tokens, tokens, tokens, tokens, leaving, tokens):
            request = make_request(prompt, new=4 * B)
            result = node.generate(request)
            expected.check(request, result)
            cached.append(result.cached_tokens)
        assert cached == [0, *[8 * B - 1] * 3, 7 * B + 6, 8 * B - 1]
        request = make_request(tokens, new=4 * B)
        assert solo(request).token_ids != expected(request).token_ids
        node.quiet()
