"""Models whose layers lie in two groups: the bits of one arena for all layers, however window blocks come and go.

The oracle is the same model without groups. Window blocks are taken as a step needs them, given up as soon as the
window has passed, and full of NaN from then on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from common.errors import Internal
from common.layout import KV_DTYPES
from decoder.grouped_arena import GroupedArena
from decoder.models.llama import CausalLM
from decoder.weights import load_model, loader
from decoder.windows import Windows
from tests.decoder.model_rig import Sequence, poisoned_arena, run_prompt, run_step
from tests.tiny_families import PROMPT_TOKENS, VOCABULARY, make_family

pytest.importorskip("transformers")

B: Final = 16
PROMPT = np.random.default_rng(5).integers(3, VOCABULARY, PROMPT_TOKENS).astype(np.int32)
_SLIDES: Final = {"use_sliding_window": True, "sliding_window": 40}
# Windows of 40 tokens in some layers, in every family that knows that; of 270, more than a span, in gemma2.
FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "gemma3-five": (
        "gemma3",
        {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2,
        },
    ),
    "qwen2": ("qwen2", {**_SLIDES, "max_window_layers": 1, "layer_types": None}),
    "qwen3": ("qwen3", {**_SLIDES, "max_window_layers": 1, "layer_types": None}),
    "qwen2-moe": ("qwen2-moe", {**_SLIDES, "max_window_layers": 3, "layer_types": None}),
}


def load_both(
    folder: Path, name: str, dtype: Any = "float32", kv_dtype: str | None = None, max_position: int = 0
) -> tuple[CausalLM, CausalLM]:
    """The model of a family with groups, and without."""
    family, changes = FAMILIES[name]
    if not (folder / "config.json").exists():
        make_family(folder, family, **changes)
    models = []
    for groups in (True, False):
        models.append(load_model(folder, dtype, B, kv_dtype, max_context=max_position, layer_groups=groups))
        assert models[-1].layout.grouped is groups
    return models[0], models[1]


def test_the_widest_window_counts(tmp_path: Path) -> None:
    """Of the layers with a window; where it is as long as the context, or all layers have one, there are no groups."""
    grouped, _ = load_both(tmp_path, "gemma3-five")
    config = grouped.config
    layers = list(config.layers)
    layers[3] = replace(layers[3], window=60)
    mixed = replace(config, layers=tuple(layers))
    assert loader.layer_windows(mixed, in_spans=False) == (60, (0, 1, 3, 4), 3)
    assert loader.layer_windows(mixed, in_spans=True) == (60 + 255, (0, 1, 3, 4), 3)
    assert loader.layer_windows(replace(mixed, max_position=60), in_spans=False) == (0, (), 3)
    layers[2] = replace(layers[2], window=20)
    assert loader.layer_windows(replace(config, layers=tuple(layers)), in_spans=False) == (60, (), 3)
    plain = tuple(replace(layer, window=None) for layer in layers)
    assert loader.layer_windows(replace(config, layers=plain), in_spans=False) == (0, (), 3)


@pytest.mark.parametrize(("max_position", "share"), [(41, 1), (159, 1), (160, 2), (239, 2), (240, 3), (1024, 3)])
def test_short_contexts_have_more_window_blocks(tmp_path: Path, max_position: int, share: int) -> None:
    """A context of less than four windows of 40 tokens takes nearly as many window blocks as blocks: one for each."""
    grouped, _ = load_both(tmp_path, "gemma3", max_position=max_position)
    assert grouped.layout.window_share == share
    assert grouped.layout.num_window_blocks(3000) == 3000 // share


class WindowPool:
    """Gives window blocks to the blocks that a step writes, and takes them back, poisoned, from those it passes."""

    def __init__(self, model: CausalLM, arena: GroupedArena, seed: int = 0) -> None:
        self._windows = Windows(model.layout.window_tokens, B)
        self._arena = arena
        self._random = np.random.default_rng(seed)
        self._free = list(range(1, len(arena.window_blocks)))
        self.attached = 0

    def before(self, parts: list[tuple[Sequence, int]]) -> None:
        """Every block that a step writes has one."""
        for sequence, count in parts:
            for block in sequence.blocks[sequence.done // B : (sequence.done + count - 1) // B + 1]:
                if not self._arena.of[block]:
                    window_block = self._free.pop(int(self._random.integers(len(self._free))))
                    self._arena.name(np.array([[block, window_block]], np.int32))
                    self.attached += 1

    def after(self, sequences: list[Sequence]) -> None:
        """What a window has passed is somebody else's."""
        for sequence in sequences:
            passed = sequence.blocks[: self._windows.passed_by(sequence.done)]
            for block in passed[self._arena.of[passed] > 0].tolist():
                self._free.append(int(self._arena.of[block]))
                self._arena.window_blocks.view(np.uint8)[self._arena.of[block]] = 0xFF
                self._arena.of[block] = 0


