"""The compiled step against the torch oracle: lengths, groups, head sizes, block tables, poison and batching."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numpy.typing import NDArray

from decoder.models.config import ModelConfig
from decoder.models.llama import CausalLM
from tests.decoder.model_rig import (
    KERNELS,
    Sequence,
    changed_slots,
    make_config,
    make_model,
    poisoned_arena,
    random_tensors,
    run_prompt,
    run_step,
    stored_numbers,
)
from tests.oracles import llama_logits

TOLERANCE = {
    "portable": 5e-2, "auto": 5e-2, "auto-kv-float32": 5e-4, "auto-kv-float16": 5e-3, "portable-kv-int8": 1e-1,
    "auto-kv-int8": 1e-1, "auto-kv-fp8_e4m3": 3e-1,
}  # fmt: skip
EXACT = 1e-4
SHAPES = {
    "mha": {"heads": 2, "kv_heads": 2, "head_dim": 64},
    "group3": {"heads": 3, "kv_heads": 1, "head_dim": 64},
    "group4": {"heads": 8, "kv_heads": 2, "head_dim": 32},
    "group8": {"heads": 16, "kv_heads": 2, "head_dim": 16},
    "mqa128": {"heads": 8, "kv_heads": 1, "head_dim": 128},
    "wide_group": {"heads": 40, "kv_heads": 1, "head_dim": 32},
}


@functools.cache
def _model(shape: str, kernels: str, threads: int = 2, block_tokens: int = 16) -> tuple[CausalLM, ModelConfig]:
    config = make_config(**SHAPES[shape], layers=1)
    model = make_model(config, random_tensors(config), kernels, threads=threads, block_tokens=block_tokens)
    return model, config


def _prompt(length: int, seed: int = 1) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 260, length).astype(np.int32)


def _difference(got: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


LENGTHS = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257)
# By default every pair of two of them is seen; with the slow tests every triple.
TRIPLES = [
    pytest.param(length, shape, kernels, marks=[pytest.mark.slow] if (i + j + k) % len(SHAPES) else [])
    for i, length in enumerate(LENGTHS)
    for j, shape in enumerate(SHAPES)
    for k, kernels in enumerate(KERNELS)
]


@pytest.mark.parametrize(("length", "shape", "kernels"), TRIPLES)
def test_prefill_equals_oracle(length: int, shape: str, kernels: str) -> None:
    """A prompt on scattered blocks of a poisoned arena gives the oracle's logits at every position."""
    model, config = _model(shape, kernels)
    want = llama_logits(config, random_tensors(config), _prompt(length))
    assert _difference(run_prompt(model, _prompt(length)), want) < TOLERANCE.get(kernels, EXACT)


@pytest.mark.parametrize("kernels", KERNELS)
def test_long_prompt_equals_oracle(kernels: str) -> None:
    """A prompt of several spans, prefilled in chunks and ended by decodes, equals the oracle."""
    model, config = _model("group3", kernels)
    want = llama_logits(config, random_tensors(config), _prompt(1000))
    assert _difference(run_prompt(model, _prompt(1000), chunk=333), want) < TOLERANCE.get(kernels, EXACT)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("chunk", [1, 5, 16, 63])
def test_chunks_equal_one_shot(kernels: str, chunk: int) -> None:
    """Chunked prefill, and decodes alone, give bit for bit the logits of one prefill."""
    model, _ = _model("group3", kernels)
    want = run_prompt(model, _prompt(300))
    assert np.array_equal(run_prompt(model, _prompt(300), chunk=chunk, seed=7), want)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("block_tokens", [1, 4, 8, 32, 64, 256])
def test_block_size_does_not_matter(kernels: str, block_tokens: int) -> None:
    """Every block size gives bit for bit the logits of the default one, in chunks and token by token."""
    want = run_prompt(_model("group4", kernels)[0], _prompt(280))
    model, _ = _model("group4", kernels, block_tokens=block_tokens)
    assert np.array_equal(run_prompt(model, _prompt(280), chunk=100), want)
    assert np.array_equal(run_prompt(model, _prompt(280), chunk=1), want)


