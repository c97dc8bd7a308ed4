"""Every way to store keys and values under the device model: against an oracle that rounds alike, and the CPU's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import Internal
from common.layout import QUANTIZATIONS, KvDtype, KvLayout
from decoder.grouped_arena import private_arena
from decoder.models import device_model
from decoder.models.config import ModelConfig, digest_config
from decoder.models.device_arena import element_type
from decoder.models.device_model import DeviceModel
from decoder.models.packing import to_bfloat16
from decoder.weights import load_model
from decoder.weights.source import open_source
from tests.decoder.model_rig import Sequence, make_model, random_tensors, run_step
from tests.decoder.rig import Node, request
from tests.kernels import oracles
from tests.kernels.interpreted.test_device_model import (
    VOCAB,
    Row,
    batch_of,
    config_of,
    everything,
    oracle_logits,
    tensors_of,
)
from tests.kernels.rig import DEVICE
from tests.tiny_models import make_tiny_llama

STORED = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "float16": torch.float16}
Answer = tuple[int, list[int], list[float]]
ON_BOTH = ["int8", pytest.param("fp8_e4m3", marks=pytest.mark.slow)]
"""What runs an engine, or has the CPU's step compiled for the storage."""


def stored_as(
    config: ModelConfig, kv_dtype: str, weights: KvDtype = KvDtype.FLOAT32, *, block_tokens: int = 16, **options: Any
) -> DeviceModel:
    """A device model of random weights, or of those that the option `read` gives."""
    layout = KvLayout.of(config.num_layers, config.num_kv_heads, config.head_dim, block_tokens, kv_dtype)
    read = options.pop("read", tensors_of(config).__getitem__)
    return DeviceModel(config, layout, digest_config(config, bytes(32), "x"), read, DEVICE, dtype=weights, **options)


def poisoned(model: DeviceModel, num_blocks: int) -> torch.Tensor:
    """All bits set, the null block's too: NaN in every type of elements and scales."""
    array = torch.from_numpy(private_arena(model.layout, num_blocks))
    array.view(torch.uint8).fill_(0xFF)
    return model.view(array if DEVICE.type == "cpu" else array.to(DEVICE)).blocks


def logits_in_steps(model: DeviceModel, arena: torch.Tensor, row: Row, counts: list[int]) -> torch.Tensor:
    """Logits of all tokens of a row, in steps of so many."""
    parts = [model.forward(batch_of([(row, count)]), arena).copy() for count in counts]
    return torch.from_numpy(np.concatenate(parts))


@pytest.mark.parametrize(
    ("config", "kv_dtype", "bound"),
    [(everything(), "int8", 1e-4), (config_of(), "fp8_e4m3", 1e-4), (config_of(), "float16", 2e-3)],
    ids=["int8", "fp8_e4m3", "float16"],
)
def test_logits_equal_the_oracle(config: ModelConfig, kv_dtype: str, bound: float) -> None:
    """A chunk, a chunk over a prefix and a decode, on scattered poisoned blocks; no other block is written.

    The oracle rounds keys and values in the same way; beside float16 ones queries are rounded too.
    """
    model = stored_as(config, kv_dtype, block_tokens=8)
    arena = poisoned(model, 5)
    tokens = np.random.default_rng(5).integers(0, VOCAB, 14)
    want = oracle_logits(config, tokens, STORED[kv_dtype])
    got = logits_in_steps(model, arena, Row(tokens, [4, 2]), [9, 4, 1])
    assert oracles.relative_error(got, want) < bound
    if kv_dtype in QUANTIZATIONS:
        assert oracles.relative_error(oracle_logits(config, tokens), want) > 10 * bound  # control: rounding is seen
    assert bool((arena.view(torch.uint8)[[0, 1, 3, 5]] == 0xFF).all())


@pytest.mark.parametrize("kv_dtype", ["float16", "float32", "int8"])
def test_bfloat16_weights_beside_other_keys_and_values(kv_dtype: str) -> None:
    """Within the rounding of bfloat16, whatever holds the keys and values."""
    config = config_of(num_layers=1)
    model = stored_as(config, kv_dtype, KvDtype.BFLOAT16)
    tokens = np.random.default_rng(7).integers(0, VOCAB, 7)
    got = logits_in_steps(model, poisoned(model, 2), Row(tokens, [2]), [6, 1])
    assert oracles.relative_error(got, oracle_logits(config, tokens)) < 3e-2


