"""Models on disk against `transformers`: tiny Hugging Face directories always, the demo model where it is present."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.layout import KvDtype
from decoder.models.llama import CausalLM
from decoder.weights import load_model
from tests.decoder.model_rig import Sequence, poisoned_arena, run_prompt, run_step
from tests.tiny_models import make_tiny_llama

transformers = pytest.importorskip("transformers")

DEMO_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nWrite one sentence about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
)
LONG_PROMPTS = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nExplain in a few sentences how a "
    "steam engine turns heat into motion, and name two people who improved it.<|im_end|>\n<|im_start|>assistant\n"
    "A steam engine burns fuel to boil water. The steam pushes a piston, and a crank turns the back and forth motion "
    "into rotation. Thomas Newcomen built an early engine, and James Watt improved it with a separate condenser.",
    "Once upon a time there was a small machine with two cores which had to serve a large number of people. " * 6,
)


def demo_model() -> Path:
    """The demo model, from TESSERA_DEMO_MODEL or the cache of `tessera model fetch`; skips the test if absent."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(os.environ.get("TESSERA_DEMO_MODEL") or cache / "tessera" / "models" / DEMO_NAME)
    if not path.is_file():
        pytest.skip(f"the demo model {DEMO_NAME} is not here; set TESSERA_DEMO_MODEL")
    return path


def greedy(model: CausalLM, prompt: NDArray[np.int32], count: int) -> tuple[list[int], NDArray[np.float32]]:
    """`count` greedy tokens and the logits each was chosen from."""
    blocks = np.arange(1, -(-(prompt.size + count) // model.layout.block_tokens) + 1, dtype=np.int32)
    arena = poisoned_arena(model, blocks.size)
    sequence = Sequence(prompt, blocks)
    run_step(model, arena, [(sequence, prompt.size)])
    chosen, logits = [], []
    for _ in range(count):
        logits.append(sequence.logits[-1][-1])
        chosen.append(int(logits[-1].argmax()))
        sequence.token_ids = np.append(sequence.token_ids, np.int32(chosen[-1]))
        run_step(model, arena, [(sequence, 1)])
    return chosen, np.stack(logits)


@pytest.mark.parametrize("variant", [{}, {"tie_embeddings": True}, {"num_shards": 3, "kv_heads": 1}])
def test_tiny_directory_equals_transformers(tmp_path: Path, variant: dict[str, int]) -> None:
    """Every position's logits of a Hugging Face directory are those of LlamaForCausalLM in float32."""
    path = make_tiny_llama(tmp_path / "tiny", **variant)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = np.random.default_rng(5).integers(3, 512, 200).astype(np.int32)
    with torch.no_grad():
        want = reference(torch.from_numpy(prompt).long()[None]).logits[0].numpy()
    got = run_prompt(load_model(path, "float32", 16), prompt, chunk=70)
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def test_tiny_greedy_output_varies(tmp_path: Path) -> None:
    """The tiny model's greedy output does not settle on a few tokens."""
    model = load_model(make_tiny_llama(tmp_path / "tiny"), "float32", 16)
    chosen, _ = greedy(model, np.array([10, 20, 30], np.int32), 40)
    assert len(set(chosen)) > 15


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("float32", None),
        ("bfloat16", None),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("bfloat16", "int8"),
        ("int8", None),
    ],
)
def test_cached_equals_uncached(tmp_path: Path, dtype: str, kv_dtype: str | None) -> None:
    """A prompt whose prefix is already in the arena, up to any split, gives the logits of a full prefill."""
    model = load_model(make_tiny_llama(tmp_path / "tiny"), dtype, 16, kv_dtype)  # type: ignore[arg-type]
    for length in (15, 16, 17, 31, 32, 33, 79, 80, 81):
        prompt = np.random.default_rng(length).integers(3, 512, length).astype(np.int32)
        want = run_prompt(model, prompt)
        needed = -(-length // 16)
        arena = poisoned_arena(model, needed)
        first = Sequence(prompt, np.arange(1, needed + 1, dtype=np.int32))
        run_step(model, arena, [(first, length)])
        for split in range(max(1, length - 17), length):
            again = Sequence(prompt, first.blocks, done=split)
            run_step(model, arena, [(again, length - split)])
            assert np.array_equal(again.logits[0], want[split:])


@pytest.fixture(scope="module")
def demo_reference() -> tuple[object, object]:
    """transformers on the demo model in float32, and its tokenizer."""
    path = demo_model()
    pytest.importorskip("accelerate")
    load = {"gguf_file": path.name}
    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the same head three times and makes the same map of names for each module.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **load)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **load)
    return model.eval(), tokenizer


