"""The flat tile plan of one decode step: which program attends to which run of tiles, and where partial results go.

Built on the device from the lengths alone, once a step and window size, so that a recorded graph stays valid as
sequences grow. Program p of P takes tiles [p*T/P, (p+1)*T/P) of the T tiles in the order (sequence, key head, tile).
`DecodePlan` owns its memory for the largest batch; `build` allocates nothing.
"""

# Types inside kernels are Triton's.
# mypy: disable-error-code="operator,arg-type,assignment,no-untyped-call,no-any-return,attr-defined"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from common.errors import Internal
from decoder.kernels.gpu import NO_WINDOW, kernel, power_of_two

MAX_ROWS = 128
_MIN_ROWS = 16  # the smallest matrix product of the hardware


@kernel
def tile_range(length: tl.tensor, query_len: tl.tensor, window: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """First tile that a query of the sequence sees, and one past the last."""
    first = tl.maximum(length - query_len - window + 1, 0) // TILE
    return first, (length + TILE - 1) // TILE


@kernel
def plan_kernel(
    lengths: tl.tensor,
    starts: tl.tensor,
    ranges: tl.tensor,
    batch: tl.tensor,
    query_len: tl.tensor,
    window: tl.tensor,
    programs: tl.tensor,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """One program per range: its first (sequence, key head, tile) and its count. Program 0 writes `starts` too."""
    program = tl.program_id(0)
    total = 0
    for base in range(0, batch, CHUNK):
        index = base + tl.arange(0, CHUNK)
        first, end = tile_range(tl.load(lengths + index, mask=index < batch, other=0), query_len, window, TILE)
        total += tl.sum(tl.where(index < batch, end - first, 0), 0)
    work = total.to(tl.int64) * KV_HEADS
    begin = (work * program // programs).to(tl.int32)
    count = (work * (program + 1) // programs).to(tl.int32) - begin
    before = 0
    sequence = 0
    sequence_start = 0
    for base in range(0, batch, CHUNK):
        index = base + tl.arange(0, CHUNK)
        first, end = tile_range(tl.load(lengths + index, mask=index < batch, other=0), query_len, window, TILE)
        tiles = tl.where(index < batch, end - first, 0)
        ends = before + tl.cumsum(tiles, 0)
        if program == 0:
            tl.store(starts + index + 1, ends, mask=index < batch)
        passed = (ends * KV_HEADS <= begin) & (index < batch)
        sequence += tl.sum(passed.to(tl.int32), 0)
        sequence_start = tl.maximum(sequence_start, tl.max(tl.where(passed, ends, 0), 0))
        before += tl.sum(tiles, 0)
    if program == 0:
        tl.store(starts, 0)
    inside = begin - sequence_start * KV_HEADS
    length = tl.load(lengths + sequence, mask=sequence < batch, other=1)
    first, end = tile_range(length, query_len, window, TILE)
    tiles = tl.maximum(end - first, 1)
    tl.store(ranges + program * 4, sequence)
    tl.store(ranges + program * 4 + 1, inside // tiles)
    tl.store(ranges + program * 4 + 2, inside % tiles)
    tl.store(ranges + program * 4 + 3, count)


@dataclass(slots=True)
class DecodePlan:
    """Memory and numbers of a step's plan; made by `allocate`, filled by `build`, read by `attend`.

    starts int32 [batch + 1]: tiles before each sequence, of one key head. ranges int32 [programs, 4]. partial float32
    [2 * programs, rows, columns] and statistics [2 * programs, rows, 2] hold (maximum, sum): slot 2p for a row block
    that began before program p, 2p + 1 for one that begins in it and goes on after it.
    """

    starts: torch.Tensor
    ranges: torch.Tensor
    partial: torch.Tensor
    statistics: torch.Tensor
    tile: int
    rows: int
    kv_heads: int
    query_len: int
    window: int = 0
    batch: int = 0

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
        """Memory for up to `max_batch` sequences. Raises Internal when a group's rows are more than MAX_ROWS."""
        rows = max(_MIN_ROWS, power_of_two(heads // kv_heads * query_len))
        if rows > MAX_ROWS or heads % kv_heads or programs < 1 or query_len < 1:
            raise Internal(f"{heads} heads by {kv_heads} with {query_len} positions and {programs} programs: no plan")
        columns = power_of_two(head_dim)
        return cls(
            starts=torch.zeros(max_batch + 1, dtype=torch.int32, device=device),
            ranges=torch.zeros((programs, 4), dtype=torch.int32, device=device),
            partial=torch.empty((2 * programs, rows, columns), dtype=torch.float32, device=device),
            statistics=torch.empty((2 * programs, rows, 2), dtype=torch.float32, device=device),
            tile=tile,
            rows=rows,
            kv_heads=kv_heads,
            query_len=query_len,
        )

    def build(self, lengths: torch.Tensor, window: int = 0) -> None:
        """Plan for `lengths` int32 [batch] (context with the query positions; 0 for an empty place)."""
        if lengths.dtype != torch.int32 or not 0 < lengths.numel() < self.starts.numel() or window < 0:
            raise Internal(f"no plan for {lengths.numel()} lengths of {lengths.dtype} with window {window}")
        self.batch, self.window = lengths.numel(), window
        programs = self.ranges.shape[0]
        plan_kernel[(programs,)](
            lengths, self.starts, self.ranges, self.batch, self.query_len, window or NO_WINDOW, programs,
            KV_HEADS=self.kv_heads, TILE=self.tile, CHUNK=min(256, max(16, power_of_two(self.batch))), num_warps=4,
        )  # fmt: skip
