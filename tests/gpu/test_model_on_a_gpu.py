"""The device model as it is recorded: graphs equal steps launched anew, results come back on their own stream."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device; torch finds none", allow_module_level=True)

from bench.gpu_plan import Cell, cells
from common.layout import KvDtype, KvLayout
from decoder.batch import DrawColumns, StepBatch
from decoder.models.config import ExpertsConfig, LayerConfig, ModelConfig, digest_config
from decoder.models.decode_graphs import MOST, DirectRecorder, Recorder
from decoder.models.device_arena import allocate
from decoder.models.device_model import DeviceModel
from decoder.models.device_sharing import DEFAULT_COSTS, SharingCosts
from decoder.models.rope import RopeConfig
from decoder.weights.adapter import module_shapes
from decoder.weights.loader import expected_shapes
from tests.decoder.rig import Node, request

DEVICE = torch.device("cuda")


def model_of(
    recorder: Recorder | None = None,
    kv_dtype: str = "bfloat16",
    sharing: SharingCosts = DEFAULT_COSTS,
    experts: ExpertsConfig | None = None,
    most: int = MOST,
) -> DeviceModel:
    """Two layers of 8 heads by 2, 64 elements, bfloat16 weights."""
    config = ModelConfig(
        "llama", 1000, 2, 8, 2, 64, 256, 512, 1e-5, RopeConfig(1e4, 64), 512, (2,), None, False, experts=experts,
        layers=(LayerConfig(experts=experts is not None),) * 2,
    )  # fmt: skip
    layout = KvLayout.of(2, 2, 64, 16, kv_dtype)
    shapes, numbers = expected_shapes(config), torch.Generator().manual_seed(0)
    return DeviceModel(
        config, layout, digest_config(config, bytes(32), "bfloat16/gpu"),
        lambda name: (torch.randn(shapes[name], generator=numbers) * 0.1).numpy(), DEVICE,
        dtype=KvDtype.BFLOAT16, recorder=recorder, sharing=sharing, most_shapes=most,
    )  # fmt: skip


def arena_of(model: DeviceModel, num_blocks: int) -> torch.Tensor:
    """Blocks full of numbers, the scales of quantised ones 1/64."""
    arena = model.view(allocate(model.layout, num_blocks, DEVICE))
    if arena.scales is None:
        arena.elements.normal_()
    else:
        arena.blocks.random_(0, 120)
        arena.scales.fill_(1 / 64)
    return arena.blocks


def decodes(lengths: list[int], seed: int, shared: int = 0) -> StepBatch:
    """One token of each sequence; the first `shared` blocks are the same, no other is."""
    count, width = len(lengths), 32
    tokens = np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)
    contexts = np.array(lengths, np.int32)
    starts = np.arange(count + 1, dtype=np.int32)
    tables = np.arange(1, count * width + 1, dtype=np.int32).reshape(count, width)
    tables[:, :shared] = tables[0, :shared]
    return StepBatch(tokens, contexts - np.int32(1), starts, contexts, tables, starts[:-1], count)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "int8", "fp8_e4m3"])
def test_recorded_steps_equal_steps_launched_anew(kv_dtype: str) -> None:
    """Batches of one to nine, twice over, in one arena: bit for bit, whatever holds keys and values."""
    recorded, direct = model_of(kv_dtype=kv_dtype), model_of(DirectRecorder(), kv_dtype)
    arena = arena_of(recorded, 9 * 32)
    for seed in range(2):
        for count in (1, 2, 3, 5, 9):
            batch = decodes([40 * (i + 1) + seed for i in range(count)], seed)
            got = recorded.forward(batch, arena).copy()
            want = direct.forward(batch, arena).copy()
            assert np.isfinite(got).all()
            assert np.array_equal(got, want)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_shared_runs_are_read_once_in_a_graph(kv_dtype: str) -> None:
    """Ten decodes over one span: the bits of the same step launched anew, and within rounding the logits of decodes
    apart; a later batch of the same shape is replayed."""
    free, never = SharingCosts(0, 0, 3), SharingCosts(min_sequences=1 << 20)
    recorded, direct = model_of(kv_dtype=kv_dtype, sharing=free), model_of(DirectRecorder(), kv_dtype, free)
    apart = model_of(kv_dtype=kv_dtype, sharing=never)
    arena = arena_of(recorded, 10 * 32)
    for seed in range(2):
        batch = decodes([257 + 11 * i + seed for i in range(10)], seed, 16)
        got, again, want = (model.forward(batch, arena).copy() for model in (recorded, direct, apart))
        assert np.isfinite(got).all()
        assert np.array_equal(got, again)
        assert np.abs(got - want).max() < 0.03 * np.abs(want).max()


def test_adapters_in_a_graph() -> None:
    """Rows with two adapters and without: the bits of steps launched anew, also where a replay meets other adapters;
    rows without one are as they were."""
    recorded, direct = model_of(), model_of(DirectRecorder())
    numbers, shapes = np.random.default_rng(0), module_shapes(recorded.config)

    def layers(rank: int) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], ...]:
        def matrix(*shape: int) -> np.ndarray:
            return numbers.standard_normal(shape, np.float32) * np.float32(0.1)

        return tuple({name: (matrix(rank, i), matrix(o, rank)) for name, (o, i) in shapes.items()} for _ in range(2))

    pairs = [[model.pack_adapter(it) for model in (recorded, direct)] for it in (layers(4), layers(20))]
    arena = arena_of(recorded, 5 * 32)
    batch = decodes([50, 60, 70, 80, 90], 1)
    base = recorded.forward(batch, arena).copy()
    for order in ((0, None, 1, 0, None), (1, None, 0, 0, None)):
        results = []
        for index, model in enumerate((recorded, direct)):
            adapters = tuple(None if it is None else pairs[it][index] for it in order)
            results.append(model.forward(replace(batch, adapters=adapters), arena).copy())
        assert np.array_equal(*results)
        changed = np.abs(results[0] - base).max(1) > 0.05 * np.abs(base).max()
        assert changed.tolist() == [it is not None for it in order]


@pytest.mark.parametrize("shared", [0, 96])
def test_experts_in_a_graph(shared: int) -> None:
    """Five and nine decodes, which leave places of their buckets empty: the bits of steps launched anew; and a chunk
    gives the logits of its decodes within rounding."""
    recorded, direct = (model_of(it, experts=ExpertsConfig(8, 2, 128, True, shared)) for it in (None, DirectRecorder()))
    arena = arena_of(recorded, 9 * 32)
    for seed in range(2):
        for count in (5, 9):
            batch = decodes([40 * (i + 1) + seed for i in range(count)], seed)
            got, want = (model.forward(batch, arena).copy() for model in (recorded, direct))
            assert np.isfinite(got).all()
            assert np.array_equal(got, want)
    rows = np.arange(40, dtype=np.int32)
    table, zero = np.arange(1, 33, dtype=np.int32)[None], np.zeros(1, np.int32)
    chunk = StepBatch(rows, rows, np.array([0, 40], np.int32), zero + 40, table, rows[-1:], 0)
    whole = recorded.forward(chunk, allocate(recorded.layout, 32, DEVICE)).copy()
    again = allocate(recorded.layout, 32, DEVICE)
    for at in range(40):
        one = StepBatch(rows[at : at + 1], zero + at, np.array([0, 1], np.int32), zero + at + 1, table, zero, 1)
        last = recorded.forward(one, again).copy()
    assert np.abs(whole - last).max() < 0.1 * np.abs(whole).max()


def test_a_step_can_be_started_while_the_one_before_is_read() -> None:
    """Two steps are queued before either is waited for; both results are those of steps taken one by one."""
    model = model_of()
    arena = arena_of(model, 4 * 32)
    batches = [decodes([50, 60, 70, 80], seed) for seed in range(4)]
    one_by_one = [model.forward(batch, arena).copy() for batch in batches]
    pending = [model.start(batch, arena) for batch in batches]
    for got, want in zip(pending, one_by_one, strict=True):
        assert np.array_equal(got.wait(), want)


def columns(rows: int, sources: list[int]) -> DrawColumns:
    """Greedy draws."""
    zeros = np.zeros(rows, np.int32)
    return DrawColumns(np.zeros(rows), np.zeros(rows, np.uint64), zeros, zeros, np.array(sources, np.int32))


def test_ids_come_back_alone() -> None:
    """Greedy ids drawn on the device are the maxima of the logits."""
    model = model_of()
    arena = arena_of(model, 3 * 32)
    batch = decodes([50, 60, 70], 1)
    logits = model.forward(batch, arena).copy()
    assert model.launch(batch, arena, columns(3, [-1] * 3)).wait().tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("read_at_once", [True, False])
def test_steps_are_fed_by_the_ones_before(read_at_once: bool) -> None:
    """Twenty recorded steps, each fed on the device, read one by one or all at the end: the greedy ids of steps whose
    inputs the host had."""
    model, count, steps = model_of(), 4, 20
    first = decodes([50, 60, 70, 80], 3)
    arenas = [arena_of(model, count * 32) for _ in range(2)]
    arenas[1].copy_(arenas[0])
    at = [
        replace(first, positions=first.positions + np.int32(i), context_lens=first.context_lens + np.int32(i))
        for i in range(steps)
    ]
    want, tokens = [], first.token_ids
    for batch in at:
        tokens = model.forward(replace(batch, token_ids=tokens), arenas[0]).argmax(1).astype(np.int32)
        want.append(tokens.tolist())
    got, arrivals = [], []
    for step, batch in enumerate(at):
        known = batch if not step else replace(batch, token_ids=np.zeros(count, np.int32))
        # Rows change places from step to step in an engine; here each stays where it is.
        arrivals.append(model.launch(known, arenas[1], columns(count, list(range(count)) if step else [-1] * count)))
        if read_at_once and step:
            got.append(arrivals[-2].wait().tolist())  # while the newest step runs
    assert (got or [it.wait().tolist() for it in arrivals[:-1]]) == want[:-1]
    assert arrivals[-1].wait().tolist() == want[-1]
    model.quiesce()
    assert torch.equal(*arenas)


class StepByStep:
    """A model without launches: an engine over it has nothing under way between two steps."""

    def __init__(self, model: DeviceModel) -> None:
        self.config, self.layout = model.config, model.layout
        self.forward, self.copy_blocks = model.forward, model.copy_blocks


def test_an_engine_one_step_ahead_says_what_one_step_by_step_says() -> None:
    """Twelve prompts of which some share a beginning, the same batches in both: the same greedy tokens, to the bit."""
    model, told = model_of(), []
    shared = np.random.default_rng(7).integers(3, 1000, 40).tolist()
    prompts = [shared + np.random.default_rng(n).integers(3, 1000, 3 + n).tolist() for n in range(12)]
    for each in (model, StepByStep(model)):
        node = Node(400, model=each, arena=allocate(model.layout, 400, DEVICE), chunk_tokens=64, window_tokens=1000)
        for number, prompt in enumerate(prompts):
            node.submit(request(number, prompt, max_tokens=40, no_read=True))
        node.finish(*range(12))
        assert not node.sink.failed
        node.assert_quiet()
        told.append(node.sink.tokens)
    assert told[0] == told[1]


def test_recordings_that_go_free_their_memory() -> None:
    """With room for two shapes a third drives the oldest out while steps are under way; results stay right, and a
    hundred changes of shape take no more memory than a few."""
    recorded, direct = model_of(most=2), model_of(DirectRecorder())
    arena = arena_of(recorded, 9 * 32)
    batches = [decodes([40 * (i + 1) for i in range(count)], count) for count in (1, 2, 3, 9)]
    want = [direct.forward(batch, arena).copy() for batch in batches]
    used = []
    for _ in range(25):
        pending = [recorded.start(batch, arena) for batch in batches]
        assert all(np.array_equal(got.wait(), right) for got, right in zip(pending, want, strict=True))
        used.append(torch.cuda.memory_allocated())
    assert max(used[5:]) <= max(used[:5])


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_a_chunk_over_quantised_blocks_equals_its_decodes(kv_dtype: str) -> None:
    """Five tokens at once and one by one after the same prompt, on poisoned blocks: the same logits within rounding."""
    model = model_of(kv_dtype=kv_dtype)
    ids = np.random.default_rng(3).integers(0, 1000, 45).astype(np.int32)
    table = np.arange(1, 33, dtype=np.int32)[None]

    def chunk(first: int, last: int) -> StepBatch:
        count = last - first
        positions, zero = np.arange(first, last, dtype=np.int32), np.zeros(1, np.int32)
        starts, context = np.array([0, count], np.int32), np.array([last], np.int32)
        return StepBatch(ids[first:last], positions, starts, context, table, zero + count - 1, int(count == 1))

    logits = []
    for steps in ([(0, 40), (40, 45)], [(0, 40), *((at, at + 1) for at in range(40, 45))]):
        arena = allocate(model.layout, 32, DEVICE)
        arena.fill_(0xFF)
        logits.append([model.forward(chunk(*step), arena).copy() for step in steps][-1])
    assert np.isfinite(logits[0]).all()
    assert np.abs(logits[0] - logits[1]).max() < 0.05 * np.abs(logits[0]).max()


def test_the_benchmark_measures_a_cell() -> None:
    """The smallest decode of `bench.gpu` has a time."""
    from bench.gpu_work import GraphTimer, KernelBench

    cell: Cell = next(cell for cell in cells() if cell.section == "decode")
    assert KernelBench(DEVICE, GraphTimer(replays=3)).measure(cell) > 0