def _reference_greedy(
    reference: object, prompt: NDArray[np.int32], count: int
) -> tuple[list[int], NDArray[np.float32]]:
    ids = torch.from_numpy(prompt).long()[None]
    with torch.no_grad():
        out = reference.generate(  # type: ignore[attr-defined]
            ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )[0]
        logits = reference(out[None]).logits[0, ids.shape[1] - 1 : -1].numpy()  # type: ignore[operator]
    return out[ids.shape[1] :].tolist(), logits


def test_demo_model_equals_transformers(demo_reference: tuple[object, object]) -> None:
    """float32: the demo GGUF gives the greedy ids of transformers and its logits within 1e-3 relative."""
    reference, tokenizer = demo_reference
    model = load_model(demo_model(), "float32", 16)
    for text in PROMPTS:
        prompt = np.array(tokenizer(text)["input_ids"], np.int32)  # type: ignore[operator]
        chosen, logits = greedy(model, prompt, 8)
        want_ids, want = _reference_greedy(reference, prompt, 8)
        assert want_ids == chosen
        assert np.abs(logits - want).max() < 1e-3 * np.abs(want).max()


def _top_differences(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """|difference| of the log-probability of the token `want` puts first, at every position."""
    top = want.argmax(-1, keepdim=True)
    return (got.log_softmax(-1).gather(1, top) - want.log_softmax(-1).gather(1, top)).abs().flatten()


def test_demo_model_in_bfloat16(demo_reference: tuple[object, object]) -> None:
    """bfloat16 weights: log-probabilities within 2e-2 of float32 on the same weights, by default and with float32 KV.

    Compared is the token that float32 puts first, over 249 positions; for float32 KV also the whole vocabulary.
    Measured for the first token: keys and values in float32, largest 3e-5, with inputs of products as two bfloat16
    parts (AMX) 2e-4; in float16, the default, mean 3e-4, largest 5e-3; all in bfloat16, mean 7e-3, largest 9e-2;
    transformers in bfloat16, mean 1.9e-2, largest 1.5e-1.
    """
    reference, tokenizer = demo_reference
    rounded = copy.deepcopy(reference).to(torch.bfloat16)  # type: ignore[attr-defined]
    # The angles are no weights: they must not be rounded with them.
    rounded.model.rotary_emb.inv_freq = reference.model.rotary_emb.inv_freq.clone()  # type: ignore[attr-defined]
    exact = copy.deepcopy(rounded).to(torch.float32)
    exact.model.rotary_emb.inv_freq = reference.model.rotary_emb.inv_freq.clone()  # type: ignore[attr-defined]
    default = load_model(demo_model(), "bfloat16", 16)
    assert default.layout.dtype is KvDtype.FLOAT16
    models = {kv_dtype: load_model(demo_model(), "bfloat16", 16, kv_dtype) for kv_dtype in ("bfloat16", "float32")}
    models["default"] = default
    ours: dict[str, list[torch.Tensor]] = {kv_dtype: [] for kv_dtype in models}
    theirs, vocabulary = [], []
    for text in PROMPTS + LONG_PROMPTS:
        prompt = np.array(tokenizer(text)["input_ids"], np.int32)  # type: ignore[operator]
        ids = torch.from_numpy(prompt).long()[None]
        with torch.no_grad():
            want, other = exact(ids).logits[0], rounded(ids).logits[0].float()
        for kv_dtype, model in models.items():
            got = torch.from_numpy(run_prompt(model, prompt).copy())
            ours[kv_dtype].append(_top_differences(got, want))
            if kv_dtype == "float32":
                vocabulary.append((got.log_softmax(-1) - want.log_softmax(-1)).abs().amax(-1))
        theirs.append(_top_differences(other, want))
    narrow, wide, yardstick = torch.cat(ours["bfloat16"]), torch.cat(ours["float32"]), torch.cat(theirs)
    half = torch.cat(ours["default"])
    assert half.numel() == wide.numel() == 249
    assert half.max() < 2e-2, half.max()
    assert wide.max() < 2e-2, wide.max()
    assert torch.cat(vocabulary).max() < 2e-3, torch.cat(vocabulary).max()
    # The same measure finds rounded keys, values and inputs, so it could fail.
    assert 2e-2 < narrow.max() < 1e-1, narrow.max()
    assert narrow.mean() < 1e-2, narrow.mean()
    assert narrow.mean() < 0.6 * yardstick.mean(), (narrow.mean(), yardstick.mean())
