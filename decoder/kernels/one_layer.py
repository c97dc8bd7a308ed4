"""The CPU forms of the paged operations: frames of one layer for the step's own inner kernels, run by a few threads.

A call gathers nothing of the history: keys and values are read where they lie, through the block tables. Queries,
softmax and outputs are float32 inside, whatever the type of the tensors. Used by `<operation>/cpu.py`.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,call-arg,no-untyped-call"

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import Internal
from decoder.batch import StepBatch
from decoder.kernels import frame as f
from decoder.kernels import sets
from decoder.kernels.attention import attention, combine
from decoder.kernels.attention_plan import plan_attention
from decoder.kernels.compiled import cached_entries
from decoder.kernels.rows import rotate_and_write
from decoder.kernels.scratch import lay_out_attention, tokens_per_item
from decoder.kernels.step import source_fingerprint
from decoder.kernels.sync import CONTROL_WORDS

_LOG2_E: Final = 1.4426950408889634
_STORAGE: Final[dict[torch.dtype, sets.Storage]] = {
    torch.float32: sets.Float32Storage(),
    torch.bfloat16: sets.Bfloat16Storage(),
    torch.float16: sets.Float16Storage(),
    torch.int8: sets.Int8Storage(),
    torch.float8_e4m3fn: sets.Float8Storage(),
    torch.uint8: sets.Float8Storage(),
}


def _attend(kernels: Any, frame: Any, rank: int, merging: bool) -> None:
    scratch = frame[f.SCRATCH] + rank * frame[f.SCRATCH_BYTES]
    if merging:
        combine(kernels, frame, 0, rank, frame[f.COUNTERS] + f.COUNTER_BYTES, scratch)
    else:
        attention(kernels, frame, 0, frame[f.COUNTERS], scratch)


def _write(kernels: Any, frame: Any, rank: int) -> None:
    tokens = frame[f.TOKENS]
    for row in range(tokens * rank // frame[f.SIZE], tokens * (rank + 1) // frame[f.SIZE]):
        rotate_and_write(kernels, frame, 0, row)


for _function in (_attend, _write):
    _function.__qualname__ = f"{_function.__name__}_{source_fingerprint()}"
_attention_of, _write_of = cached_entries(_attend), cached_entries(_write)
_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def _on_threads(threads: int, work: Callable[[int], None]) -> None:
    """`work(rank)` of ranks 0 to threads - 1, rank 0 in the caller."""
    if threads > 1:
        with _lock:
            pool = _pools.setdefault(threads, ThreadPoolExecutor(threads - 1, f"tessera-kernel-{threads}"))
        others = [pool.submit(work, rank) for rank in range(1, threads)]
    else:
        others = []
    work(0)
    for other in others:
        other.result()


class OneLayer:
    """The frame of one call over one layer of an arena, and the memory that it points at. For one use.

    arena [blocks, layers, 2, kv_heads, block_tokens, head_dim] and scales as `check_paged` allows them; a block's parts
    lie as `common/layout.py` says. Queries and outputs are float32, or what other `kernels` have: bfloat16 with
    DotKernels.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        scales: torch.Tensor | None,
        layer: int,
        tables: torch.Tensor,
        heads: int,
        kernels: sets.Float32Kernels | sets.DotKernels | None = None,
    ) -> None:
        _, _, _, kv_heads, block_tokens, head_dim = arena.shape
        self.group, self.kv_heads, self.block_tokens, self.head_dim = (
            heads // kv_heads,
            kv_heads,
            block_tokens,
            head_dim,
        )
        self.kernels = kernels or sets.Float32Kernels(_STORAGE[arena.dtype])
        self.inputs = torch.bfloat16 if isinstance(self.kernels, sets.DotKernels) else torch.float32
        self.threads = torch.get_num_threads()
        self.frame = frame = np.zeros(f.FRAME_WORDS, np.int64)
        self._held: list[Any] = [arena, scales]
        strides = [stride * arena.itemsize for stride in arena.stride()]
        if not arena[0, 0].is_contiguous():
            raise Internal("the parts of a layer of a block are not contiguous")
        base = arena.data_ptr() + layer * strides[1]
        for index, value in (
            (f.ARENA, base), (f.BLOCK_BYTES, strides[0]), (f.LAYER_BYTES, strides[1]), (f.VALUE_OFFSET, strides[2]),
            (f.HEAD_BYTES, strides[3]), (f.ROW_BYTES, strides[4]), (f.BLOCK_TOKENS, block_tokens), (f.HEADS, heads),
            (f.KV_HEADS, kv_heads), (f.HEAD_DIM, head_dim), (f.SIZE, self.threads), (f.MIXED_COLUMNS, heads * head_dim),
            (f.QKV_COLUMNS, (heads + 2 * kv_heads) * head_dim),
        ):  # fmt: skip
            frame[index] = value
        if scales is not None:
            if scales.stride(0) * 2 != strides[0] or not scales[0, 0].is_contiguous():
                raise Internal("scales do not lie in their blocks")
            frame[f.SCALES] = scales.data_ptr() + layer * scales.stride(1) * 2 - base
        self.layer_row = self.hold(f.LAYERS, np.zeros(f.LAYER_WORDS, np.int64))
        self.counters = self.hold(f.COUNTERS, np.zeros(2 * f.COUNTER_BYTES // 8, np.int64))
        self.hold(f.CONTROL, np.zeros(CONTROL_WORDS, np.int32))
        self.point(f.TABLES, tables.contiguous())
        frame[f.TABLE_WIDTH] = tables.shape[1]

    def hold(self, index: int, array: NDArray[Any]) -> NDArray[Any]:
        """Keep an array and write its address into the frame."""
        self._held.append(array)
        self.frame[index] = array.ctypes.data
        return array

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a tensor alive whose address the frame or the layer's row holds."""
        self._held.append(tensor)
        return tensor

    def point(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a contiguous tensor and write its address into the frame."""
        self._held.append(tensor)
        self.frame[index] = tensor.data_ptr()
        return tensor

    def lay_out_queries(self, tokens: int) -> torch.Tensor:
        """Memory for `tokens` rows of queries by key head, `inputs` [kv_heads, tokens * group + 32, head_dim]."""
        queries = torch.zeros((self.kv_heads, tokens * self.group + 32, self.head_dim), dtype=self.inputs)
        self.frame[f.QUERY_PLANE_BYTES] = queries.stride(0) * queries.itemsize
        return self.point(f.QUERIES, queries)

    def write(self, batch_rows: int) -> None:
        """Run `rotate_and_write` on `batch_rows` rows of QKV."""
        self.frame[f.TOKENS] = batch_rows
        write = _write_of(self.kernels)
        _on_threads(self.threads, lambda rank: write(self.kernels, self.frame, rank))

    def lay_out(self, batch: StepBatch, scale: float, window: int, soft_cap: float) -> None:
        """Plan the attention of a batch whose queries are laid out; `attend` then computes it."""
        frame, group = self.frame, self.group
        # A score becomes an exponent of two; with a cap its scale and log2(e) are in the cap's two numbers.
        numbers = [1.0 if soft_cap else scale * _LOG2_E]
        if soft_cap:
            numbers += [2.0 * _LOG2_E * scale / soft_cap, soft_cap * _LOG2_E]
        self.hold(f.SCALE, np.array(numbers, np.float32))
        frame[f.SCORE_CAP] = frame[f.SCALE] + 4 if soft_cap else 0
        self.layer_row[f.LAYER_WINDOW] = window or f.NO_WINDOW
        plan = plan_attention(
            batch, group=group, kv_heads=self.kv_heads, threads=self.threads, block_tokens=self.block_tokens,
            tokens_per_item=tokens_per_item(group),
        )  # fmt: skip
        for index, array in (
            (f.POSITIONS, batch.positions), (f.CONTEXT_LENS, batch.context_lens), (f.TASKS, plan.tasks),
            (f.PART_STARTS, plan.part_starts), (f.PARTS, plan.parts), (f.MEMBERS, plan.members),
            (f.TABLES, batch.block_tables),
        ):  # fmt: skip
            self.hold(index, np.ascontiguousarray(array))
        frame[f.NUM_TASKS], frame[f.NUM_PARTIALS], frame[f.NUM_DECODES] = (
            len(plan.tasks),
            plan.num_slots,
            batch.num_decodes,
        )
        frame[f.TABLE_WIDTH] = batch.block_tables.shape[1]
        lay_out_attention(frame, group, self.head_dim, 0)
        self.hold(f.SCRATCH, np.zeros(self.threads * int(frame[f.SCRATCH_BYTES]), np.uint8))
        states = plan.num_slots * self.kv_heads * -(-group // 16)
        self.hold(f.PARTIALS, np.zeros(states * int(frame[f.STATE_BYTES]) + 64, np.uint8))

    def attend(self) -> None:
        """Attention of the batch that is laid out; rows go to MIXED. May be called again."""
        self.counters[:] = 0
        attend = _attention_of(self.kernels)
        _on_threads(self.threads, lambda rank: attend(self.kernels, self.frame, rank, False))
        if self.frame[f.NUM_PARTIALS]:
            _on_threads(self.threads, lambda rank: attend(self.kernels, self.frame, rank, True))


def check_tables(tables: NDArray[np.int32], lengths: NDArray[np.int64], arena: torch.Tensor) -> None:
    """Raise Internal where a context is longer than its table or a table names a block outside the arena."""
    if lengths.size and int(lengths.max()) > tables.shape[1] * arena.shape[4]:
        raise Internal("a context is longer than its block table")
    if tables.size and not 0 <= tables.min() <= tables.max() < arena.shape[0]:
        raise Internal("a block table names a block outside the arena")


def attend_rows(
    queries: torch.Tensor,
    arena: torch.Tensor,
    scales: torch.Tensor | None,
    layer: int,
    batch: StepBatch,
    output: torch.Tensor,
    log_sums: torch.Tensor | None,
    *,
    scale: float,
    window: int,
    soft_cap: float,
) -> None:
    """Attention of rows [tokens, heads, head_dim] of a batch, into `output` and `log_sums` [tokens, heads] if given."""
    tokens, heads, head_dim = queries.shape
    call = OneLayer(arena, scales, layer, torch.from_numpy(batch.block_tables), heads)
    planes = call.lay_out_queries(tokens)
    rows = queries.float().reshape(tokens, call.kv_heads, call.group, head_dim).transpose(0, 1)
    planes[:, : tokens * call.group] = rows.reshape(call.kv_heads, -1, head_dim)
    mixed = call.point(f.MIXED, torch.empty((tokens, heads, head_dim)))
    sums = call.point(f.LOG_SUMS, torch.empty((tokens, heads)))
    call.lay_out(batch, scale, window, soft_cap)
    call.attend()
    output.copy_(mixed)
    if log_sums is not None:
        log_sums.copy_(sums)
