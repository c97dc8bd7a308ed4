"""A whole model on the Triton kernels against the CPU's model and against a plain oracle of every family's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import Internal, InvalidArgument
from common.layout import KvDtype, KvLayout
from decoder.batch import DrawColumns, StepBatch
from decoder.kernels import gpu
from decoder.kernels.lora import triton as lora
from decoder.kernels.shared_prefix_decode import triton as shared_decode
from decoder.models import device_model
from decoder.models.config import ExpertsConfig, LayerConfig, ModelConfig, digest_config
from decoder.models.decode_graphs import MOST, DirectRecorder, Step
from decoder.models.device_inputs import BUCKETS, bucket_of
from decoder.models.device_model import DeviceModel
from decoder.models.rope import RopeConfig
from decoder.weights import load_model
from decoder.weights.loader import expected_shapes
from decoder.weights.source import open_source
from tests.decoder.model_rig import make_model, run_prompt
from tests.decoder.rig import Node, request
from tests.kernels import oracles
from tests.kernels.rig import DEVICE
from tests.tiny_models import make_tiny_llama

VOCAB = 260


def config_of(**changes: Any) -> ModelConfig:
    """A tiny plain Llama."""
    values: dict[str, Any] = {
        "architecture": "llama", "vocab_size": VOCAB, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 16, "hidden_size": 32, "intermediate_size": 64, "norm_epsilon": 1e-6,
        "rope": RopeConfig(10000.0, 16), "max_position": 256, "eos_token_ids": (2,), "bos_token_id": None,
        "tie_embeddings": False,
    }  # fmt: skip
    return ModelConfig(**{**values, **changes})


def everything() -> ModelConfig:
    """Settings of Gemma 2 and 3, Qwen 2 and Phi 3 in one: windows, caps, norms of heads and of halves, biases."""
    return config_of(
        architecture="gemma3_text", num_layers=2, activation="gelu_tanh", qkv_bias=True, output_bias=True,
        mlp_bias=True, qk_norms=True, post_norms=True, embedding_scale=5.5, query_scale=0.3, attention_cap=4.0,
        logit_cap=20.0, tie_embeddings=True, rope=RopeConfig(1e6, 8, "linear", factor=8.0),
        local_rope=RopeConfig(1e4, 8), layers=(LayerConfig(window=9, local=True), LayerConfig()),
    )  # fmt: skip


def tensors_of(config: ModelConfig) -> dict[str, np.ndarray]:
    """Random weights under which the output depends on the whole context."""
    numbers = np.random.default_rng(3)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = numbers.standard_normal(shape) / (np.sqrt(shape[1]) if len(shape) == 2 else 10.0)
        tensors[name] = (values * 2.0 if len(shape) == 2 else values + (0.0 if "bias" in name else 1.0)).astype("f4")
    return tensors


def model_of(
    config: ModelConfig,
    kind: KvDtype = KvDtype.FLOAT32,
    tensors: dict[str, np.ndarray] | None = None,
    **options: Any,
) -> DeviceModel:
    """A device model with blocks of 16 tokens."""
    layout = KvLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, kind)
    digests = digest_config(config, bytes(32), "float32")
    return DeviceModel(config, layout, digests, (tensors or tensors_of(config)).__getitem__, DEVICE, **options)


def oracle_logits(config: ModelConfig, token_ids: np.ndarray, stored: torch.dtype | None = None) -> torch.Tensor:
    """Logits [tokens, vocab] at every position, float64, as `ModelConfig` describes them; no cache, no pages.

    Keys and values are rounded to `stored`, if given, as the cache would.
    """
    get = {name: torch.from_numpy(array).double() for name, array in tensors_of(config).items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return oracles.rms_norm(x, get[name])

    positions = torch.arange(len(token_ids))
    x = get["model.embed_tokens.weight"][token_ids] * config.embedding_scale
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        h = norm(x, f"{prefix}input_layernorm.weight")
        parts = []
        for name in "qkv":
            part = h @ get[f"{prefix}self_attn.{name}_proj.weight"].T
            if config.qkv_bias:
                part = part + get[f"{prefix}self_attn.{name}_proj.bias"]
            parts.append(part.unflatten(1, (-1, config.head_dim)))
        rope = config.layer_rope(index)
        frequencies = rope.theta ** (-torch.arange(0, rope.dim, 2).double() / rope.dim) / rope.factor
        angles = positions[:, None] * frequencies
        head_norms = [get[f"{prefix}self_attn.{n}_norm.weight"] if config.qk_norms else None for n in "qk"]
        q, k = (
            oracles.norm_rotate(part, positions, angles.cos(), angles.sin(), weight)
            for part, weight in zip(parts, head_norms, strict=False)
        )
        rates = 1.0 if head_norms[0] is None else oracles.error_rates(head_norms[0], rope.dim)
        k, v = oracles.held(k, stored, keys=True, rates=rates), oracles.held(parts[2], stored)
        out, _ = oracles.attention(
            q, k, v, config.query_scale, window=layer.window or 0, soft_cap=config.attention_cap or 0.0
        )
        a = out.flatten(1) @ get[f"{prefix}self_attn.o_proj.weight"].T
        if config.output_bias:
            a = a + get[f"{prefix}self_attn.o_proj.bias"]
        x = x + (norm(a, f"{prefix}post_attention_layernorm.weight") if config.post_norms else a)
        before = "pre_feedforward" if config.post_norms else "post_attention"
        h = norm(x, f"{prefix}{before}_layernorm.weight")
        m = oracle_mlp(config, layer.experts, get, f"{prefix}mlp.", h)
        x = x + (norm(m, f"{prefix}post_feedforward_layernorm.weight") if config.post_norms else m)
    head = get["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    logits = norm(x, "model.norm.weight") @ head.T
    return config.logit_cap * torch.tanh(logits / config.logit_cap) if config.logit_cap else logits


def oracle_mlp(
    config: ModelConfig, experts: bool, get: dict[str, torch.Tensor], prefix: str, h: torch.Tensor
) -> torch.Tensor:
    """The feed-forward part of rows h, dense or of experts."""
    functional = torch.nn.functional

    def gated(name: str, biased: bool) -> torch.Tensor:
        biases = [get[f"{name}{n}_proj.bias"] if biased else 0.0 for n in ("gate", "up", "down")]
        first, up = (
            h @ get[f"{name}{n}_proj.weight"].T + bias for n, bias in zip(("gate", "up"), biases, strict=False)
        )
        first = functional.silu(first) if config.activation == "silu" else functional.gelu(first, approximate="tanh")
        return (first * up) @ get[f"{name}down_proj.weight"].T + biases[2]

    settings = config.experts
    if not experts or settings is None:
        return gated(prefix, config.mlp_bias)
    router = [get[f"{prefix}gate.weight"]]
    if settings.shared:
        router.append(get[f"{prefix}shared_expert_gate.weight"].reshape(1, -1))
    each = [f"{prefix}experts.{index}." for index in range(settings.count)]
    both = [torch.cat([get[f"{name}{n}_proj.weight"] for n in ("gate", "up")]) for name in each]
    down = [get[f"{name}down_proj.weight"] for name in each]
    return oracles.mixture(
        h, h @ torch.cat(router).T, torch.stack(both), torch.stack(down), settings.per_token, settings.normalize,
        config.activation, gated(f"{prefix}shared_expert.", False) if settings.shared else None,
    )  # fmt: skip


class Row:
    """A prompt with its blocks; `done` tokens are computed."""

    def __init__(self, tokens: np.ndarray, blocks: list[int]) -> None:
        self.tokens, self.blocks, self.done = tokens, blocks, 0


def batch_of(parts: list[tuple[Row, int]]) -> StepBatch:
    """One step with the logits of every row; single tokens come first."""
    width = max(len(row.blocks) for row, _ in parts) + 1
    tables = np.zeros((len(parts), width), np.int32)
    for table, (row, _) in zip(tables, parts, strict=True):
        table[: len(row.blocks)] = row.blocks
    counts = [count for _, count in parts]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    batch = StepBatch(
        np.concatenate([row.tokens[row.done : row.done + count] for row, count in parts]).astype(np.int32),
        np.concatenate([np.arange(row.done, row.done + count) for row, count in parts]).astype(np.int32),
        starts,
        np.array([row.done + count for row, count in parts], np.int32),
        tables,
        np.arange(starts[-1], dtype=np.int32),
        sum(count == 1 for count in counts),
    )
    for row, count in parts:
        row.done += count
    return batch


def arena_of(model: DeviceModel, num_blocks: int) -> torch.Tensor:
    """Blocks full of NaN, the null block too."""
    return torch.full((num_blocks + 1, *model.layout.block_shape), torch.nan, device=DEVICE)


def experts_beside_norms() -> ModelConfig:
    """Experts with a shared one in one layer of two, shares of all, and norms after each half, which no family has."""
    return config_of(
        qk_norms=True, post_norms=True, activation="gelu_tanh", experts=ExpertsConfig(5, 2, 24, False, 40),
        layers=(LayerConfig(experts=True), LayerConfig()),
    )  # fmt: skip


@pytest.mark.parametrize(
    "config", [config_of(), everything(), experts_beside_norms()], ids=["llama", "everything", "experts"]
)
def test_logits_equal_the_oracle(config: ModelConfig) -> None:
    """Chunks beside decodes, then decodes alone in fixed memory, on scattered blocks of poisoned memory."""
    model = model_of(config)
    numbers = np.random.default_rng(5)
    rows = [
        Row(numbers.integers(0, VOCAB, 22), [7, 2]),
        Row(numbers.integers(0, VOCAB, 10), [4]),
        Row(numbers.integers(0, VOCAB, 3), [6]),
    ]
    first, second, third = rows
    arena = arena_of(model, 9)
    steps = [
        [(first, 18)],  # a prompt at once
        [(first, 1), (second, 6)],  # a chunk beside a decode
        [(first, 1), (third, 1), (second, 2)],
        [(first, 1), (second, 1), (third, 1)],  # three decodes in a bucket of four
        [(first, 1), (third, 1)],
    ]
    wanted = {id(row): oracle_logits(config, row.tokens) for row in rows}
    for parts in steps:
        before = [row.done for row, _ in parts]
        got = torch.from_numpy(model.forward(batch_of(parts), arena).copy())
        want = torch.cat([wanted[id(row)][at : at + n] for (row, n), at in zip(parts, before, strict=True)])
        assert float((got - want).abs().max()) < 1e-3
    assert torch.isnan(arena[0]).all()  # the empty place of the bucket has written nothing


def test_bfloat16_model() -> None:
    """Weights, activations, keys and values in bfloat16: a chunk and a decode within its rounding."""
    config = config_of(num_layers=1)
    model = model_of(config, KvDtype.BFLOAT16)
    tokens = np.random.default_rng(7).integers(0, VOCAB, 7)
    row, want = Row(tokens, [2]), oracle_logits(config, tokens)
    arena = np.full((3, *model.layout.block_shape), 0x7FC0, np.uint16)  # as the host's arena has it
    blocks = arena if DEVICE.type == "cpu" else torch.from_numpy(arena).view(torch.bfloat16).to(DEVICE)
    got = [model.forward(batch_of([(row, count)]), blocks).copy() for count in (6, 1)]
    assert oracles.relative_error(torch.from_numpy(np.concatenate(got)), want) < 3e-2


def test_the_cpu_model_computes_the_same_function() -> None:
    """Every setting at once: the CPU's step gives the logits that the device step was held to."""
    config = everything()
    tensors, tokens = tensors_of(config), np.random.default_rng(5).integers(0, VOCAB, 22).astype(np.int32)
    got = run_prompt(make_model(config, tensors, "float32"), tokens)
    assert float((torch.from_numpy(got) - oracle_logits(config, tokens)).abs().max()) < 1e-3


