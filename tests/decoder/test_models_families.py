"""Every family against `transformers` in float32, at every position, and against itself in pieces, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decoder.kernels.frame import SPAN
from decoder.models.llama import CausalLM
from decoder.weights import load_model
from tests.decoder.model_rig import Sequence, poisoned_arena, run_prompt, run_step
from tests.tiny_families import FAMILIES, PROMPT_TOKENS, VOCABULARY, make_family

pytest.importorskip("transformers")

PROMPT = np.random.default_rng(5).integers(3, VOCABULARY, PROMPT_TOKENS).astype(np.int32)


def reference_logits(reference: object, prompt: NDArray[np.int32] = PROMPT) -> NDArray[np.float32]:
    """Logits of `transformers` at every position."""
    with torch.no_grad():
        logits = reference(torch.from_numpy(prompt).long()[None]).logits[0]  # type: ignore[operator]
    values: NDArray[np.float32] = logits.float().numpy()
    return values


def relative_error(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    """The largest difference at any position, over the largest logit of that position."""
    return float((np.abs(got - want).max(-1) / np.abs(want).max(-1)).max())


def beside_others(model: CausalLM) -> NDArray[np.float32]:
    """Logits of PROMPT whose every step is shared with other prompts, in chunks and single tokens."""
    size = -(-PROMPT.size // model.layout.block_tokens)
    arena = poisoned_arena(model, 3 * size)
    blocks = np.random.default_rng(1).permutation(3 * size).astype(np.int32) + 1
    others = [Sequence(np.roll(PROMPT, shift), blocks[shift * size :][:size]) for shift in (1, 2)]
    sequence = Sequence(PROMPT, blocks[:size])
    run_step(model, arena, [(others[0], 300)])
    while sequence.done < PROMPT.size:
        count = 1 if sequence.done > 320 else min(77, PROMPT.size - sequence.done)
        parts = [(sequence, count), (others[1], 9)]
        if others[0].done < PROMPT.size:
            parts.append((others[0], 1))
        run_step(model, arena, parts)
    return np.concatenate(sequence.logits)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_family_equals_transformers_and_itself(tmp_path: Path, name: str) -> None:
    """Logits of a family are those of `transformers`; in chunks, cached, token by token, batched: the same bits."""
    reference = make_family(tmp_path, name)
    model = load_model(tmp_path, "float32", 16)
    whole = run_prompt(model, PROMPT)
    assert relative_error(whole, reference_logits(reference)) < 1e-4
    for chunk in (37, 1):
        assert np.array_equal(run_prompt(model, PROMPT, chunk=chunk), whole), chunk
    assert np.array_equal(beside_others(model), whole)
    arena = poisoned_arena(model, 30)
    first = Sequence(PROMPT, np.arange(1, 31, dtype=np.int32))
    run_step(model, arena, [(first, PROMPT.size)])
    for cached in (16, 39, 41, 257, PROMPT.size - 1):
        again = Sequence(PROMPT, first.blocks, done=cached)
        run_step(model, arena, [(again, PROMPT.size - cached)])
        assert np.array_equal(again.logits[0], whole[cached:]), cached


def test_window_is_exact(tmp_path: Path) -> None:
    """A query sees the last W keys and no more: what lies before the window of every layer changes nothing."""
    make_family(tmp_path, "mistral", num_hidden_layers=1)
    model = load_model(tmp_path, "float32", 16)
    whole = run_prompt(model, PROMPT)
    for place, changed in ((299, False), (300, True)):
        other = PROMPT.copy()
        other[place] = (other[place] + 1) % VOCABULARY
        same = np.array_equal(run_prompt(model, other)[-1], whole[-1])
        assert same is not changed, place


def test_blocks_before_a_window_are_not_read(tmp_path: Path) -> None:
    """What lies in whole blocks before a window changes nothing, not even as NaN. The control: in the block that the
    window begins in every value is multiplied, by zero before the window, so that a poisoned one shows."""
    make_family(tmp_path, "mistral", num_hidden_layers=1)
    model = load_model(tmp_path, "float32", 16)
    whole = run_prompt(model, PROMPT)[-1]
    first_block = (PROMPT.size - 40) // 16
    assert first_block > SPAN // 16 and (PROMPT.size - 40) % SPAN > 16
    for poisoned, harmless in ((range(first_block), True), (range(first_block, first_block + 1), False)):
        arena = poisoned_arena(model, 30)
        sequence = Sequence(PROMPT, np.arange(1, 31, dtype=np.int32))
        run_step(model, arena, [(sequence, PROMPT.size - 1)])
        model.scrub_blocks(arena, sequence.blocks[poisoned], poison=True)
        run_step(model, arena, [(sequence, 1)])
        last = sequence.logits[-1][-1]
        assert np.array_equal(last, whole) if harmless else np.isnan(last).all()


@pytest.mark.parametrize("name", ["gemma3", "qwen2"])
def test_bfloat16_stays_near(tmp_path: Path, name: str) -> None:
    """In bfloat16 a family's logits stay as near to float32 as those of `transformers` in bfloat16 do, about."""
    reference = make_family(tmp_path, name)
    exact = reference_logits(reference)
    theirs = relative_error(reference_logits(reference.to(torch.bfloat16)), exact)
    for kv_dtype in ("bfloat16", "float32"):
        ours = run_prompt(load_model(tmp_path, "bfloat16", 16, kv_dtype), PROMPT)
        assert relative_error(ours, exact) < 1.5 * theirs, (kv_dtype, theirs)


