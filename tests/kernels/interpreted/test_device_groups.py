"""A device model whose layers lie in two groups: the logits of one arena for all layers, however window blocks go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from common.errors import Internal
from common.layout import KvDtype, KvLayout
from decoder.grouped_arena import GroupedArena, parts_of
from decoder.models.config import LayerConfig, ModelConfig, digest_config
from decoder.models.device_arena import allocate
from decoder.models.device_model import DeviceModel
from decoder.windows import Windows
from tests.kernels.interpreted.test_device_model import (
    VOCAB,
    CountingRecorder,
    Row,
    batch_of,
    everything,
    oracle_logits,
    tensors_of,
)
from tests.kernels.interpreted.test_device_sharing import FREE, NEVER, decodes_of
from tests.kernels.rig import DEVICE

B = 8
WINDOW = 9


def config_of_three() -> ModelConfig:
    """Every family's settings at once, with windows in the layers around one that reads all."""
    windowed = LayerConfig(window=WINDOW, local=True)
    config = everything()
    values = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return ModelConfig(
        **{**values, "max_position": 300, "num_layers": 3, "layers": (windowed, LayerConfig(), windowed)}
    )


CONFIG = config_of_three()


def grouped_model(kv_dtype: str = "float32", *, groups: bool = True, **options: Any) -> DeviceModel:
    windows = (WINDOW, (0, 2)) if groups else (0, ())
    layout = KvLayout.of(3, CONFIG.num_kv_heads, CONFIG.head_dim, B, kv_dtype, *windows)
    digests = digest_config(CONFIG, bytes(32), "float32")
    return DeviceModel(
        CONFIG, layout, digests, tensors_of(CONFIG).__getitem__, DEVICE, dtype=KvDtype.FLOAT32, **options
    )


def poisoned(model: DeviceModel, num_blocks: int) -> Any:
    """All bits of both kinds of blocks set, the null ones too; with groups no block has a window block yet."""
    arena = allocate(model.layout, num_blocks, DEVICE)
    for memory, _ in parts_of(arena, model.layout):
        memory.view(torch.uint8).fill_(0xFF)
    if isinstance(arena, GroupedArena):
        arena.of[:] = 0
    return arena


