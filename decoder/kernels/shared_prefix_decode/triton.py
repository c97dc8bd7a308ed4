"""Decode with a shared prefix on a GPU: two paged decodes and the merge of their results."""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import kernel, power_of_two
from decoder.kernels.paged_decode import triton as paged_decode
from decoder.kernels.paged_decode.plan import MAX_ROWS, DecodePlan
from decoder.kernels.shared_prefix_decode.plan import SharedPlan


@kernel
def merge_kernel(
    output: tl.tensor,
    log_sums: tl.tensor,
    shared: tl.tensor,
    shared_sums: tl.tensor,
    rest: tl.tensor,
    rest_sums: tl.tensor,
    places: tl.tensor,
    output_stride: tl.tensor,
    output_position_stride: tl.tensor,
    HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOG_SUMS: tl.constexpr,
) -> tl.tensor:
    """One row (sequence, query position, head): both parts weighted by their sums; the rest alone without a place."""
    i_row = tl.program_id(0).to(tl.int64)
    head = i_row % HEADS
    i_query = i_row // HEADS % QUERY_LEN
    sequence = i_row // HEADS // QUERY_LEN
    place = tl.load(places + sequence).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < HEAD_DIM
    acc = tl.load(rest + i_row * HEAD_DIM + columns, mask=inside, other=0.0)
    total = tl.load(rest_sums + i_row)
    if place >= 0:
        other_row = (place * QUERY_LEN + i_query) * HEADS + head
        other_sum = tl.load(shared_sums + other_row)
        top = tl.maximum(total, other_sum)
        mine = tl.exp2(total - top)
        others = tl.exp2(other_sum - top)
        other = tl.load(shared + other_row * HEAD_DIM + columns, mask=inside, other=0.0)
        acc = (acc * mine + other * others) / (mine + others)
        total = top + tl.log2(mine + others)
    target = sequence * output_stride + i_query * output_position_stride + head * HEAD_DIM + columns
    tl.store(output + target, acc.to(output.dtype.element_ty), mask=inside)
    if LOG_SUMS:
        tl.store(log_sums + i_row, total)


@dataclass(frozen=True, slots=True)
class SharedWorkspace:
    """Plans of both decodes and their float32 results; made by `allocate` for the largest batch."""

    shared_plan: DecodePlan
    rest_plan: DecodePlan
    members: int

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
        dtype: torch.dtype,
        query_len: int = 1,
    ) -> SharedWorkspace:
        """Memory for up to `max_batch` sequences. A slot has as many sequences as fit a row block of the decode."""
        members = slot_members(heads // kv_heads * query_len, head_dim, dtype.itemsize)
        common = {
            "max_batch": max_batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "programs": programs,
            "tile": tile, "device": device,
        }  # fmt: skip
        return cls(
            DecodePlan.allocate(**common, query_len=members * query_len),
            DecodePlan.allocate(**common, query_len=query_len),
            members,
        )


def slot_members(rows_each: int, head_dim: int, itemsize: int) -> int:
    """Sequences of a slot when one has `rows_each` rows; raises Internal when not one fits."""
    columns = power_of_two(head_dim)
    rows = 32 if columns > 128 else min(MAX_ROWS, 32 * 128 // columns) if itemsize == 4 else MAX_ROWS
    if rows_each > rows:
        raise Internal(f"{rows_each} rows of one sequence do not fit a slot of {rows}")
    return rows // rows_each


def attend(
    queries: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    plan: SharedPlan,
    workspace: SharedWorkspace,
    output: torch.Tensor,
    *,
    scale: float,
    scales: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    log_sums: torch.Tensor | None = None,
) -> None:
    """Causal attention of the last positions of each sequence, as `paged_decode.attend` without a window.

    queries and output [batch, query_len, heads, head_dim]; arena and scales as there; log_sums float32 [batch,
    query_len, heads]. The workspace's plans are built by `prepare`, once a step. Raises Internal on shapes that do not
    fit.
    """
    batch, query_len, heads, head_dim = queries.shape
    if plan.places.shape != (batch,) or plan.members != workspace.members:
        raise Internal(f"queries {tuple(queries.shape)} do not fit a shared plan of {tuple(plan.places.shape)}")
    if output.shape != queries.shape or output.stride()[-2:] != (head_dim, 1):
        raise Internal(f"output {tuple(output.shape)} does not fit queries {tuple(queries.shape)}")
    float32 = {"dtype": torch.float32, "device": queries.device}
    rest = torch.empty((batch, query_len, heads, head_dim), **float32)  # type: ignore[call-overload]
    rest_sums = torch.empty((batch, query_len, heads), **float32)  # type: ignore[call-overload]
    common = {"scale": scale, "scales": scales, "soft_cap": soft_cap}
    paged_decode.attend(
        queries, arena, layer, plan.rest_tables, plan.rest_lengths, workspace.rest_plan, rest,
        log_sums=rest_sums, **common,
    )  # fmt: skip
    shared, shared_sums = rest, rest_sums
    if plan.num_slots:
        rows = plan.members * query_len
        gathered = queries.index_select(0, plan.slot_members).reshape(plan.num_slots, rows, heads, head_dim)
        shared = torch.empty(gathered.shape, **float32)  # type: ignore[call-overload]
        shared_sums = torch.empty(gathered.shape[:3], **float32)  # type: ignore[call-overload]
        paged_decode.attend(
            gathered, arena, layer, plan.slot_tables, plan.slot_lengths, workspace.shared_plan, shared,
            causal=False, log_sums=shared_sums, **common,
        )  # fmt: skip
    merge_kernel[(batch * query_len * heads,)](
        output, output if log_sums is None else log_sums, shared, shared_sums, rest, rest_sums, plan.places,
        output.stride(0), output.stride(1),
        HEADS=heads, QUERY_LEN=query_len, HEAD_DIM=head_dim, COLUMNS=power_of_two(head_dim),
        LOG_SUMS=log_sums is not None, num_warps=1,
    )  # fmt: skip


def prepare(plan: SharedPlan, workspace: SharedWorkspace) -> None:
    """Build the tile plans of both decodes, once a step, for all layers."""
    workspace.rest_plan.build(plan.rest_lengths)
    if plan.num_slots:
        workspace.shared_plan.build(plan.slot_lengths)
