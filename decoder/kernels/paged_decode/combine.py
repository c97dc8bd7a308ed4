"""The merge of the parts of a decode's rows, by log-sum-exp, in the order of the programs that left them.

Called by `attend` after the attention kernel. A row that one program had as a whole is left alone; the rows of an empty
place become zeros. Slots that nobody wrote are never read.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return"

from __future__ import annotations

import triton.language as tl

from decoder.kernels.gpu import kernel


@kernel
def combine_kernel(
    output: tl.tensor,
    log_sums: tl.tensor,
    starts: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    batch: tl.tensor,
    programs: tl.tensor,
    output_stride: tl.tensor,
    output_position_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOG_SUMS: tl.constexpr,
) -> tl.tensor:
    """One row (sequence, query position, head): merge its parts in the order of programs; nothing if it has one."""
    i_row = tl.program_id(0)
    head = i_row % (KV_HEADS * GROUP)
    i_query = i_row // (KV_HEADS * GROUP) % QUERY_LEN
    sequence = i_row // (KV_HEADS * GROUP) // QUERY_LEN
    kv_head = head // GROUP
    row = i_query * GROUP + head % GROUP
    start = tl.load(starts + sequence)
    tiles = tl.load(starts + sequence + 1) - start
    work = tl.load(starts + batch).to(tl.int64) * KV_HEADS
    at = start.to(tl.int64) * KV_HEADS + kv_head * tiles  # the row block's first tile in the list
    # Program p begins at floor(p * work / programs), so tile t is program ceil((t + 1) * programs / work) - 1's.
    safe = tl.maximum(work, 1)
    first = (((at + 1) * programs + safe - 1) // safe - 1).to(tl.int32)
    last = (((at + tiles) * programs + safe - 1) // safe - 1).to(tl.int32)
    columns = tl.arange(0, COLUMNS)
    place = sequence.to(tl.int64) * output_stride + i_query * output_position_stride + head * HEAD_DIM + columns
    if tiles == 0:
        tl.store(output + place, tl.zeros([COLUMNS], tl.float32).to(output.dtype.element_ty), mask=columns < HEAD_DIM)
        if LOG_SUMS:
            tl.store(log_sums + i_row, float("-inf"))
    elif first != last:
        # With fewer tiles than programs, one between the first and the last may have none: its slots hold nothing.
        top = float("-inf")
        for program in range(first, last + 1):
            wide = safe * 0 + program
            filled = (wide + 1) * work // programs > wide * work // programs
            slot = (wide * 2 + (wide == first).to(tl.int64)) * ROWS + row
            top = tl.maximum(top, tl.load(statistics + slot * 2, mask=filled, other=float("-inf")))
        base = tl.where(top == float("-inf"), 0.0, top)
        total = 0.0
        acc = tl.zeros([COLUMNS], tl.float32)
        for program in range(first, last + 1):
            wide = safe * 0 + program
            filled = (wide + 1) * work // programs > wide * work // programs
            slot = (wide * 2 + (wide == first).to(tl.int64)) * ROWS + row
            weight = tl.exp2(tl.load(statistics + slot * 2, mask=filled, other=float("-inf")) - base)
            total += weight * tl.load(statistics + slot * 2 + 1, mask=filled, other=0.0)
            present = columns < tl.where(filled, HEAD_DIM, 0)
            acc += weight * tl.load(partial + slot * COLUMNS + columns, mask=present, other=0.0)
        acc = acc / tl.where(total > 0, total, 1.0)
        tl.store(output + place, acc.to(output.dtype.element_ty), mask=columns < HEAD_DIM)
        if LOG_SUMS:
            tl.store(log_sums + i_row, top + tl.log2(total))