def run_in_little(model: CausalLM, *, chunk: int, num_window_blocks: int) -> np.ndarray:
    """Logits of PROMPT in chunks on so many window blocks."""
    arena = poisoned_arena(model, 60, num_window_blocks)
    pool = WindowPool(model, arena)
    sequence = Sequence(PROMPT, np.random.default_rng(3).permutation(60)[:24].astype(np.int32) + 1)
    while sequence.done < PROMPT.size:
        part = (sequence, min(chunk, PROMPT.size - sequence.done))
        pool.before([part])
        run_step(model, arena, [part])
        pool.after([sequence])
    assert pool.attached == -(-PROMPT.size // B) > num_window_blocks
    return np.concatenate(sequence.logits)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_groups_change_no_bit(tmp_path: Path, name: str) -> None:
    """In one go, in chunks and token by token, on window blocks for one window and a chunk: the bits without groups."""
    grouped, plain = load_both(tmp_path, name)
    want = run_prompt(plain, PROMPT)
    assert np.array_equal(run_prompt(grouped, PROMPT), want)
    for chunk in (33, 1):
        blocks = grouped.layout.window_reach + chunk // B + 1
        if blocks < PROMPT.size // B:
            assert np.array_equal(run_in_little(grouped, chunk=chunk, num_window_blocks=blocks), want), chunk


# Each pair has kernels of its own, which a fresh clone compiles: by default every type is seen beside bfloat16 weights.
PAIRS: Final = [
    pytest.param(dtype, kv_dtype, marks=[pytest.mark.slow] if dtype == "float32" != kv_dtype else [])
    for dtype in ("float32", "bfloat16")
    for kv_dtype in KV_DTYPES
]


@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
def test_every_type_of_keys_and_values(tmp_path: Path, dtype: str, kv_dtype: str) -> None:
    """Also where scales lie behind the elements of each group, with whatever kernels the CPU has."""
    grouped, plain = load_both(tmp_path, "gemma3-five", dtype, kv_dtype)
    blocks = grouped.layout.window_reach + 4
    if blocks < PROMPT.size // B:
        assert np.array_equal(run_in_little(grouped, chunk=37, num_window_blocks=blocks), run_prompt(plain, PROMPT))


@pytest.mark.parametrize("name", ["gemma3-five", "qwen3"])
def test_a_block_too_early_is_seen(tmp_path: Path, name: str) -> None:
    """Positive control: where a window block goes that is still read, the step refuses; poison in one shows."""
    grouped, _ = load_both(tmp_path, name)
    for poison in (False, True):
        arena = poisoned_arena(grouped, 30)
        sequence = Sequence(PROMPT, np.arange(1, 31, dtype=np.int32))
        run_step(grouped, arena, [(sequence, 300)])
        last = sequence.blocks[Windows(grouped.layout.window_tokens, B).passed_by(300)]
        if poison:
            arena.window_blocks.view(np.uint8)[arena.of[last]] = 0xFF
            run_step(grouped, arena, [(sequence, 1)])
            assert np.isnan(sequence.logits[-1]).all()
        else:
            arena.of[last] = 0
            with pytest.raises(Internal, match="no window block"):
                run_step(grouped, arena, [(sequence, 1)])


def test_decodes_that_share_blocks(tmp_path: Path) -> None:
    """Decodes at different places of shared blocks, some of which have passed what others read, beside chunks."""
    grouped, plain = load_both(tmp_path, "gemma3-five")
    answers = []
    for model in (grouped, plain):
        arena = poisoned_arena(model, 80)
        first = Sequence(PROMPT, np.arange(1, 31, dtype=np.int32))
        run_step(model, arena, [(first, 256)])
        sharing = [
            Sequence(
                PROMPT, np.concatenate([first.blocks[:16], np.arange(31 + 8 * n, 39 + 8 * n, dtype=np.int32)]), 256
            )
            for n in range(4)
        ]
        run_step(model, arena, [(sequence, 4 + 15 * n) for n, sequence in enumerate(sharing)])
        for _ in range(5):
            run_step(model, arena, [(sequence, 1) for sequence in sharing])
        run_step(model, arena, [(first, 50), *((sequence, 1) for sequence in sharing)])
        answers.append([np.concatenate(sequence.logits) for sequence in (first, *sharing)])
    for got, want in zip(*answers, strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_copies_and_scrubs_reach_both_groups(tmp_path: Path, kv_dtype: str) -> None:
    """A copied part of a block, of both kinds, computes on with the same bits; what is scrubbed is NaN."""
    grouped, plain = load_both(tmp_path, "gemma3", "float32", kv_dtype)
    want = run_prompt(plain, PROMPT[:200])
    arena = poisoned_arena(grouped, 40)
    first = Sequence(PROMPT[:200], np.arange(1, 14, dtype=np.int32))
    run_step(grouped, arena, [(first, 100)])
    copied = np.array([20], np.int32)
    grouped.copy_blocks(arena, first.blocks[6:7], copied, np.array([4], np.int32))
    grouped.scrub_blocks(arena, first.blocks[6:7], poison=True)
    second = Sequence(PROMPT[:200], np.concatenate([first.blocks[:6], copied, first.blocks[7:]]), done=100)
    run_step(grouped, arena, [(second, 100)])
    assert np.array_equal(second.logits[0], want[100:])
    assert (arena.window_blocks.view(np.uint8)[arena.of[first.blocks[6]]] == 0xFF).all()
    arena.of[20] = 0
    with pytest.raises(Internal, match="no window block"):
        grouped.copy_blocks(arena, first.blocks[6:7], copied, np.array([4], np.int32))


def test_an_arena_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    """Neither model takes the other's arena, nor one whose window blocks hold another number of layers."""
    grouped, plain = load_both(tmp_path, "gemma3-five")
    prompt = Sequence(PROMPT[:20], np.arange(1, 4, dtype=np.int32))
    for model, arena in (
        (grouped, poisoned_arena(plain, 5)),
        (plain, poisoned_arena(grouped, 5)),
        (grouped, GroupedArena.over(poisoned_arena(plain, 5), poisoned_arena(grouped, 5).window_blocks)),
    ):
        with pytest.raises(Internal, match="does not fit"):
            run_step(model, arena, [(prompt, 20)])
