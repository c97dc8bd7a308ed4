"""A whole decode step of a small model for `bench/gpu.py`: recorded or not, with shared runs, adapters, experts, ahead.

Weights, keys and values are random; nothing is read from disk. Called by `gpu_work.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu_plan import Cell
from common.layout import KvDtype, KvLayout
from decoder.batch import DrawColumns, StepBatch
from decoder.models.config import ExpertsConfig, LayerConfig, ModelConfig, ModelDigests
from decoder.models.decode_graphs import DirectRecorder
from decoder.models.device_adapters import DeviceAdapter
from decoder.models.device_arena import DeviceArena, allocate
from decoder.models.device_model import DeviceModel
from decoder.models.device_results import Arrival
from decoder.models.device_sharing import SharingCosts
from decoder.models.rope import RopeConfig
from decoder.weights.adapter import module_shapes
from decoder.weights.loader import expected_shapes


def step_sizes(cell: Cell) -> dict[str, Any]:
    """The sizes of a cell's model and batch; `shared` tokens are the same for all sequences."""
    sizes = {"layers": 16, "batch": 8, "hidden": 2048, "inner": 5632, "vocab": 32000, "length": 1024, "shared": 0}
    return {**sizes, **cell.params}


def step_call(cell: Cell, device: torch.device, tables: NDArray[np.int32], num_blocks: int) -> Callable[[], object]:
    """One decode of every sequence of `tables` [batch, width], which name `num_blocks` blocks of 64 tokens."""
    sizes = step_sizes(cell)
    layers, batch, experts = sizes["layers"], sizes["batch"], cell.params.get("experts")
    config = ModelConfig(
        "llama", sizes["vocab"], layers, 16, 8, 128, sizes["hidden"], sizes["inner"], 1e-5, RopeConfig(1e4, 128),
        8192, (2,), None, False, experts=ExpertsConfig(*experts) if experts else None,
        layers=(LayerConfig(experts=experts is not None),) * layers,
    )  # fmt: skip
    layout = KvLayout.of(layers, 8, 128, 64, cell.params.get("stored", "bfloat16"))
    # The same run of random numbers over and over: what is timed is not their making.
    numbers = np.random.default_rng(0).standard_normal((1 << 20) + 7, np.float32) * np.float32(0.02)
    shapes = expected_shapes(config)
    model = DeviceModel(
        config, layout, ModelDigests(*[bytes(32)] * 3),
        lambda name: np.resize(numbers, shapes[name]), device,
        dtype=KvDtype.BFLOAT16, recorder=None if cell.params["recorded"] else DirectRecorder(),
        sharing=SharingCosts(0, 0, 2) if cell.params.get("together") else SharingCosts(min_sequences=1 << 20),
    )  # fmt: skip
    arena = model.view(allocate(layout, num_blocks, device))
    if arena.scales is None:
        arena.elements.normal_()
    else:
        arena.blocks.random_(0, 120)
        arena.scales.fill_(1 / 64)
    lengths = np.full(batch, sizes["length"], np.int32)
    rows = np.arange(batch + 1, dtype=np.int32)
    adapters = _adapters(model, cell.params.get("adapters", 0), cell.params.get("rank", 0))
    of_rows = tuple(adapters[row % len(adapters)] for row in range(batch)) if adapters else ()
    work = StepBatch(rows[:-1], lengths - np.int32(1), rows, lengths, tables, rows[:-1], batch, of_rows)
    late = cell.params.get("late")
    return (lambda: model.forward_decode(work, arena.blocks)) if late is None else _launches(model, work, arena, late)


def _launches(model: DeviceModel, work: StepBatch, arena: DeviceArena, late: bool) -> Callable[[], object]:
    """A step that draws its tokens and feeds them to the next; their ids are read at once, or one step `late`."""
    rows = len(work.token_ids)
    zeros = np.zeros(rows, np.int32)
    columns = [
        DrawColumns(np.zeros(rows), np.zeros(rows, np.uint64), zeros, zeros, sources)
        for sources in (zeros - np.int32(1), np.arange(rows, dtype=np.int32))
    ]
    under_way: deque[Arrival] = deque()
    fed = 0

    def step() -> None:
        nonlocal fed
        under_way.append(model.launch(work, arena.blocks, columns[fed]))
        fed = 1
        while len(under_way) > late:
            under_way.popleft().wait()

    return step


def _adapters(model: DeviceModel, count: int, rank: int) -> list[DeviceAdapter]:
    # Of all matrices of a layer.
    shapes, numbers = module_shapes(model.config), np.random.default_rng(0)

    def matrix(*shape: int) -> NDArray[np.float32]:
        return numbers.standard_normal(shape, np.float32) * np.float32(0.02)

    layer = {name: (matrix(rank, inputs), matrix(outputs, rank)) for name, (outputs, inputs) in shapes.items()}
    return [model.pack_adapter((layer,) * model.config.num_layers) for _ in range(count)]
