"""The CPU form of `plan` and `attend` in `triton.py`: the same calls, by the fused step's attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import Internal
from decoder.batch import StepBatch
from decoder.kernels.one_layer import attend_rows, check_tables
from decoder.kernels.paged_arguments import check_paged


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The host's copies of query_starts int32 [batch + 1] and lengths int32 [batch]."""

    query_starts: NDArray[np.int32]
    lengths: NDArray[np.int32]


def plan(
    query_starts: NDArray[np.int32], lengths: NDArray[np.int32], group: int, rows: int, device: torch.device
) -> PrefillPlan:
    """The plan of a ragged batch. How rows are cut is the kernel's own: `group`, `rows` and `device` are not used."""
    chunks = np.diff(query_starts)
    if chunks.size != lengths.size or (chunks < 0).any() or (chunks > lengths).any():
        raise Internal("chunks of a prefill do not fit their contexts")
    return PrefillPlan(query_starts, lengths)


def attend(
    queries: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    lengths: torch.Tensor,
    row_plan: PrefillPlan,
    output: torch.Tensor,
    *,
    scale: float,
    scales: torch.Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    log_sums: torch.Tensor | None = None,
    config: object = None,
) -> None:
    """Causal attention of the rows of all chunks, into `output`. A chunk gives the same bits however it is cut.

    queries and output [tokens, heads, head_dim]; arena as in `common/layout.py`, with `scales` when quantised; tables
    int32 [batch, width]; query_starts int32 [batch + 1]; lengths int32 [batch], the context with the chunk. A row at
    position p sees p - window < keys <= p (window 0: all before it). log_sums, if given, float32 [tokens, heads], gets
    the base-2 logarithm of the sums of weights. Launch parameters (`config`) mean nothing here. Raises Internal on
    shapes or numbers that do not fit; nothing is written then.
    """
    check_paged(queries, arena, scales, tables, layer)
    starts, ends = row_plan.query_starts.astype(np.int64), row_plan.lengths.astype(np.int64)
    if window < 0 or soft_cap < 0 or output.shape != queries.shape or starts[-1] != queries.shape[0]:
        raise Internal(f"window {window}, soft cap {soft_cap} or output {tuple(output.shape)} does not fit")
    chunks = np.diff(starts)
    used = np.flatnonzero(chunks)
    if not used.size:
        return
    chunks, ends = chunks[used], ends[used]
    edges = np.concatenate([[0], np.cumsum(chunks)])
    positions = np.arange(edges[-1]) - np.repeat(edges[:-1] - ends + chunks, chunks)
    rows = tables.numpy()[used]
    check_tables(rows, ends, arena)
    nothing = np.zeros(0, np.int32)
    batch = StepBatch(
        nothing, positions.astype(np.int32), edges.astype(np.int32), ends.astype(np.int32), rows, nothing, 0
    )
    attend_rows(queries, arena, scales, layer, batch, output, log_sums, scale=scale, window=window, soft_cap=soft_cap)
