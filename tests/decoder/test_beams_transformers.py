"""Beam search on a tiny Llama equals that of `transformers`: tokens, order and scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decoder.sequence import BeamParams
from decoder.weights import load_model
from tests.decoder.rig import Node, request
from tests.tiny_models import make_tiny_llama

transformers = pytest.importorskip("transformers")

VOCAB = 512
STOPS = list(range(100, 140))
CASES = [(4, 0.0, 12), (4, 1.0, 14), (3, 2.0, 14), (6, -0.5, 10), (1, 1.0, 6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("beams"))


def test_beam_search_equals_transformers(folder: Path) -> None:
    """Widths, penalties and prompts across block boundaries: num_beams, length_penalty and early_stopping=False there
    give the same hypotheses in the same order; some of them end by a stop token and some by their length."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load_model(folder, "float32", 16)
    arena = np.full((257, *model.layout.block_shape), np.nan, np.float32)
    node = Node(256, model=model, arena=arena, chunk_tokens=64)
    stopped = 0
    for number, (width, penalty, new) in enumerate(CASES):
        for length in (15, 37):
            name = 100 * number + length
            prompt = np.random.default_rng(name).integers(3, VOCAB, length).tolist()
            found = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, length, dtype=torch.long), num_beams=width,
                num_return_sequences=width, length_penalty=penalty, early_stopping=False, do_sample=False,
                max_new_tokens=new, eos_token_id=STOPS, pad_token_id=0, return_dict_in_generate=True,
                output_scores=True,
            )  # fmt: skip
            node.submit(
                request(
                    name, prompt, beam=BeamParams(width, penalty), num_samples=width, max_tokens=new, stop_ids=STOPS,
                    num_logprobs=0,
                )
            )  # fmt: skip
            node.finish(name)
            for sample in range(width):
                expected = found.sequences[sample, length:].tolist()
                told = node.sink.tokens[name, sample]
                ends = [place for place, token in enumerate(expected) if token in STOPS]
                expected = expected[: ends[0] + 1] if ends else expected[:new]
                assert told == expected, (name, sample)
                stopped += bool(ends)
                if width > 1:
                    score = sum(item.chosen for item in node.sink.logprobs[name, sample]) / len(told) ** penalty
                    assert abs(score - float(found.sequences_scores[sample])) < 1e-4
    total = 2 * sum(width for width, _, _ in CASES)
    assert 0.1 * total < stopped < 0.9 * total
    assert node.manager.snapshot().cow_copies > 0
    node.assert_quiet()
