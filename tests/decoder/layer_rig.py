"""Contexts over one layer of a poisoned arena, attended to with any kernel set (`one_layer.py`), beside the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decoder.batch import StepBatch
from decoder.kernels import frame as f
from decoder.kernels import sets
from decoder.kernels.one_layer import OneLayer
from tests.kernels import oracles
from tests.kernels.rig import LAYER, Paged, paged, random


@dataclass(frozen=True)
class Case:
    """The queries [tokens, heads, head_dim] of each context of `held`, and how they look at it."""

    held: Paged
    queries: list[torch.Tensor]
    kernels: sets.Float32Kernels | sets.DotKernels
    window: int = 0
    soft_cap: float = 0.0

    def attend(self, parts: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Outputs of one call for queries (first, last) of contexts; those of a single query come first."""
        parts = sorted(parts, key=lambda part: part[2] - part[1] > 1)
        counts = [last - first for _, first, last in parts]
        rows = torch.cat([self.queries[index][first:last] for index, first, last in parts])
        tokens, heads, head_dim = rows.shape
        tables = np.stack([self.held.tables[index].numpy() for index, _, _ in parts])
        call = OneLayer(self.held.arena, self.held.scales, LAYER, torch.from_numpy(tables), heads, self.kernels)
        planes = call.lay_out_queries(tokens)
        grouped = rows.reshape(tokens, call.kv_heads, call.group, head_dim).transpose(0, 1)
        planes[:, : tokens * call.group] = grouped.reshape(call.kv_heads, -1, head_dim)
        mixed = call.point(f.MIXED, torch.full((tokens, heads, head_dim), torch.nan, dtype=call.inputs))
        positions = np.concatenate([np.arange(first, last) for _, first, last in parts]).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lengths, nothing = np.array([last for _, _, last in parts], np.int32), np.zeros(0, np.int32)
        decodes = sum(count == 1 for count in counts)
        batch = StepBatch(nothing, positions, starts, lengths, tables, nothing, decodes)
        call.lay_out(batch, head_dim**-0.5, self.window, self.soft_cap)
        call.attend()
        return [mixed[low:high].clone() for low, high in itertools.pairwise(starts.tolist())]

    def expected(self, index: int, first: int = 0) -> torch.Tensor:
        """The oracle's outputs of the queries of a context, from the `first` on."""
        scale = self.queries[index].shape[-1] ** -0.5
        found, _ = oracles.attention(
            self.queries[index][first:],
            self.held.keys[index],
            self.held.values[index],
            scale,
            self.window,
            self.soft_cap,
        )
        return found


def layer_case(
    lengths: list[int], kernels: sets.Float32Kernels | sets.DotKernels, stored: torch.dtype, queries: torch.dtype, *,
    heads: int = 6, kv_heads: int = 2, head_dim: int = 64, block_tokens: int = 16, window: int = 0,
    soft_cap: float = 0.0, shared_blocks: int = 0,
) -> Case:  # fmt: skip
    """Contexts of these lengths in a poisoned arena, and a query for each of their tokens."""
    held = paged(
        lengths, kv_heads=kv_heads, head_dim=head_dim, block_tokens=block_tokens, dtype=stored,
        shared_blocks=shared_blocks,
    )  # fmt: skip
    rows = [random(length, heads, head_dim, seed=77 + index, dtype=queries) for index, length in enumerate(lengths)]
    return Case(held, rows, kernels, window, soft_cap)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def in_pieces(case: Case, index: int, sizes: Sequence[int]) -> torch.Tensor:
    """Outputs of a context computed in chunks of these sizes in turn."""
    pieces, first, length = [], 0, len(case.queries[index])
    for size in itertools.cycle(sizes):
        if first >= length:
            return torch.cat(pieces)
        pieces += case.attend([(index, first, min(first + size, length))])
        first += size
    raise AssertionError
