"""The Llama family on a CPU: weights in kernel layout and one forward over a ragged paged batch.

Called by `decoder/runner.py` once a step. It owns its weights, scratch memory and step threads, and no block: keys
and values live in the arena it is handed, and it writes only the slots of the batch's query tokens.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import Internal
from common.layout import KvDtype, KvLayout
from decoder.batch import StepBatch
from decoder.grouped_arena import GroupedArena, parts_of, usable_blocks
from decoder.kernels import blocks, step, sync
from decoder.kernels import frame as f
from decoder.models.adapter_weights import AdapterWeights, Layer
from decoder.models.checks import check_batch, check_window_blocks
from decoder.models.config import ModelConfig, ModelDigests, refuse
from decoder.models.kernel_choice import choose_kernels
from decoder.models.matrices import GroupedMatrices, Read
from decoder.models.packing import FloatArray, Memory
from decoder.models.weights import MakeMemory, PackedWeights
from decoder.models.workspace import Workspace

IntArray = NDArray[np.int32]
Arena = NDArray[Any]


def refuse_unserved(config: ModelConfig) -> None:
    """Raise InvalidArgument naming the first setting that the step does not compute."""
    if config.experts is not None and config.post_norms:
        raise refuse("experts", config.experts.count, "experts in models without norms after each half of a layer")


class CausalLM:
    """A loaded model. Not safe for concurrent calls: one step at a time.

    `read` gives a tensor by its Hugging Face name. `kernels` is "auto" (the fastest the CPU has) or "portable". `dtype`
    is the type of the weights, by default that of keys and values. Beside bfloat16 weights, bfloat16 keys and values
    mean that queries, attention and the inputs of products are rounded to bfloat16 too. With any other type they are
    not: they are float32, or with AMX, whose products take bfloat16 alone, sums of two bfloat16. `make_memory`
    gives the memory that the weights lie in. With `groups` matrices are whole numbers in groups, and `dtype` counts for
    nothing: all else is float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: KvLayout,
        digests: ModelDigests,
        read: Read,
        threads: int = 0,
        report: Callable[[float], None] = lambda done: None,
        kernels: str = "auto",
        dtype: KvDtype | None = None,
        make_memory: MakeMemory = Memory,
        groups: GroupedMatrices | None = None,
    ) -> None:
        refuse_unserved(config)
        self.config = config
        self.layout = layout
        self.digests = digests
        self.threads = threads or len(os.sched_getaffinity(0))
        self._bfloat16 = (dtype or layout.dtype) is KvDtype.BFLOAT16
        self._grouped = groups is not None
        self._kernels = choose_kernels(
            layout.kv_dtype, bfloat16=self._bfloat16, grouped=self._grouped, head_dim=config.head_dim, kernels=kernels
        )
        self._frame: NDArray[np.int64] = np.zeros(f.FRAME_WORDS, np.int64)
        self._weights = PackedWeights(config, read, self._bfloat16, report, make_memory, groups)
        frame = self._frame
        frame[f.LAYERS] = self._weights.rows.ctypes.data
        frame[f.EMBEDDING] = self._weights.embedding.address
        frame[f.HEAD] = self._weights.head.address
        frame[f.FINAL_NORM] = self._weights.final_norm.ctypes.data
        frame[f.EXPERT_UP_BYTES], frame[f.EXPERT_DOWN_BYTES] = self._weights.expert_bytes
        self._workspace = Workspace(config, layout, self._frame, self.threads, self._kernels)
        self._team: sync.Team | None = None
        self._run: Callable[[int], None]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads: all matrices, without the embedding table."""
        return self._weights.read_bytes

    def forward(self, batch: StepBatch, arena: Arena) -> FloatArray:
        """Run one step; returns float32 logits [R, vocab], valid until the next call.

        Raises Internal when the batch does not fit the model or the arena; nothing is written then.
        """
        self._check(batch, arena)
        if self._team is None:
            self._run = functools.partial(step.compile_for(self._kernels), self._kernels, self._frame)
            self._team = sync.Team(self.threads)
            self._frame[f.CONTROL] = self._team.control
            self._team.start(self._run)
            # The workers hold no reference to the model, so that dropping it ends them.
            weakref.finalize(self, self._team.close)
        logits = self._workspace.prepare(batch, arena)
        if batch.token_ids.size:
            self._run(0)
        return logits

    def pack_adapter(self, layers: tuple[Layer, ...]) -> AdapterWeights:
        """A LoRA adapter of this model in the form that a batch's `adapters` hold. It may be called from any thread."""
        return AdapterWeights(self.config, layers)

    def close(self) -> None:
        """End the step threads. The model can be used again; the threads then start anew."""
        if self._team is not None:
            self._team.close()
            self._team = None

    def warm_up(self, arena: Arena) -> None:
        """Compile (or load from numba's cache) all kernels and start the threads; touches the null block alone."""
        tokens = min(2 * self.layout.block_tokens, self.config.max_position, 64)
        ids = np.zeros(tokens, np.int32)
        tables = np.zeros((2, tokens), np.int32)
        memories = [memory for memory, _ in parts_of(arena, self.layout)]
        saved = [memory[0].copy() for memory in memories]
        positions = np.concatenate([np.zeros(1, np.int32), np.arange(tokens - 1, dtype=np.int32)])
        starts = np.array([0, 1, tokens], np.int32)
        lengths = np.array([1, max(1, tokens - 1)], np.int32)
        rows = np.array([0], np.int32)
        self.forward(StepBatch(ids, positions, starts, lengths, tables, rows, 1), arena)
        nothing = np.zeros(0, np.int32)
        self.copy_blocks(arena, nothing, nothing, nothing)
        for memory, block in zip(memories, saved, strict=True):
            memory[0] = block

    def copy_blocks(self, arena: Arena, sources: IntArray, targets: IntArray, num_tokens: IntArray) -> None:
        """Copy the first `num_tokens[i]` tokens of block `sources[i]` to `targets[i]`, in every layer."""
        self._check_arena(arena)
        columns = [(sources, targets)]
        if isinstance(arena, GroupedArena):
            columns.append((arena.windows_of(sources), arena.windows_of(targets)))
        for (memory, group), (froms, to) in zip(parts_of(arena, self.layout), columns, strict=True):
            blocks.copy_tokens(blocks.planes(memory, group), froms, to, num_tokens)

    def scrub_blocks(self, arena: Arena, block_ids: IntArray, *, poison: bool = False) -> None:
        """Overwrite blocks, and the window blocks that they have, with zeros, or with NaN when `poison` (tests: a stale
        read becomes visible)."""
        self._check_arena(arena)
        ids = [block_ids]
        if isinstance(arena, GroupedArena):
            ids.append(arena.pairs_of(block_ids)[:, 1])
        for (memory, _), chosen in zip(parts_of(arena, self.layout), ids, strict=True):
            blocks.fill(memory, chosen, poison)

    def _check_arena(self, arena: Arena) -> None:
        for memory, group in parts_of(arena, self.layout):
            fits = memory.dtype == group.array_type and memory.shape[1:] == group.array_shape
            if not fits or not memory.flags.c_contiguous:
                raise Internal(f"an arena of {memory.dtype} {memory.shape[1:]} does not fit the model")

    def _check(self, batch: StepBatch, arena: Arena) -> None:
        # The kernels work on addresses: a wrong block id would write into another tenant's memory.
        self._check_arena(arena)
        if batch.adapters and batch.token_ids.size and len(batch.adapters) != batch.context_lens.size:
            raise Internal("a batch names adapters for another number of sequences")
        check_batch(
            batch, num_blocks=usable_blocks(arena) + 1, block_tokens=self.layout.block_tokens,
            max_position=self.config.max_position, vocab_size=self.config.vocab_size,
        )  # fmt: skip
        if isinstance(arena, GroupedArena):
            check_window_blocks(batch, arena, self.layout)
