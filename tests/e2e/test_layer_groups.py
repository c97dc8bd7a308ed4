"""A node with a model of which some layers have a window: window blocks come and go under poison, and die with no
daemon. What is said is what the same model says without layer groups, computed in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoder.kernels import amx
from decoder.weights import load_model
from tests.decoder.model_rig import empty_arena
from tests.decoder.rig import Node as InProcess
from tests.decoder.rig import request as plain_request
from tests.e2e.client import make_request
from tests.e2e.prompts import Prompts
from tests.e2e.rig import Node
from tests.e2e.test_daemon_death import kill_daemon
from tests.tiny_families import make_family
from tests.tiny_models import make_tiny_llama

pytest.importorskip("transformers")

B = 16
POOL = 96
LONG = 24 * B  # of an answer: eight windows and more


@pytest.fixture(scope="module")
def grouped_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 with a window of 40 tokens in the first of its two layers, and the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("grouped")
    make_tiny_llama(folder)
    make_family(folder, "gemma3", vocab_size=512, max_position_embeddings=4096)
    return folder


@pytest.fixture(scope="module")
def expected(grouped_model: Path) -> Any:
    """The tokens that a prompt is answered with greedily, without groups and cache."""
    model = load_model(grouped_model, "float32", B, layer_groups=False)

    def tokens(prompt: list[int], new: int) -> list[int]:
        node = InProcess(128, model=model, arena=empty_arena(model, 128), chunk_tokens=256, window_tokens=4096)
        node.submit(plain_request(1, prompt, max_tokens=new))
        node.finish(1)
        return list(node.sink.tokens[1, 0])

    return tokens


@pytest.fixture(scope="module")
def node(grouped_model: Path) -> Iterator[Node]:
    """A slow node, so that daemons can die in the middle of answers; what is freed is poisoned."""
    options = ["--threads", "1", "--chunk-tokens", "64"]
    faults = ["step_delay=0.005", "poison_on_free=1"]
    with Node(grouped_model, pool_blocks=POOL, options=options, faults=faults) as node:
        yield node


def ids(result: Any) -> list[int]:
    """Token ids of the only sample."""
    return list(result.samples[0].token_ids)


def test_answers_of_many_windows_on_few_window_blocks(node: Node, grouped_model: Path, expected: Any) -> None:
    """Three at once, whose windowed layers wrote twice as much as there is room for; then their prompts and answers
    again, from what is cached, and a part of them."""
    windows = node.admin.snapshot().windows
    assert windows.total_blocks == (POOL // 3 if not amx.available() else windows.total_blocks) < POOL
    prompts = Prompts(grouped_model, 41)
    asked = [prompts.tokens(20) for _ in range(3)]
    results = node.together([make_request(prompt, new=LONG) for prompt in asked])
    for prompt, result in zip(asked, results, strict=True):
        assert ids(result) == expected(prompt, LONG)
        longer = [*prompt, *ids(result)[:-40]]
        again = node.generate(make_request(longer, new=50))
        assert ids(again) == expected(longer, 50)
        part = [*longer[:100], 7]
        assert ids(node.generate(make_request(part, new=30))) == expected(part, 30)
    for _ in range(2):
        after = node.generate(make_request(longer, new=2))
        assert ids(after) == ids(again)[:2]
    assert after.cached_tokens >= len(longer) // B * B
    snapshot = node.quiet()
    assert snapshot.windows.needed_blocks == 0
    assert snapshot.windows.reclaimed_blocks > POOL // 2


def test_no_stream_ends_with_the_daemon(node: Node, grouped_model: Path, expected: Any) -> None:
    """kill -9 of the cache manager while two answers run, far behind their first window: both go on, and say what they
    say alone; what was cached before is a hit for the next daemon as far as its last window was kept."""
    prompts = Prompts(grouped_model, 42)
    warm = prompts.tokens(70)
    warm += ids(node.generate(make_request(warm, new=2)))
    asked = [prompts.tokens(90) for _ in range(2)]
    streams = [node.stream(make_request(prompt, new=LONG)) for prompt in asked]
    for stream in streams:
        stream.read(100)
    kill_daemon(node)
    for prompt, stream in zip(asked, streams, strict=True):
        assert ids(stream.finish()) == expected(prompt, LONG)
    again = node.generate(make_request(warm, new=20))
    assert ids(again) == expected(warm, 20)
    assert again.cached_tokens == len(warm) - 1
    assert not node.admin.violations()
    node.quiet()


def test_two_decoders_read_one_copy(grouped_model: Path, expected: Any) -> None:
    """Two decoders on one pool, prompts that share a beginning and part at many places, some inside a block, more than
    there are window blocks for: each is answered as alone, whichever decoder has it, and nothing stays held."""
    prompts = Prompts(grouped_model, 43)
    first = prompts.tokens(150)
    asked = [first, *([*first[:cut], *prompts.tokens(5 + cut % 7)] for cut in (40, 64, 90, 101, 128, 149)), first[:70]]
    options = ["--threads", "1", "--chunk-tokens", "64"]
    with Node(grouped_model, pool_blocks=60, decoders=2, options=options, faults=["poison_on_free=1"]) as node:
        node.generate(make_request(first, new=4))
        for _ in range(2):
            results = node.together([make_request(prompt, new=60) for prompt in asked])
            for prompt, result in zip(asked, results, strict=True):
                assert ids(result) == expected(prompt, 60), len(prompt)
        assert sum(result.cached_tokens for result in results) > 0
        assert not node.admin.violations()
        node.quiet()
