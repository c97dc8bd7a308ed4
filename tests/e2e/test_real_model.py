"""A real model through all three processes: greedy tokens equal those of `transformers` on the same weights in fp32."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.paths import models_dir
from common.rpc import bearer_metadata
from tessera.inference.v1 import inference_pb2 as pb
from tests.e2e.client import make_request
from tests.e2e.repeats import repeats
from tests.e2e.rig import Node

DEMO_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 64
QUESTIONS = (
    "Why is the sky blue?", "Name three rivers.", "Describe the sea.", "What is 12 x 12?",
    "Give me a recipe for bread.", "Who wrote Hamlet?", "Explain what a cache is.", "Tell a short story about a fox.",
    "What is the capital of Japan?", "How do birds fly?", "List four colours.", "What does a compiler do?",
    "Why do we sleep?", "Describe a library.", "What is gravity?", "How is paper made?", "Say hello in French.",
    "What is a prime number?", "Name a famous painter.", "How does a bicycle stay upright?",
)  # fmt: skip
SYSTEM = "You are a helpful assistant who answers in short and exact sentences and never invents a fact."


def model_path() -> Path:
    """The demo model, or a skip that says why."""
    named = os.environ.get("TESSERA_DEMO_MODEL")
    path = Path(named) if named else models_dir(os.environ) / DEMO_MODEL
    if not path.is_file():
        pytest.skip(f"the demo model is not there ({path}); `tessera model fetch` gets it")
    return path


@pytest.fixture(scope="module")
def real_node() -> Iterator[Node]:
    """The demo model in fp32 on a pool of 4096 tokens."""
    with Node(model_path(), pool_blocks=256) as node:
        yield node
        node.quiet()


@pytest.fixture(scope="module")
def oracle() -> Any:
    """The same file in `transformers`, dequantised to fp32."""
    path = model_path()
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()  # fmt: skip


def oracle_step(oracle: Any, prompt: list[int], answer: list[int]) -> tuple[list[int], list[float]]:
    """At each position of `answer`: the oracle's likeliest token, and its log-probability of the token there.

    One forward pass over prompt and answer. Where the likeliest tokens are the answer's, all along, the answer is the
    oracle's own greedy continuation, by induction over its positions.
    """
    import torch

    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs[torch.arange(len(answer)), torch.tensor(answer)]
    return logits.argmax(dim=-1).tolist(), chosen.tolist()


@repeats(20, few=6)
def test_greedy_tokens_equal_those_of_transformers(real_node: Node, oracle: Any, rounds: int) -> None:
    """Chat prompts with a shared system prompt, all at once through the processes: 64 greedy tokens each are equal."""
    chats = [
        pb.Chat(messages=[pb.ChatMessage(role="system", content=SYSTEM), pb.ChatMessage(role="user", content=question)])
        for question in QUESTIONS[:rounds]
    ]
    prompts = []
    for chat in chats:
        request = pb.TokenizeRequest(chat=chat)
        answer = real_node.inference.Tokenize(request, metadata=bearer_metadata(real_node.key), timeout=20)
        prompts.append(list(answer.token_ids))
    results = real_node.together([make_request(chat, new=NEW_TOKENS, logprobs=0) for chat in chats])
    for prompt, result in zip(prompts, results, strict=True):
        assert (result.prompt_tokens, len(result.token_ids)) == (len(prompt), NEW_TOKENS)
        ids, logprobs = oracle_step(oracle, prompt, result.token_ids)
        assert result.token_ids == ids
        assert max(abs(a - b) for a, b in zip(result.logprobs, logprobs, strict=True)) < 2e-3
    assert len({tuple(result.token_ids) for result in results}) == len(prompts), "positive control: the answers differ"
    again = real_node.generate(make_request(chats[0], new=NEW_TOKENS))
    assert again.cached_tokens >= len(prompts[0]) - 1
    assert again.token_ids == results[0].token_ids, "and from the cache"
