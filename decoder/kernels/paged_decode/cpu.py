"""The CPU form of `DecodePlan` and `attend`: the same calls, by the fused step's attention.

Sequences whose tables name the same blocks for whole spans of keys read them once (`attention_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import Internal
from decoder.batch import StepBatch
from decoder.kernels.one_layer import attend_rows, check_tables
from decoder.kernels.paged_arguments import check_paged


@dataclass(slots=True)
class DecodePlan:
    """What a decode needs to know of its batch; made by `allocate`, filled by `build`, read by `attend`."""

    kv_heads: int
    query_len: int
    max_batch: int
    window: int = 0
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def allocate(
        cls,
        *,
        max_batch: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        programs: int,
        tile: int,
        device: torch.device,
        query_len: int = 1,
    ) -> DecodePlan:
        """A plan for up to `max_batch` sequences; `programs`, `tile` and `device` are not used."""
        if heads % kv_heads or programs < 1 or query_len < 1:
            raise Internal(f"{heads} heads by {kv_heads} with {query_len} positions and {programs} programs: no plan")
        return cls(kv_heads, query_len, max_batch)

    def build(self, lengths: torch.Tensor, window: int = 0) -> None:
        """Plan for `lengths` int32 [batch] (context with the query positions; 0 for an empty place)."""
        if lengths.dtype != torch.int32 or not 0 < lengths.numel() <= self.max_batch or window < 0:
            raise Internal(f"no plan for {lengths.numel()} lengths of {lengths.dtype} with window {window}")
        self.lengths, self.window = lengths.numpy().astype(np.int64), window


def attend(
    queries: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    plan: DecodePlan,
    output: torch.Tensor,
    *,
    scale: float,
    scales: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    causal: bool = True,
    log_sums: torch.Tensor | None = None,
    config: object = None,
) -> None:
    """Attention of the last `plan.query_len` positions of each sequence, into `output`.

    queries and output [batch, query_len, heads, head_dim]; arena as in `common/layout.py`, with `scales` when
    quantised; tables int32 [batch, width]; lengths int32 [batch], those that `plan.build` got; a place of length 0
    gives zeros, and log sums of -inf. With `causal=False` every position sees the whole context. log_sums, if given,
    float32 [batch, query_len, heads], gets the base-2 logarithm of the sums of weights. Launch parameters (`config`)
    mean nothing here. Raises Internal on shapes or numbers that do not fit; nothing is written then.
    """
    check_paged(queries, arena, scales, tables, layer)
    batch, query_len, heads, head_dim = queries.shape
    fits = (batch, query_len, arena.shape[3]) == (plan.lengths.size, plan.query_len, plan.kv_heads)
    if not fits or (plan.window and not causal) or output.shape != queries.shape or soft_cap < 0:
        raise Internal(f"queries {tuple(queries.shape)} do not fit a plan of {plan.lengths.size} sequences")
    used = np.flatnonzero(plan.lengths)
    ends, rows = plan.lengths[used], tables.numpy()[used]
    if (ends < query_len).any():
        raise Internal("a context is shorter than its query positions")
    check_tables(rows, ends, arena)
    output.zero_()
    if log_sums is not None:
        log_sums.fill_(-torch.inf)
    if not used.size:
        return
    offsets = np.arange(query_len) - query_len if causal else np.full(query_len, -1)
    positions = (ends[:, None] + offsets).ravel()
    nothing = np.zeros(0, np.int32)
    edges = np.arange(used.size + 1) * query_len
    decodes = used.size if query_len == 1 else 0
    step = StepBatch(
        nothing, positions.astype(np.int32), edges.astype(np.int32), ends.astype(np.int32), rows, nothing, decodes
    )
    found = torch.empty((used.size * query_len, heads, head_dim))
    sums = torch.empty((used.size * query_len, heads))
    attend_rows(
        queries[used].reshape(-1, heads, head_dim), arena, scales, layer, step, found, sums,
        scale=scale, window=plan.window, soft_cap=soft_cap,
    )  # fmt: skip
    output[used] = found.reshape(-1, query_len, heads, head_dim).to(output.dtype)
    if log_sums is not None:
        log_sums[used] = sums.reshape(-1, query_len, heads)
