"""Decodes of a device step that read a shared run of blocks once: when they do, and that the logits are the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from common.layout import KvLayout
from decoder.batch import StepBatch
from decoder.kernels.shared_prefix_decode import triton as shared_decode
from decoder.kernels.shared_prefix_decode.plan import Group
from decoder.models.config import LayerConfig, ModelConfig
from decoder.models.device_model import DeviceModel
from decoder.models.device_sharing import SharingCosts, SharingRule
from tests.kernels.interpreted.test_device_model import VOCAB, CountingRecorder, config_of, model_of
from tests.kernels.rig import DEVICE

FREE = SharingCosts(0, 0, min_sequences=3)
NEVER = SharingCosts(min_sequences=1 << 20)
RUN = 16  # blocks of 16 tokens: one span


def llama(query_heads: int, kv_heads: int, **changes: Any) -> ModelConfig:
    """An 8B model's attention."""
    values = {"num_layers": 32, "num_heads": query_heads, "num_kv_heads": kv_heads, "head_dim": 128, **changes}
    return config_of(hidden_size=4096, intermediate_size=14336, **values)


def rule_of(config: ModelConfig, members: int = 32) -> SharingRule:
    layout = KvLayout.of(config.num_layers, config.num_kv_heads, config.head_dim, 64, "bfloat16")
    return SharingRule(config, layout, members, 2, SharingCosts())


def decodes_of(lengths: list[int], shared: int, block_tokens: int = 64) -> StepBatch:
    """One token of each sequence; the first `shared` blocks are the same, no other is."""
    count, width = len(lengths), max(-(-length // block_tokens) for length in lengths)
    tables = np.arange(1, count * width + 1, dtype=np.int32).reshape(count, width)
    tables[:, :shared] = tables[0, :shared]
    contexts, rows = np.array(lengths, np.int32), np.arange(count + 1, dtype=np.int32)
    tokens = np.arange(count, dtype=np.int32) * 7 % VOCAB
    return StepBatch(tokens, contexts - np.int32(1), rows, contexts, tables, rows[:-1], count)


def test_the_rule_weighs_bytes_against_launches() -> None:
    """Eight sequences of an 8B model share two thousand tokens in a graph; not a span; not outside a graph, where a
    launch costs more; nor seven, nor a small model."""
    rule = rule_of(llama(32, 8))
    assert rule.choose(decodes_of([2100] * 8, 32), recorded=True) is not None
    assert rule.choose(decodes_of([2100] * 8, 4), recorded=True) is None
    assert rule.choose(decodes_of([2100] * 8, 32), recorded=False) is None
    assert rule.choose(decodes_of([4200] * 64, 64), recorded=False) is not None
    assert rule.choose(decodes_of([2100] * 7, 32), recorded=True) is None
    assert rule_of(llama(2, 1)).choose(decodes_of([2100] * 8, 32), recorded=True) is None


def test_the_rule_counts_only_layers_that_share() -> None:
    """Windowed layers save nothing: with half of them half as much is saved, with all of them nothing is chosen."""
    window, plain = LayerConfig(window=512), LayerConfig()
    group = [Group(tuple(range(16)), 64)]
    config = llama(32, 8)
    half = dataclasses.replace(config, layers=(window, plain) * 16)
    saved, less = (rule_of(c).saved_bytes(group, 16, recorded=True) for c in (config, half))
    assert 0 < less < saved < 15 * 64 * 64 * 4096 * 32
    assert saved == pytest.approx(2 * less, rel=0.1)
    none = dataclasses.replace(config, layers=(window,) * 32)
    assert rule_of(none).choose(decodes_of([9000] * 16, 128), recorded=True) is None


def arena_of(model: DeviceModel, num_blocks: int) -> torch.Tensor:
    """Random keys and values, so that no prompt has to be computed."""
    shape = (num_blocks + 1, *model.layout.block_shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)


@pytest.fixture
def shared_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batch sizes of the decodes that went by a shared run."""
    calls: list[int] = []
    attend = shared_decode.attend

    def counted(queries: torch.Tensor, *arguments: Any, **options: Any) -> None:
        calls.append(len(queries))
        attend(queries, *arguments, **options)

    monkeypatch.setattr(shared_decode, "attend", counted)
    return calls


@pytest.mark.parametrize(
    "config",
    [config_of(), config_of(num_heads=4, attention_cap=3.0, layers=(LayerConfig(window=70), LayerConfig()))],
    ids=["llama", "windowed"],
)
def test_logits_do_not_depend_on_it(config: ModelConfig, shared_calls: list[int]) -> None:
    """Four of five decodes over one span, in fixed memory: the logits of a model that reads it for each of them. Layers
    with a window never share. Two batches of one shape are one recording; one that shares nothing is another."""
    config = dataclasses.replace(config, max_position=512)
    recordings = CountingRecorder()
    sharing, apart = model_of(config, sharing=FREE, recorder=recordings), model_of(config, sharing=NEVER)
    arenas = [arena_of(sharing, 5 * 20) for _ in range(2)]
    layers = sum(layer.window is None for layer in config.layers)
    for lengths, shared in (([257, 300, 280, 258, 40], RUN), ([270, 257, 31, 300, 290], RUN), ([40, 257, 300], 0)):
        batch = decodes_of(lengths, shared, 16)
        got, want = (model.forward(batch, arena) for model, arena in zip((sharing, apart), arenas, strict=True))
        assert np.abs(got - want).max() < 1e-4
        assert float((arenas[0] - arenas[1]).abs().max()) < 1e-4
    assert shared_calls == [8] * (2 * layers)  # five sequences have a bucket of eight
    assert recordings.recorded == 2


def test_decodes_beside_a_chunk_share_too(shared_calls: list[int]) -> None:
    """A step that is launched as it comes: the same logits."""
    config = config_of(max_position=512)
    sharing, apart = model_of(config, sharing=FREE), model_of(config, sharing=NEVER)
    decodes = decodes_of([257, 300, 258], RUN, 16)
    chunk, rows = np.arange(5, dtype=np.int32), np.array([0, 1, 2, 3, 8], np.int32)
    tables = np.vstack([decodes.block_tables, np.arange(70, 70 + decodes.block_tables.shape[1], dtype=np.int32)])
    batch = StepBatch(
        np.concatenate([decodes.token_ids, chunk]), np.concatenate([decodes.positions, chunk]), rows,
        np.append(decodes.context_lens, np.int32(5)), tables, rows[1:] - np.int32(1), 3,
    )  # fmt: skip
    arena = arena_of(sharing, 100)
    got, want = (model.forward(batch, arena.clone()).copy() for model in (sharing, apart))
    assert np.abs(got - want).max() < 1e-4
    assert shared_calls == [3, 3]


def test_a_run_of_another_sequence_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with a table that shares nothing, taken for one that does, the logits are others."""
    config = config_of(max_position=512)
    sharing, apart = model_of(config, sharing=FREE), model_of(config, sharing=NEVER)
    batch = decodes_of([257, 300, 280], 0, 16)
    arena = arena_of(sharing, 60)
    choose = sharing._sharing.choose
    alike = decodes_of([257, 300, 280], RUN, 16)
    monkeypatch.setattr(sharing._sharing, "choose", lambda batch, **options: choose(alike, **options))
    got, want = (model.forward(batch, arena.clone()).copy() for model in (sharing, apart))
    assert np.abs(got[0] - want[0]).max() < 1e-4
    assert np.abs(got[1:] - want[1:]).max() > 1e-2