def test_chips_without_e4m3_read_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before compute capability 8.9 elements are bytes, written and read by hand: the same block, the same logits."""
    config, tokens = config_of(num_layers=1), np.arange(3, 12)
    model = stored_as(config, "fp8_e4m3")
    arena = poisoned(model, 1)
    want = logits_in_steps(model, arena, Row(tokens, [1]), [8, 1])
    monkeypatch.setattr(device_model, "capability", lambda device: 80)
    old = stored_as(config, "fp8_e4m3")
    other = poisoned(old, 1)
    assert (element_type(old.layout, 89), old.view(other).elements.dtype) == (torch.float8_e4m3fn, torch.uint8)
    assert torch.equal(logits_in_steps(old, other, Row(tokens, [1]), [8, 1]), want)
    assert torch.equal(arena, other)


@pytest.mark.parametrize("kv_dtype", ON_BOTH)
def test_blocks_of_one_form_are_read_by_the_other(kv_dtype: str) -> None:
    """The CPU's step and the device's write the same bytes; each goes on with a decode on what the other wrote.

    The CPU's attention is that of float32: where it multiplies bytes, later layers may round another way.
    """
    config = config_of()
    tensors = random_tensors(config)
    on_cpu = make_model(config, tensors, f"portable-kv-{kv_dtype}")
    on_device = stored_as(config, kv_dtype, read=tensors.__getitem__)
    tokens, blocks = np.random.default_rng(9).integers(0, VOCAB, 23).astype(np.int32), [5, 2]
    arenas = [private_arena(on_cpu.layout, 5) for _ in range(2)]
    for arena in arenas:
        arena.view(np.uint8)[...] = 0xFF
    sequence, row = Sequence(tokens, np.array(blocks, np.int32)), Row(tokens, blocks)
    run_step(on_cpu, arenas[0], [(sequence, 22)])
    on_device.forward(batch_of([(row, 22)]), arenas[1])
    assert np.array_equal(*arenas)
    got = on_device.forward(batch_of([(row, 1)]), arenas[0])[0].copy()
    run_step(on_cpu, arenas[1], [(sequence, 1)])
    assert np.abs(got - sequence.logits[-1][0]).max() < 1e-4
    assert np.array_equal(*arenas)


def answers(model: Any, blocks: Any) -> list[Answer]:
    """Cached tokens, tokens and log-probabilities of a prompt: missed, evicted, missed, hit, left inside a block.

    Blocks are poisoned when they are given back, and hold another prompt before the second miss.
    """
    node = Node(8, model=model, arena=blocks, chunk_tokens=32)
    results: list[Answer] = []

    def ask(prompt: list[int], max_tokens: int = 2, **options: Any) -> None:
        number = len(results)
        node.submit(request(number, prompt, max_tokens=max_tokens, num_logprobs=0, **options))
        node.finish(number)
        chosen = [log.chosen for log in node.sink.logprobs[number, 0]]
        results.append((node.sink.cached[number], node.sink.tokens[number, 0], chosen))

    first, others = (np.random.default_rng(seed).integers(3, 512, 11).tolist() for seed in (1, 2))
    branch = [*first[:9], 7, 8]
    ask(first)
    node.manager.evict(num_blocks=8)
    ask(others, max_tokens=1)
    node.manager.evict(num_blocks=8)
    ask(first)
    ask(first)
    ask(branch)
    ask(branch, no_read=True, no_store=True)
    node.assert_quiet()
    return results


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk."""
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny_llama(folder, hidden=32, heads=2, kv_heads=1, intermediate=64, max_position=64)


@pytest.fixture(scope="module")
def device_answers(tiny: Path) -> Callable[[str], list[Answer]]:
    """`answers` of the device's model of `tiny`, by storage; matrices are rounded to bfloat16, as the CPU's are."""
    source = open_source(tiny)

    def read(name: str) -> np.ndarray:
        values = np.array(source.read(name), np.float32)
        return values if values.ndim == 1 else (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)

    @functools.cache
    def run(kv_dtype: str) -> list[Answer]:
        model = stored_as(source.config, kv_dtype, block_tokens=8, read=read)
        arena = poisoned(model, 8)
        return answers(model, arena.numpy() if DEVICE.type == "cpu" else arena)

    return run


@pytest.mark.parametrize("kv_dtype", ON_BOTH)
def test_reused_and_copied_blocks_have_their_own_scales(
    device_answers: Callable[[str], list[Answer]], kv_dtype: str
) -> None:
    """A hit, and a copy inside a block, give the log-probabilities of a miss, whatever the blocks held before."""
    got = device_answers(kv_dtype)
    first, _, again, hit, branch, branch_cold = got
    assert [cached for cached, _, _ in got] == [0, 0, 0, 10, 9, 0]
    for one, other in ((first, again), (first, hit), (branch_cold, branch)):
        assert one[1] == other[1]
        assert np.abs(np.subtract(one[2], other[2])).max() < 1e-3
    assert first[1] != branch[1]


@pytest.mark.parametrize("kv_dtype", ON_BOTH)
def test_an_engine_gives_the_tokens_of_the_cpu_model(
    tiny: Path, device_answers: Callable[[str], list[Answer]], kv_dtype: str
) -> None:
    """Misses, hits and a copy inside a block: the CPU's tokens, and its log-probabilities within 1e-3; with fp8, beside
    which a CPU may round queries to bfloat16, within 3e-2."""
    within = 3e-2 if kv_dtype == "fp8_e4m3" else 1e-3
    on_cpu = load_model(tiny, "bfloat16", 8, kv_dtype)
    mine, theirs = device_answers(kv_dtype), answers(on_cpu, private_arena(on_cpu.layout, 8))
    for (cached, tokens, logprobs), (their_cached, their_tokens, their_logprobs) in zip(mine, theirs, strict=True):
        assert (cached, tokens) == (their_cached, their_tokens)
        assert np.abs(np.subtract(logprobs, their_logprobs)).max() < within


def test_an_arena_of_another_geometry_is_refused() -> None:
    """Bytes of fewer tokens, elements without scales, and other types are no quantised arena."""
    model = stored_as(config_of(num_layers=1), "int8")
    size = model.layout.block_bytes
    for shape, dtype in (((3, size - 2), torch.uint8), ((3, 1, 2, 1, 16, 16), torch.int8), ((3, size), torch.int8)):
        with pytest.raises(Internal, match="does not fit"):
            model.view(torch.zeros(shape, dtype=dtype, device=DEVICE))
    assert model.view(torch.zeros((3, size), dtype=torch.uint8, device=DEVICE)).scales is not None