class CountingRecorder(DirectRecorder):
    """Keeps what it was given, as a recording would: the step is called at each replay, and counted once."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, step: Step) -> Step:
        self.recorded += 1
        return step


def test_fixed_memory_gives_the_bits_of_any_other() -> None:
    """A decode step in a bucket equals the same step in memory of its own; a recording serves later batches."""
    config = config_of()
    recorder = CountingRecorder()
    model = model_of(config, recorder=recorder)
    arena = arena_of(model, 6)
    numbers = np.random.default_rng(6)
    rows = [Row(numbers.integers(0, VOCAB, 30), [1, 2]), *(Row(numbers.integers(0, VOCAB, 9), [b]) for b in (3, 4))]
    model.forward(batch_of([(rows[0], 15), (rows[1], 2), (rows[2], 3)]), arena)
    for parts in (rows, rows[::-1]):
        batch = batch_of([(row, 1) for row in parts])
        got = model.forward(batch, arena).copy()
        want = model.step.run(model.upload(batch, model.view(arena)), model.view(arena))
        assert np.abs(got - want.numpy(force=True)).max() < 1e-5
    assert recorder.recorded == 1
    moved = arena.clone()
    model.forward(batch_of([(row, 1) for row in rows]), moved)
    assert recorder.recorded == 2  # a recording holds the addresses of an arena


def test_buckets_hold_every_batch() -> None:
    """A batch goes into the smallest that has room, in ascending order."""
    assert [bucket_of(n) for n in (1, 2, 3, 5, 9, 250, 257, 1000)] == [1, 2, 4, 8, 16, 256, 384, 1024]
    assert list(BUCKETS) == sorted(set(BUCKETS))
    assert len(BUCKETS) < MOST  # one model's plain decodes never drive each other out


def test_ids_are_drawn_where_the_logits_are() -> None:
    """A launched step gives ids, those of the logits' maxima."""
    model = model_of(config_of())
    arena = arena_of(model, 2)
    logits = model.forward(batch_of([(Row(np.arange(5), [1]), 5)]), arena).copy()
    columns = DrawColumns(np.zeros(5), np.zeros(5, np.uint64), *(np.zeros(5, np.int32),) * 2, np.zeros(0, np.int32))
    launched = model.launch(batch_of([(Row(np.arange(5), [1]), 5)]), arena, columns)
    assert launched.wait().tolist() == logits.argmax(1).tolist()


