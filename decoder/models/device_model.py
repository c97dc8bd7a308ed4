"""A model on a device: the engine's `AheadModel` over the Triton kernels, for every family.

Steps of decodes alone run in fixed memory by shape (on a GPU as recorded CUDA graphs), others as they come.
`start` and `launch` queue a step and return; what they return waits for the results of that step alone, so that a
caller may plan and queue the next one meanwhile. It owns its weights, inputs and recordings, and no block. Not safe for
concurrent calls.
"""

# Classes of torch.cuda without annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import Internal, ResourceExhausted
from common.layout import KvDtype, KvLayout
from decoder.batch import DrawColumns, IntArray, StepBatch
from decoder.grouped_arena import GroupedArena
from decoder.kernels.block_copy.triton import copy
from decoder.kernels.block_scrub.triton import scrub
from decoder.kernels.gpu import capability, use_device
from decoder.kernels.lora.plan import RowGroups, group_rows
from decoder.kernels.shared_prefix_decode.plan import SlotLayout
from decoder.kernels.uploads import upload as on_device
from decoder.models.checks import check_batch, check_window_blocks
from decoder.models.config import ModelConfig, ModelDigests
from decoder.models.decode_graphs import MOST, CudaRecorder, DecodeGraphs, DirectRecorder, Recorder
from decoder.models.device_adapters import DeviceAdapter, Layer
from decoder.models.device_arena import TORCH_TYPES, DeviceArena, element_type, view_arena
from decoder.models.device_attention import MAX_DECODES
from decoder.models.device_batch import StepInputs
from decoder.models.device_draws import DeviceColumns, DrawnIds
from decoder.models.device_inputs import DecodeInputs, DecodeShape, upload
from decoder.models.device_results import Arrival, CudaSideStream, NoSideStream, SideStream
from decoder.models.device_sharing import DEFAULT_COSTS, SharingCosts, SharingRule
from decoder.models.device_step import DeviceStep
from decoder.models.device_warm_up import warm_up
from decoder.models.device_weights import MakeWeightMemory, OwnMemory, load_weights
from decoder.models.matrices import Read