@pytest.mark.parametrize(
    ("changes", "digest"),
    [
        ({"sliding_window": 41}, "attention"),
        ({"attn_logit_softcapping": 6.0}, "attention"),
        ({"query_pre_attn_scalar": 25}, "attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "attention"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "position"),
    ],
)
def test_digests_hold_every_setting(tmp_path: Path, changes: dict[str, object], digest: str) -> None:
    """A setting that changes hidden states changes the cache key, whatever the weights say."""
    make_family(tmp_path, "gemma2")
    plain = load_model(tmp_path, "float32", 16).digests
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    changed = load_model(tmp_path, "float32", 16).digests
    assert changed.weights == plain.weights
    assert getattr(changed, digest) != getattr(plain, digest)


def test_dynamic_scaling_equals_transformers_at_the_configured_length(tmp_path: Path) -> None:
    """Beyond the model's own context, at every position of a prompt of the configured length; the same bits in chunks.
    The control: for another length `transformers` has another base."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    reference = make_family(tmp_path, "llama3", rope_parameters=rope, max_position_embeddings=128)
    # Its base only ever grows: the shorter prompt goes first.
    shorter = reference_logits(reference, PROMPT[:200])
    model = load_model(tmp_path, "float32", 16, max_context=PROMPT_TOKENS)
    whole = run_prompt(model, PROMPT)
    assert relative_error(whole, reference_logits(reference)) < 1e-4
    assert np.array_equal(run_prompt(model, PROMPT, chunk=37), whole)
    assert relative_error(whole[:200], shorter) > 1e-2


def test_longrope_goes_by_the_configured_context(tmp_path: Path) -> None:
    """The configured maximum, not a prompt's length, chooses the factors, and the cache key tells them apart."""
    reference = make_family(tmp_path, "phi3-long")
    short_prompt = PROMPT[:200]
    want_short = reference_logits(reference, short_prompt)
    long = load_model(tmp_path, "float32", 16)
    short = load_model(tmp_path, "float32", 16, max_context=256)
    assert relative_error(run_prompt(short, short_prompt), want_short) < 1e-4
    # A short prompt under the long factors is the beginning of a long one.
    assert np.array_equal(run_prompt(long, short_prompt), run_prompt(long, PROMPT)[:200])
    assert relative_error(run_prompt(long, short_prompt), want_short) > 1e-2
    assert short.digests.position != long.digests.position
    assert load_model(tmp_path, "float32", 16, max_context=512).digests == long.digests
