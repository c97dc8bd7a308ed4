"""The work behind `bench/gpu.py`: builds the calls of a cell on a device and has them timed.

A cell has several variants over disjoint memory, as many as the second-level cache must not hold, which one timed pass
runs through. The builders run on any device that the kernels run on, the interpreter included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import torch

from bench.gpu_plan import COPY_BYTES, HEAD_DIM, HEADS, KV_HEADS, Cell
from bench.gpu_step import step_call, step_sizes
from common.layout import KvLayout
from decoder.kernels.gpu import capability
from decoder.kernels.paged_decode import triton as paged_decode
from decoder.kernels.paged_decode.plan import DecodePlan
from decoder.kernels.paged_prefill import triton as paged_prefill
from decoder.kernels.quantized import views
from decoder.kernels.shared_prefix_decode import triton as shared_decode
from decoder.kernels.shared_prefix_decode.plan import SharedPlan, find_groups, lay_out

Call = Callable[[], object]
_SCALE: Final = HEAD_DIM**-0.5


class Timer(Protocol):
    """Times calls."""

    def microseconds(self, calls: list[Call], *, record: bool = True) -> float:
        """Time of one call, on the average over `calls`; with `record` inside a CUDA graph."""


class GraphTimer:
    """Medians over replays of a graph that runs through all variants, between two events."""

    def __init__(self, replays: int = 20) -> None:
        self._replays = replays

    def microseconds(self, calls: list[Call], *, record: bool = True) -> float:
        """See `Timer`."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.synchronize()
        run: Call = lambda: [call() for call in calls]  # noqa: E731
        if record:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        run()
        times = []
        for _ in range(self._replays):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            run()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) * 1e3)
        return statistics.median(times) / len(calls)


