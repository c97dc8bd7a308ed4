"""Gemma 3 270M, the second real model, against `transformers` on the same file: token ids and greedy output.

The file comes from `tessera model fetch gemma-3-270m`, or is named by TESSERA_GEMMA_MODEL.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli.model_store import PACKAGED
from common.paths import models_dir
from decoder.weights import load_model
from gateway.tokenizer import load_tokenizer
from tests.decoder.test_models_transformers import greedy

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

LONG = "The harbour was quiet, and the keeper of the light wrote down what he had seen: a ship, a storm, a star. " * 26
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time there was a small machine with two cores",
    "Q: What is 17 + 25?\nA:",
    "日本の首都は",
    "<table><tr><td>one</td></tr>\n\n\n    four spaces, a tab\t🙂 and",
    LONG,  # longer than the window of 512 tokens
)
COUNT = 32


def gemma_file() -> Path:
    """The model's file, or a skip with the reason."""
    file_name = PACKAGED["gemma-3-270m"].file_name
    path = Path(os.environ.get("TESSERA_GEMMA_MODEL") or models_dir(os.environ) / file_name)
    if not path.is_file():
        pytest.skip(f"{file_name} is not here; `tessera model fetch gemma-3-270m` gets it")
    return path


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    """The model in float32, and the tokenizer, as `transformers` reads them from the file."""
    pytest.importorskip("accelerate")
    path = gemma_file()
    load = {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **load)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path.parent, **load)


def test_text_becomes_the_ids_of_transformers(reference: tuple[Any, Any]) -> None:
    """Ids of the gateway's tokenizer equal those of `transformers`, and give the text again."""
    tokenizer = load_tokenizer(gemma_file())
    for text in PROMPTS:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == reference[1](text)["input_ids"], text
        assert tokenizer.decode(ids) == text


def test_greedy_output_equals_transformers(reference: tuple[Any, Any]) -> None:
    """float32: after every prompt the greedy ids are those of `transformers`, its logits within 1e-3 relative."""
    tokenizer = load_tokenizer(gemma_file())
    model = load_model(gemma_file(), "float32", 16)
    lengths = []
    for text in PROMPTS:
        prompt = np.array(tokenizer.encode(text, add_special_tokens=True), np.int32)
        lengths.append(prompt.size)
        chosen, logits = greedy(model, prompt, COUNT)
        ids = np.concatenate([prompt, np.array(chosen, np.int32)])
        with torch.no_grad():
            want = reference[0](torch.from_numpy(ids).long()[None]).logits[0, prompt.size - 1 : -1].numpy()
        assert want.argmax(-1).tolist() == chosen, text
        assert np.abs(logits - want).max() < 1e-3 * np.abs(want).max(), text
    assert max(lengths) > 512
