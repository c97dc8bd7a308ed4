"""Small steps of every kind, on an arena that nobody else has, so that a device model's kernels are compiled at start.

Compiled are those of chunks, decodes, shared runs, draws, adapters, experts with few rows and with many, and operations
on blocks; large tiles of an adapter's rows are compiled when they first occur. Called by `device_model.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from decoder.batch import DrawColumns, StepBatch
from decoder.kernels.lora.plan import group_rows
from decoder.kernels.shared_prefix_decode.plan import Group, SlotLayout, lay_out
from decoder.models.device_arena import allocate
from decoder.weights.adapter import module_shapes

if TYPE_CHECKING:
    from decoder.models.device_model import DeviceModel


def warm_up(model: DeviceModel) -> None:
    """Run the steps."""
    layout, config = model.layout, model.config
    tokens = min(2 * layout.block_tokens, config.max_position, 64)
    own = allocate(layout, 2 * tokens, model.device)
    arena = model.view(own)
    tables = np.arange(1, 2 * tokens + 1, dtype=np.int32).reshape(2, tokens)
    ids, one = np.zeros(tokens, np.int32), np.ones(1, np.int32)

    def once(batch: StepBatch, shared: SlotLayout | None = None) -> None:
        inputs = model.upload(batch, arena, shared, group_rows(batch.adapters, batch.query_starts))
        model.step.run(inputs, arena)

    # Of the first layer alone: it is there for its kernels.
    zeros = {
        name: (np.zeros((1, inputs), np.float32), np.zeros((outputs, 1), np.float32))
        for name, (outputs, inputs) in module_shapes(config).items()
    }
    adapter = model.pack_adapter((zeros, *({} for _ in range(config.num_layers - 1))))
    if tokens > 1:
        chunk = np.arange(tokens - 1, dtype=np.int32)
        starts, lengths = np.array([0, 1, tokens], np.int32), np.array([1, tokens - 1], np.int32)
        positions = np.concatenate([chunk[:1], chunk])
        once(StepBatch(ids, positions, starts, lengths, tables, ids[:1], 1))
    for adapters in ((), (adapter,)):
        once(StepBatch(ids[:1], ids[:1], np.arange(2, dtype=np.int32), one, tables[:1], ids[:1], 1, adapters))
    if model.members and 1 < layout.block_tokens < config.max_position:
        tables[1, 0] = tables[0, 0]
        slots = lay_out([Group((0, 1), 1)], tables, block_tokens=layout.block_tokens, members=model.members)
        last = np.full(2, layout.block_tokens, np.int32)
        rows = np.arange(3, dtype=np.int32)
        once(StepBatch(ids[:2], last, rows, last + np.int32(1), tables, rows[:2], 2), slots)
    columns = DrawColumns(np.ones(1), np.zeros(1, np.uint64), ids[:1], ids[:1], ids[:0])
    logits = torch.zeros((1, config.vocab_size), device=model.device)
    model.drawn.draw(logits, model.drawn.upload(columns, 0)).wait()
    model.step.warm_up_experts()
    model.copy_blocks(own, one, 2 * one, one)
    model.scrub_blocks(own, one)