@pytest.mark.parametrize("kernels", KERNELS)
def test_batch_does_not_change_a_sequence(kernels: str) -> None:
    """Decodes and prefill chunks that share a step give bit for bit what each gives alone."""
    model, _ = _model("group3", kernels)
    prompts = [_prompt(length, seed=length) for length in (40, 300, 17, 64)]
    alone = [run_prompt(model, prompt) for prompt in prompts]
    arena = poisoned_arena(model, 64)
    sequences, used = [], 1
    for prompt in prompts:
        needed = -(-prompt.size // 16)
        sequences.append(Sequence(prompt, np.arange(used, used + needed, dtype=np.int32)))
        used += needed
    random = np.random.default_rng(3)
    while any(s.done < s.token_ids.size for s in sequences):
        parts = []
        for s in sequences:
            left = s.token_ids.size - s.done
            if left:
                parts.append((s, min(left, int(random.choice([1, 1, 7, 40])))))
        run_step(model, arena, parts)
    for sequence, want in zip(sequences, alone, strict=True):
        assert np.array_equal(np.concatenate(sequence.logits), want)


@pytest.mark.parametrize("kernels", KERNELS)
def test_shared_blocks_serve_two_sequences(kernels: str) -> None:
    """A second sequence that reads the first one's prefix blocks gives the logits of computing them itself."""
    model, _ = _model("group3", kernels)
    first, tail = _prompt(64), _prompt(20, seed=9)
    both = np.concatenate([first[:48], tail])
    want = run_prompt(model, both)
    arena = poisoned_arena(model, 16)
    run_step(model, arena, [(Sequence(first, np.array([3, 1, 7, 5], np.int32)), 64)])
    second = Sequence(both, np.array([3, 1, 7, 9, 2], np.int32), done=48)
    run_step(model, arena, [(second, 20)])
    assert np.array_equal(second.logits[0], want[48:])


@pytest.mark.parametrize("kernels", KERNELS)
def test_threads_and_repetition_do_not_matter(kernels: str) -> None:
    """One thread, two threads, three threads and a second run give the same bits."""
    want = run_prompt(_model("group4", kernels, threads=2)[0], _prompt(270), chunk=90)
    for threads in (1, 2, 3):
        assert np.array_equal(run_prompt(_model("group4", kernels, threads=threads)[0], _prompt(270), chunk=90), want)


@pytest.mark.parametrize("kernels", KERNELS)
def test_only_own_slots_are_written(kernels: str) -> None:
    """A step changes the slots of its query tokens and nothing else of the arena."""
    model, _ = _model("group3", kernels)
    arena = poisoned_arena(model, 6)
    prompt = _prompt(30)
    before = arena.copy()
    run_step(model, arena, [(Sequence(prompt, np.array([4, 2], np.int32)), 30)])
    changed = changed_slots(model, arena, before)
    want = np.zeros_like(changed)
    want[4, :16] = want[2, :14] = True
    assert np.array_equal(changed, want)


@pytest.mark.parametrize("kernels", [kernels for kernels in KERNELS if "int8" not in kernels and "fp8" not in kernels])
def test_copy_and_scrub(kernels: str) -> None:
    """Copy-on-write copies exactly the named tokens of all layers; scrubbing zeroes or poisons whole blocks."""
    model, _ = _model("group4", kernels)
    arena = poisoned_arena(model, 4)
    model.scrub_blocks(arena, np.array([1, 2, 3], np.int32))
    assert not arena[1:4].any()
    arena[1] = 5
    model.copy_blocks(arena, np.array([1], np.int32), np.array([3], np.int32), np.array([7], np.int32))
    assert (arena[3, :, :, :, :7] == 5).all()
    assert not arena[3, :, :, :, 7:].any()
    model.scrub_blocks(arena, np.array([3], np.int32), poison=True)
    assert np.isnan(stored_numbers(model, arena[3])).all()