def forward(model: DeviceModel, arena: Any, parts: list[tuple[Row, int]]) -> np.ndarray:
    """Logits of a step; window blocks are taken by what is written, and given up, poisoned, by what is passed."""
    windows = Windows(WINDOW, B)
    if isinstance(arena, GroupedArena):
        for row, count in parts:
            for block in row.blocks[row.done // B : (row.done + count - 1) // B + 1]:
                if not arena.of[block]:
                    free = set(range(1, len(arena.window_blocks))) - set(arena.of.tolist())
                    arena.of[block] = max(free)
    logits = model.forward(batch_of(parts), arena).copy()
    if isinstance(arena, GroupedArena):
        for row, _ in parts:
            for block in row.blocks[: windows.passed_by(row.done)]:
                arena.window_blocks.view(torch.uint8)[arena.of[block]] = 0xFF
                arena.of[block] = 0
    return logits


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_groups_change_no_logit(kv_dtype: str) -> None:
    """Chunks, chunks beside decodes, decodes in fixed memory: as without groups, and as the oracle has it."""
    answers = []
    for groups in (True, False):
        model = grouped_model(kv_dtype, groups=groups)
        arena = poisoned(model, 14)
        numbers = np.random.default_rng(5)
        first = Row(numbers.integers(0, VOCAB, 44), [7, 2, 9, 11, 1, 5])
        second = Row(numbers.integers(0, VOCAB, 20), [4, 8, 3])
        steps = [[(first, 30)], [(first, 1), (second, 12)], *([[(first, 1), (second, 1)]] * 4), [(first, 9)]]
        answers.append([forward(model, arena, parts) for parts in steps])
        if groups:
            assert (arena.of > 0).sum() == 2 + 1  # of nine blocks those that may still be read
            assert torch.isnan(arena.window_blocks[0].view(torch.float32)).all() or kv_dtype == "int8"
    for got, want in zip(*answers, strict=True):
        assert np.array_equal(got, want)
    if kv_dtype == "float32":
        want = oracle_logits(CONFIG, np.random.default_rng(5).integers(0, VOCAB, 44))
        assert float((torch.from_numpy(answers[0][0]) - want[:30]).abs().max()) < 1e-3


def test_a_window_block_too_few_is_refused_and_poison_in_one_shows() -> None:
    """Positive control of the test before."""
    model = grouped_model()
    arena = poisoned(model, 8)
    row = Row(np.arange(40) % VOCAB, [1, 2, 3, 4, 5])
    forward(model, arena, [(row, 30)])
    last = row.blocks[Windows(WINDOW, B).passed_by(30)]
    had, arena.of[last] = int(arena.of[last]), 0
    for count in (1, 2):
        with pytest.raises(Internal, match="no window block"):
            model.forward(batch_of([(row, count)]), arena)
        row.done -= count
    arena.of[last] = had
    arena.window_blocks.view(torch.uint8)[had] = 0xFF
    assert np.isnan(forward(model, arena, [(row, 1)])).all()


def test_shared_runs_stay_with_the_layers_that_read_all() -> None:
    """Decodes read a common prefix once in the layers that read all, by tables of blocks; those with a window read
    theirs by tables of window blocks. As without groups, and as without sharing, within rounding."""
    batch = decodes_of([262, 270, 275], 32, B)
    logits = []
    for groups, costs in ((True, FREE), (False, FREE), (True, NEVER)):
        model = grouped_model(groups=groups, sharing=costs)
        arena = allocate(model.layout, int(batch.block_tables.max()), DEVICE)
        generator = torch.Generator().manual_seed(3)
        whole = torch.randn(
            (len(arena.blocks if groups else arena), 3, *model.layout.block_shape[1:]), generator=generator
        )
        if groups:
            arena.of[1:] = arena.of[1:][::-1].copy()
            arena.blocks.copy_(whole[:, 1:2])
            arena.window_blocks[torch.from_numpy(arena.of).long()] = whole[:, [0, 2]].to(DEVICE)
        else:
            arena.copy_(whole)
        assert (model._shared(batch, recorded=True) is not None) == (costs is FREE)
        logits.append(model.forward(batch, arena).copy())
    assert np.array_equal(logits[0], logits[1])
    assert np.abs(logits[0] - logits[2]).max() < 1e-4


def test_a_recording_takes_the_window_blocks_of_each_step() -> None:
    """Tables of window blocks lie in fixed memory, and are put in anew for each step."""
    recorder = CountingRecorder()
    model = grouped_model(recorder=recorder)
    arena = poisoned(model, 8)
    row = Row(np.arange(60) % VOCAB, [1, 2, 3, 4, 5, 6])
    forward(model, arena, [(row, 20)])
    want = oracle_logits(CONFIG, row.tokens[:36])
    for position in range(20, 36):
        logits = forward(model, arena, [(row, 1)])
        assert float((torch.from_numpy(logits) - want[position]).abs().max()) < 1e-3
    assert recorder.recorded == 1


def test_copies_scrubs_and_warm_up() -> None:
    """A copied part of a block computes on; a scrubbed one is gone in both groups; compiling leaves an arena alone."""
    model = grouped_model()
    arena = poisoned(model, 8)
    model.warm_up(arena)
    assert torch.isnan(arena.blocks).all() and torch.isnan(arena.window_blocks).all()
    row = Row(np.arange(20) % VOCAB, [1, 2, 3])
    forward(model, arena, [(row, 11), (Row(row.tokens, [6]), 2)])
    want = forward(model, arena, [(row, 3)])
    arena.of[5] = 1
    model.copy_blocks(arena, *(np.array([value], np.int32) for value in (2, 5, 3)))
    model.scrub_blocks(arena, np.array([2], np.int32), poison=True)
    assert torch.isnan(arena.window_blocks[arena.of[2]]).all()
    row.blocks[1], row.done = 5, 11
    assert np.array_equal(forward(model, arena, [(row, 3)]), want)
