"""Decode with a shared prefix on a GPU: two paged decodes and the merge of their results."""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import capability, kernel, power_of_two
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


class Rest(NamedTuple):
    """What a step has besides its shared runs: tables int32 [batch, width] and lengths int32 [batch]."""

    tables: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class SharedWorkspace:
    """Tile plans of both decodes; made by `allocate` for the largest batch."""

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
        multiprocessors: int,
        device: torch.device,
        dtype: torch.dtype,
        query_len: int = 1,
    ) -> SharedWorkspace:
        """Memory for up to `max_batch` sequences. A slot has as many sequences as fit a row block of the decode."""
        rows_each = heads // kv_heads * query_len
        members = slot_members(rows_each, head_dim, dtype.itemsize)

        def plan(positions: int) -> DecodePlan:
            rows = max(16, power_of_two(heads // kv_heads * positions))
            config = paged_decode.choose_config(capability(device), head_dim, dtype.itemsize, rows)
            return DecodePlan.allocate(
                max_batch=max_batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                programs=multiprocessors * config.programs, tile=config.tile, device=device, query_len=positions,
            )  # fmt: skip

        return cls(plan(members * query_len), plan(query_len), members)


def slot_members(rows_each: int, head_dim: int, itemsize: int) -> int:
    """Sequences of a slot when one has `rows_each` rows; raises Internal when not one fits."""
    columns = power_of_two(head_dim)
    rows = min(32, 32 * 128 // columns) if itemsize == 4 else 32 if columns > 128 else MAX_ROWS
    if rows_each > rows:
        raise Internal(f"{rows_each} rows of one sequence do not fit a slot of {rows}")
    return rows // rows_each


def prepare(
    plan: SharedPlan, workspace: SharedWorkspace, tables: torch.Tensor, lengths: torch.Tensor, block_tokens: int
) -> Rest:
    """Build the tile plans of both decodes, once a step, for all layers. The device alone computes, on fixed shapes.

    tables int32 [batch, width] and lengths int32 [batch] are those of the whole contexts. Raises Internal where they
    do not fit the plan.
    """
    if plan.places.shape != lengths.shape or plan.members != workspace.members or not plan.num_slots:
        raise Internal(f"a shared plan of {tuple(plan.slot_members.shape)} does not fit {tuple(lengths.shape)} lengths")
    columns = plan.shared_blocks[:, None] + torch.arange(tables.shape[1], dtype=torch.int32, device=tables.device)
    # What lies behind a table's end is never looked at.
    rest = Rest(
        tables.gather(1, columns.clamp_(max=tables.shape[1] - 1).long()),
        lengths - plan.shared_blocks * block_tokens,
    )
    workspace.rest_plan.build(rest.lengths)
    workspace.shared_plan.build(plan.slot_lengths)
    return rest


def attend(
    queries: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    plan: SharedPlan,
    rest: Rest,
    workspace: SharedWorkspace,
    output: torch.Tensor,
    *,
    scale: float,
    scales: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    log_sums: torch.Tensor | None = None,
) -> None:
    """Causal attention of the last positions of each sequence, as `paged_decode.attend` without a window.

    queries and output [batch, query_len, heads, head_dim]; arena and scales as there; `rest` is what `prepare` gave in
    this step; log_sums float32 [batch, query_len, heads]. Raises Internal on shapes that do not fit.
    """
    batch, query_len, heads, head_dim = queries.shape
    if plan.places.shape != (batch,):
        raise Internal(f"queries {tuple(queries.shape)} do not fit a shared plan of {tuple(plan.places.shape)}")
    if output.shape != queries.shape or output.stride()[-2:] != (head_dim, 1):
        raise Internal(f"output {tuple(output.shape)} does not fit queries {tuple(queries.shape)}")
    common = {"scale": scale, "scales": scales, "soft_cap": soft_cap}
    own, own_sums = _parts(queries)
    paged_decode.attend(
        queries, arena, layer, rest.tables, rest.lengths, workspace.rest_plan, own, log_sums=own_sums, **common
    )
    rows = plan.members * query_len
    gathered = queries.index_select(0, plan.slot_members.flatten()).reshape(plan.num_slots, rows, heads, head_dim)
    shared, shared_sums = _parts(gathered)
    paged_decode.attend(
        gathered, arena, layer, plan.slot_tables, plan.slot_lengths, workspace.shared_plan, shared,
        causal=False, log_sums=shared_sums, **common,
    )  # fmt: skip
    merge_kernel[(batch * query_len * heads,)](
        output, output if log_sums is None else log_sums, shared, shared_sums, own, own_sums, plan.places,
        output.stride(0), output.stride(1),
        HEADS=heads, QUERY_LEN=query_len, HEAD_DIM=head_dim, COLUMNS=power_of_two(head_dim),
        LOG_SUMS=log_sums is not None, num_warps=1,
    )  # fmt: skip


def _parts(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 memory for the result of a decode and for the logarithms of its sums."""
    return (
        torch.empty(queries.shape, dtype=torch.float32, device=queries.device),
        torch.empty(queries.shape[:3], dtype=torch.float32, device=queries.device),
    )