def test_what_does_not_fit_is_refused() -> None:
    """More experts than a router has, by name, a foreign arena, and a copy that reads what it writes."""
    experts = config_of(experts=ExpertsConfig(2000, 2, 32), layers=(LayerConfig(experts=True), LayerConfig()))
    with pytest.raises(InvalidArgument, match=r"model\.experts\.count"):
        model_of(experts, tensors={"none": np.zeros(1)})
    model = model_of(config_of())
    with pytest.raises(Internal, match="does not fit"):
        model.forward(batch_of([(Row(np.arange(3), [1]), 3)]), arena_of(model, 2).half())
    outside = batch_of([(Row(np.arange(3), [3]), 3)])
    with pytest.raises(Internal, match="outside the arena"):
        model.forward(outside, arena_of(model, 2))
    with pytest.raises(Internal, match="writes a block that it reads"):
        columns = (np.array([1, 2], np.int32), np.array([2, 3], np.int32), np.array([1, 1], np.int32))
        model.copy_blocks(arena_of(model, 3), *columns)


def test_an_engine_gives_the_tokens_of_the_cpu_model(tmp_path: Path) -> None:
    """Prefill, chunks, decode, a shared prefix with copy-on-write and several samples: tokens as on the CPU."""
    folder = make_tiny_llama(tmp_path / "tiny", hidden=32, heads=2, kv_heads=1, intermediate=64, max_position=256)
    on_cpu = load_model(folder, "float32", 16)
    source = open_source(folder)
    on_device = DeviceModel(on_cpu.config, on_cpu.layout, on_cpu.digests, source.read, DEVICE)
    shared = np.random.default_rng(1).integers(3, 512, 21).tolist()
    tokens = []
    for model in (on_cpu, on_device):
        arena = np.full((41, *model.layout.block_shape), np.nan, np.float32)
        blocks = arena if model is on_cpu or DEVICE.type == "cpu" else torch.from_numpy(arena).to(DEVICE)
        node = Node(40, model=model, arena=blocks, chunk_tokens=16)
        node.submit(request(1, shared, max_tokens=4))
        node.finish(1)
        node.submit(request(2, [*shared[:19], 7, 8], max_tokens=3))  # parts inside a block
        node.submit(request(3, [*shared, 4], max_tokens=3, num_samples=2, temperature=1.0, seed=3))
        node.finish(2, 3)
        assert node.sink.cached[2] == 19
        node.assert_quiet()
        tokens.append(node.sink.tokens)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 4