class KernelBench:
    """Builds and times cells on `device`; `rotated_bytes` is what the variants of a cell touch together at least."""

    def __init__(self, device: torch.device, timer: Timer, rotated_bytes: int = 512 << 20) -> None:
        self._device = device
        self._timer = timer
        self._rotated = rotated_bytes

    def measure(self, cell: Cell) -> float:
        """Microseconds of one call of a cell."""
        calls, record = self.calls(cell)
        try:
            return self._timer.microseconds(calls, record=record)
        finally:
            calls.clear()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def calls(self, cell: Cell) -> tuple[list[Call], bool]:
        """The variants of a cell, and whether they are to be recorded."""
        builders = {
            "copy": self._copy, "matmul": self._matmul, "decode": self._decode, "shared": self._shared,
            "prefill": self._prefill, "step": self._step,
        }  # fmt: skip
        return builders[cell.kind](cell), cell.kind != "step"

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device, dtype=torch.bfloat16)

    def _variants(self, num_bytes: int) -> int:
        return max(1, min(64, -(-self._rotated // max(1, num_bytes))))

    def _copy(self, cell: Cell) -> list[Call]:
        source = self._random(cell.params.get("bytes", COPY_BYTES) // 2)
        target = torch.empty_like(source)
        return [lambda: target.copy_(source)]

    def _matmul(self, cell: Cell) -> list[Call]:
        size = cell.params.get("size", 8192)
        first, second = self._random(size, size), self._random(size, size)
        return [lambda: first @ second]

    def _arena(self, num_blocks: int, tokens: int, stored: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (num_blocks + 1, 1, 2, KV_HEADS, tokens, HEAD_DIM)
        if stored == "bfloat16":
            return self._random(*shape), None
        size = KvLayout.of(1, KV_HEADS, HEAD_DIM, tokens, "int8").block_bytes
        storage = torch.randint(0, 120, (num_blocks + 1, size), dtype=torch.uint8, device=self._device)
        kind = getattr(torch, stored)
        if kind == torch.float8_e4m3fn and capability(self._device) < 89:
            kind = torch.uint8
        arena, scales = views(storage, 1, KV_HEADS, HEAD_DIM, tokens, kind)
        scales.fill_(1 / 64)
        return arena, scales

    def _tables(self, lengths: list[int], tokens: int, variants: int, shared: int = 0) -> tuple[np.ndarray, int]:
        # int32 [variants, batch, width] over scattered blocks; the first `shared` tokens of a variant are the same.
        common = shared // tokens
        counts = [-(-length // tokens) - common for length in lengths]
        each = sum(counts) + common
        order = np.random.default_rng(0).permutation(each * variants).astype(np.int32) + 1
        tables = np.zeros((variants, len(lengths), common + max(counts)), np.int32)
        for variant, blocks in enumerate(order.reshape(variants, each)):
            tables[variant, :, :common] = blocks[:common]
            used = common
            for row, count in enumerate(counts):
                tables[variant, row, common : common + count] = blocks[used : used + count]
                used += count
        return tables, each * variants

    def _plan(self, batch: int, config: paged_decode.DecodeConfig) -> DecodePlan:
        return DecodePlan.allocate(
            max_batch=batch, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, programs=self._programs(config),
            tile=config.tile, device=self._device,
        )  # fmt: skip

    def _programs(self, config: paged_decode.DecodeConfig) -> int:
        return self._processors() * config.programs

    def _processors(self) -> int:
        if self._device.type != "cuda":
            return 1
        return torch.cuda.get_device_properties(self._device).multi_processor_count

    def _decode(self, cell: Cell) -> list[Call]:
        lengths, tokens = cell.params["lengths"], cell.params["block_tokens"]
        config = paged_decode.DecodeConfig(*cell.params["config"])
        variants = self._variants(cell.bytes_moved)
        tables, num_blocks = self._tables(lengths, tokens, variants, cell.params.get("shared", 0))
        arena, scales = self._arena(num_blocks, tokens, cell.params["stored"])
        on_device = torch.from_numpy(np.array(lengths, np.int32)).to(self._device)
        plan = self._plan(len(lengths), config)
        plan.build(on_device)
        queries = self._random(len(lengths), 1, HEADS, HEAD_DIM)
        output = torch.empty_like(queries)
        return [
            lambda table=table: paged_decode.attend(  # type: ignore[misc]
                queries, arena, 0, table, on_device, plan, output, scale=_SCALE, scales=scales, config=config
            )
            for table in torch.from_numpy(tables).to(self._device)
        ]

    def _shared(self, cell: Cell) -> list[Call]:
        lengths, tokens = cell.params["lengths"], cell.params.get("block_tokens", 64)
        variants = self._variants(cell.bytes_moved)
        tables, num_blocks = self._tables(lengths, tokens, variants, cell.params["shared"])
        arena, _ = self._arena(num_blocks, tokens, "bfloat16")
        processors = self._processors()
        workspace = shared_decode.SharedWorkspace.allocate(
            max_batch=len(lengths), heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, multiprocessors=processors,
            device=self._device, dtype=torch.bfloat16,
        )  # fmt: skip
        contexts, members = np.array(lengths, np.int32), workspace.members
        on_device = torch.from_numpy(contexts).to(self._device)
        prepared = []
        for table in tables:
            groups = find_groups(table, contexts, block_tokens=tokens, members=members, min_sequences=2)
            slots = SharedPlan.of(lay_out(groups, table, block_tokens=tokens, members=members), self._device)
            where = torch.from_numpy(table).to(self._device)
            prepared.append((slots, shared_decode.prepare(slots, workspace, where, on_device, tokens)))
        queries = self._random(len(lengths), 1, HEADS, HEAD_DIM)
        output = torch.empty_like(queries)
        return [
            lambda plan=plan, rest=rest: shared_decode.attend(  # type: ignore[misc]
                queries, arena, 0, plan, rest, workspace, output, scale=_SCALE
            )
            for plan, rest in prepared
        ]

    def _prefill(self, cell: Cell) -> list[Call]:
        length, tokens = cell.params["length"], 64
        queries = self._random(length, HEADS, HEAD_DIM)
        if cell.params["pages"] == "torch":
            q = queries.transpose(0, 1)[None]
            k, v = (self._random(1, KV_HEADS, length, HEAD_DIM) for _ in range(2))
            attention = torch.nn.functional.scaled_dot_product_attention
            return [lambda: attention(q, k, v, is_causal=True, enable_gqa=True)]
        tables, num_blocks = self._tables([length], tokens, 1)
        table = np.sort(tables[0], axis=1) if cell.params["pages"] == "consecutive" else tables[0]
        arena, scales = self._arena(num_blocks, tokens, cell.params.get("stored", "bfloat16"))
        starts, lengths = np.array([0, length], np.int32), np.array([length], np.int32)
        chip = capability(self._device)
        rows = paged_prefill.choose_config(chip, HEAD_DIM, 2, quantized=scales is not None).rows
        plan = paged_prefill.plan(starts, lengths, HEADS // KV_HEADS, rows, self._device)
        output = torch.empty_like(queries)
        arguments = [torch.from_numpy(array).to(self._device) for array in (table, starts, lengths)]
        return [lambda: paged_prefill.attend(queries, arena, 0, *arguments, plan, output, scale=_SCALE, scales=scales)]

    def _step(self, cell: Cell) -> list[Call]:
        sizes = step_sizes(cell)
        tables, num_blocks = self._tables([sizes["length"]] * sizes["batch"], 64, 1, sizes["shared"])
        return [step_call(cell, self._device, tables[0], num_blocks)]