class DeviceModel:
    """A loaded model.

    `read` gives a tensor of the common form by its name; `make_memory` says where the weights lie, by default in memory
    of its own. Weights and activations are of `dtype`, by default the layout's type; keys and values are stored as the
    layout says. `recorder` is by default CUDA graphs on a GPU, and none under the interpreter; `sharing` says what it
    costs to read a shared run of blocks apart; `side` brings results to the host; fixed inputs and
    recordings are kept of `most_shapes`. Raises InvalidArgument, by name, on what it does not compute.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: KvLayout,
        digests: ModelDigests,
        read: Read,
        device: torch.device,
        report: Callable[[float], None] = lambda done: None,
        *,
        dtype: KvDtype | None = None,
        recorder: Recorder | None = None,
        make_memory: MakeWeightMemory | None = None,
        sharing: SharingCosts = DEFAULT_COSTS,
        side: SideStream | None = None,
        most_shapes: int = MOST,
    ) -> None:
        self.config = config
        self.layout = layout
        self.digests = digests
        self.device = device
        self.dtype = TORCH_TYPES[dtype or layout.dtype]
        self._capability = capability(device)
        # Queries meet keys in the keys' own type; quantised ones are widened to that of the activations.
        query_dtype = self.dtype if layout.quantized else element_type(layout, self._capability)
        memory = make_memory or (lambda _: OwnMemory(device))
        weights = load_weights(config, read, self.dtype, report, memory)
        self.step = DeviceStep(config, layout, weights, self.dtype, query_dtype)
        self.members = self.step.attention.members
        self._sharing = SharingRule(config, layout, self.members, query_dtype.itemsize, sharing)
        on_gpu = device.type == "cuda"
        self._side = side or (CudaSideStream(device) if on_gpu else NoSideStream())
        self.drawn = DrawnIds(config.vocab_size, device, self._side)
        width = layout.blocks_for(config.max_position)
        self._graphs = DecodeGraphs(
            recorder or (CudaRecorder() if on_gpu else DirectRecorder()),
            lambda shape: DecodeInputs(shape, width, self.members, device, grouped=layout.grouped),
            most_shapes,
        )

    def forward(self, batch: StepBatch, arena: Any) -> NDArray[np.float32]:
        """Run one step; float32 logits [R, vocab], valid until the next call.

        `arena` is a torch tensor in the device's memory, or without a GPU the host's array, as `common/layout.py` has
        it. Raises Internal when the batch does not fit the model or the arena; nothing is written then.
        """
        return self.start(batch, arena).wait()

    def start(self, batch: StepBatch, arena: Any) -> Arrival:
        """Queue one step; what comes back are its logits. Raises what `forward` raises."""
        logits = self._queue(batch, arena, None)
        arrival = self._side.bring(logits)
        self._side.hold(arrival)  # the next step may write, or be given, the memory of this result
        return arrival

    def launch(self, batch: StepBatch, arena: Any, draws: DrawColumns) -> Arrival:
        """Queue one step and the drawing of a token of each logit row; what comes back are the ids, int32 [R], NO_TOKEN
        (-1) where a row has no finite maximum. Decodes may be fed with what the launch before this one drew.

        Raises what `forward` raises, and Internal where the columns do not fit.
        """
        if len(draws.temperatures) != batch.logit_rows.size:
            raise Internal("the columns of a draw do not fit the logit rows of its batch")
        use_device(self.device)
        columns = self.drawn.upload(draws, batch.num_decodes)
        return self.drawn.draw(self._queue(batch, arena, columns), columns)

    def quiesce(self) -> None:
        """Returns when nothing that was queued runs any more. Never raises."""
        self._side.drain()

    def _queue(self, batch: StepBatch, arena: Any, columns: DeviceColumns | None) -> torch.Tensor:
        paged = self.view(arena)
        config = self.config
        if batch.adapters and batch.token_ids.size and len(batch.adapters) != batch.context_lens.size:
            raise Internal("a batch names adapters for another number of sequences")
        check_batch(
            batch, num_blocks=paged.blocks.shape[0], block_tokens=self.layout.block_tokens,
            max_position=config.max_position, vocab_size=config.vocab_size,
        )  # fmt: skip
        if not batch.token_ids.size:
            return torch.zeros((0, config.vocab_size))
        if isinstance(arena, GroupedArena):
            check_window_blocks(batch, arena, self.layout)
        if 0 < batch.num_decodes == batch.context_lens.size <= MAX_DECODES:
            logits = self._decode(batch, paged, columns)
            if not np.array_equal(batch.logit_rows, np.arange(len(logits))):
                logits = logits[on_device(batch.logit_rows.astype(np.int64), self.device)]
            return logits
        shared = self._shared(batch, recorded=False)
        inputs = self.upload(batch, paged, shared, group_rows(batch.adapters, batch.query_starts))
        if columns is not None:
            self.drawn.feed(inputs.token_ids, columns)
        return self.step.run(inputs, paged)

    def forward_decode(self, batch: StepBatch, arena: Any) -> torch.Tensor:
        """Logits [decodes, vocab] of a checked batch of decodes alone, in fixed memory; valid until the next step."""
        return self._decode(batch, self.view(arena))

    def _decode(self, batch: StepBatch, arena: DeviceArena, columns: DeviceColumns | None = None) -> torch.Tensor:
        shared = self._shared(batch, recorded=True)
        groups = group_rows(batch.adapters, batch.query_starts)
        shape = DecodeShape.of(batch, shared, groups)
        fixed = self._graphs.inputs(shape)
        fixed.put(batch, shared, groups, _window_tables(batch, arena))
        if columns is not None:
            self.drawn.feed(fixed.inputs.token_ids, columns)
        logits = self._graphs.run(shape, arena.blocks, lambda: self.step.run(fixed.inputs, arena))
        return logits[: batch.num_decodes]

    def _shared(self, batch: StepBatch, *, recorded: bool) -> SlotLayout | None:
        return self._sharing.choose(batch, recorded=recorded) if self.members else None

    def upload(
        self, batch: StepBatch, arena: DeviceArena, shared: SlotLayout | None = None, groups: RowGroups | None = None
    ) -> StepInputs:
        """A checked batch for an arena on the device, in memory of its own."""
        rows = self.step.attention.prefill_rows
        windows = _window_tables(batch, arena)
        return upload(batch, self.config.group_size, rows, self.device, shared, groups, windows)

    def warm_up(self, arena: Any = None) -> None:
        """Compile the kernels on a small arena of its own; `arena`, if given, is left alone."""
        warm_up(self)

    def copy_blocks(self, arena: Any, sources: IntArray, targets: IntArray, num_tokens: IntArray) -> None:
        """Copy the first `num_tokens[i]` tokens of block `sources[i]` to `targets[i]`, in every layer, at once.

        No target is another entry's source or target. Raises Internal on a plan that does not fit.
        """
        paged = self.view(arena)
        if not sources.size == targets.size == num_tokens.size:
            raise Internal("a copy plan has columns of different lengths")
        for ids in (sources, targets):
            if ids.size and not 0 <= ids.min() <= ids.max() < paged.blocks.shape[0]:
                raise Internal("a block id is outside the arena")
        if num_tokens.size and not 0 <= num_tokens.min() <= num_tokens.max() <= self.layout.block_tokens:
            raise Internal("a copy plan names more tokens than a block holds")
        if np.unique(targets).size != targets.size or np.isin(targets, sources).any():
            raise Internal("a copy plan writes a block that it reads, or twice")
        self._copy(paged, sources, targets, num_tokens)
        if isinstance(arena, GroupedArena) and paged.windows is not None:
            self._copy(paged.windows, arena.windows_of(sources), arena.windows_of(targets), num_tokens)

    def _copy(self, arena: DeviceArena, *columns: IntArray) -> None:
        sources, targets, counts = (on_device(column.astype(np.int32), self.device) for column in columns)
        copy(arena.elements, sources, targets, counts, scales=arena.scales)

    def scrub_blocks(self, arena: Any, block_ids: IntArray, *, poison: bool = False) -> None:
        """Overwrite blocks, and the window blocks that they have, with zeros, or with NaN when `poison` (tests: a stale
        read becomes visible)."""
        paged = self.view(arena)
        if block_ids.size and not 0 <= block_ids.min() <= block_ids.max() < paged.blocks.shape[0]:
            raise Internal("a block id is outside the arena")
        parts = [(paged.blocks, block_ids)]
        if isinstance(arena, GroupedArena) and paged.windows is not None:
            parts.append((paged.windows.blocks, arena.pairs_of(block_ids)[:, 1]))
        for blocks, chosen in parts:
            scrub(blocks, on_device(chosen.astype(np.int32), self.device), poison=poison)

    def pack_adapter(self, layers: tuple[Layer, ...]) -> DeviceAdapter:
        """A LoRA adapter of this model in the form that a batch's `adapters` hold. It may be called from any thread.

        Raises ResourceExhausted where the device has no room for it.
        """
        use_device(self.device)
        try:
            return DeviceAdapter(self.config, layers, self.dtype, self.device)
        except torch.OutOfMemoryError as error:
            needed = sum(it.size for layer in layers for pair in layer.values() for it in pair) * self.dtype.itemsize
            usable = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
            raise ResourceExhausted(
                f"the adapter needs {needed} bytes of the GPU's memory, or more, and {usable} are free",
                subject="adapter_bytes", needed=needed, usable=usable, reason="ADAPTER_EXCEEDS_MEMORY",
            ) from error  # fmt: skip

    def close(self) -> None:
        """Drop the recordings and their inputs; the model can be used again."""
        self._graphs.clear()

    def view(self, arena: Any) -> DeviceArena:
        """The arena as this thread's kernels take it. Raises Internal when it does not fit layout or device."""
        use_device(self.device)
        return view_arena(arena, self.layout, self._capability, self.device)


def _window_tables(batch: StepBatch, arena: DeviceArena) -> IntArray | None:
    return None if arena.of is None else arena.of[batch.block_tables]