def test_every_thread_launches_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever thread calls, the model's device is made its own first: the engine's is not the one that loaded."""
    model, used = model_of(config_of()), []
    monkeypatch.setattr(device_model, "use_device", used.append)
    arena, block = arena_of(model, 3), np.array([1], np.int32)
    zero = np.zeros(0, np.int32)
    model.forward(batch_of([(Row(np.arange(3), [1]), 3)]), arena)
    model.copy_blocks(arena, block, block + np.int32(1), block)
    model.scrub_blocks(arena, block)
    model.pack_adapter(({}, {}))
    columns = DrawColumns(np.zeros(3), np.zeros(3, np.uint64), *(np.zeros(3, np.int32),) * 2, zero)
    model.launch(batch_of([(Row(np.arange(3), [1]), 3)]), arena, columns)
    assert used == [DEVICE] * len(used) and len(used) >= 5
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cuda:1", "cuda", "cpu"):
        gpu.use_device(torch.device(name))
    assert chosen == [torch.device("cuda:1")]


@pytest.mark.parametrize("config", [config_of(max_position=16), config_of(max_position=40), experts_beside_norms()])
def test_warm_up_touches_no_arena(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling works on memory of its own; poisoned blocks stay what they are, scrubbed ones do not. Where a context
    may be longer than a block, the decode of a shared run is compiled too."""
    called: list[str] = []
    for module, name in ((shared_decode, "attend"), (lora, "shrink_kernel")):
        monkeypatch.setattr(module, name, Noted(getattr(module, name), name, called))
    model = model_of(config)
    arena = arena_of(model, 2)
    model.warm_up(arena)
    assert torch.isnan(arena).all()
    assert ("attend" in called) == (config.max_position > 16)
    assert "shrink_kernel" in called
    model.scrub_blocks(arena, np.array([1], np.int32))
    assert not arena[1].any()
    assert torch.isnan(arena[[0, 2]]).all()


class Noted:
    """A call, or a kernel, that notes its name when it is used."""

    def __init__(self, inner: Any, name: str, called: list[str]) -> None:
        self._inner, self._name, self._called = inner, name, called

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._called.append(self._name)
        return self._inner(*arguments, **options)

    def __getitem__(self, grid: Any) -> Any:
        self._called.append(self._name)
        return self._inner[grid]
