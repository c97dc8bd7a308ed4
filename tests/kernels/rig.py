"""Poisoned paged memory for kernel tests: what nobody owns is NaN, tables are permuted and padded with 0."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from decoder.kernels.select import operation
from tests.kernels import oracles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_CPU = DEVICE.type == "cpu" and not INTERPRETED
"""Whether the CPU's forms of the operations are tested: where Triton's kernels cannot run."""
LAYER = 1
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}


@dataclass
class Paged:
    """An arena with contexts in it; `keys[i]` and `values[i]` [length, kv_heads, dim] are what it holds, as float32."""

    arena: torch.Tensor
    scales: torch.Tensor | None
    tables: torch.Tensor
    lengths: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def padded(rows: torch.Tensor, margin: int = 8) -> torch.Tensor:
    """The same rows inside poisoned memory: wider rows, of which a view is given."""
    memory = torch.full((rows.shape[0], rows.shape[1] + margin), torch.nan, dtype=rows.dtype, device=DEVICE)
    memory[:, : rows.shape[1]] = rows
    return memory[:, : rows.shape[1]]


def form(name: str) -> Any:
    """The module of an operation that is tested in this process."""
    return operation(name, DEVICE, interpreted=INTERPRETED)


def int32(values: object) -> torch.Tensor:
    """An int32 tensor on the tests' device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def empty_arena(
    num_blocks: int, kv_heads: int, block_tokens: int, head_dim: int, dtype: torch.dtype, layers: int = 2
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A poisoned arena; with scales inside the blocks when `dtype` is a storage type."""
    if dtype.is_floating_point and dtype.itemsize > 1:
        shape = (num_blocks + 1, layers, 2, kv_heads, block_tokens, head_dim)
        return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE), None
    from common.layout import KvLayout
    from decoder.kernels.quantized import views

    size = KvLayout.of(layers, kv_heads, head_dim, block_tokens, "int8").block_bytes
    storage = torch.full((num_blocks + 1, size), 0x7F, dtype=torch.uint8, device=DEVICE)
    arena, scales = views(storage, layers, kv_heads, head_dim, block_tokens, dtype)
    scales.fill_(torch.nan)
    return arena, scales


def paged(
    lengths: list[int],
    *,
    kv_heads: int,
    head_dim: int,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    shared_blocks: int = 0,
    seed: int = 0,
    values_scale: float = 1.0,
) -> Paged:
    """Contexts of these lengths on permuted blocks; the first `shared_blocks` blocks are the same for all."""
    counts = [-(-length // block_tokens) for length in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)) + 1
    arena, scales = empty_arena(num_blocks, kv_heads, block_tokens, head_dim, dtype)
    tables = torch.zeros((len(lengths), max(counts) + 2), dtype=torch.int32)
    used = shared_blocks
    tables[:, :shared_blocks] = order[:shared_blocks]
    keys, values = [], []
    first: list[
        torch.Tensor
    ] = []  # rows of the first context, before they are rounded: the shared ones are stored anew
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[i, shared_blocks:count] = order[used : used + count - shared_blocks]
        tables[i, count:] = 0
        used += max(0, count - shared_blocks)
        pair = []
        for plane in range(2):
            rows = random(length, kv_heads, head_dim, seed=seed * 1000 + i * 2 + plane)
            if plane:
                rows = rows * values_scale
            common = shared_blocks * block_tokens
            if i:
                rows[:common] = first[plane][:common]
            else:
                first.append(rows.clone())
            pair.append(store(arena, scales, tables[i], rows, plane))
        keys.append(pair[0])
        values.append(pair[1])
    return Paged(arena, scales, tables.to(DEVICE), int32(lengths), keys, values)


def store(
    arena: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor, rows: torch.Tensor, plane: int
) -> torch.Tensor:
    """Put rows [length, kv_heads, dim] into the pages of a table; returns what is held, as float32."""
    tokens = torch.arange(rows.shape[0])
    blocks, slots = table.cpu().long()[tokens // arena.shape[4]], tokens % arena.shape[4]
    if scales is None:
        arena[blocks, LAYER, plane, :, slots] = rows.to(arena.dtype)
        return rows.to(arena.dtype).float()
    stored, scale = oracles.quantize(rows, arena.dtype, keys=plane == 0)
    if arena.dtype == torch.int8:
        arena[blocks, LAYER, plane, :, slots] = stored
    else:
        arena.view(torch.uint8)[blocks, LAYER, plane, :, slots] = stored.view(torch.uint8)
    scales[blocks, LAYER, plane, :, slots] = scale
    return stored.float() * scale.float()[..., None]
