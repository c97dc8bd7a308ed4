"""A batch's way to the device: as new tensors for steps with chunks, into fixed memory for decode steps.

Invariant: the fixed memory of a bucket never moves, and its unused places are empty (null blocks, length 0), so a
recorded decode step of that bucket computes whatever batch was put in last. Two staging areas alternate, so that a
batch can be put in while the copy of the one before is under way.
"""

# Classes of torch.cuda without annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from decoder.batch import StepBatch
from decoder.kernels.paged_prefill.triton import plan
from decoder.models.device_step import MAX_DECODES, PrefillInputs, StepInputs

BUCKETS: Final[tuple[int, ...]] = (1, 2, 4, *range(8, 257, 8), 384, 512, 768, MAX_DECODES)


def bucket_of(decodes: int) -> int:
    """The smallest recorded batch size that has room for `decodes` sequences."""
    return next(size for size in BUCKETS if size >= decodes)


def upload(batch: StepBatch, group: int, rows: int, device: torch.device) -> StepInputs:
    """Inputs of any step. `group` is the model's query heads of a key head, `rows` those of a prefill block."""
    decodes = batch.num_decodes
    owners = np.repeat(np.arange(batch.context_lens.size, dtype=np.int32), np.diff(batch.query_starts))
    prefill = None
    if decodes < batch.context_lens.size:
        starts = batch.query_starts[decodes:] - np.int32(decodes)
        prefill = PrefillInputs(_to(starts, device), plan(starts, batch.context_lens[decodes:], group, rows, device))
    return StepInputs(
        token_ids=_to(batch.token_ids, device),
        positions=_to(batch.positions, device),
        owners=_to(owners, device),
        tables=_to(batch.block_tables, device),
        lengths=_to(batch.context_lens, device),
        num_decodes=decodes,
        prefill=prefill,
        logit_rows=_to(batch.logit_rows.astype(np.int64), device),
    )


def _to(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    # A copy: the batch's arrays are overwritten by the next step.
    tensor = torch.from_numpy(np.array(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class DecodeInputs:
    """The fixed memory of decode steps of up to `bucket` sequences with tables of `width` blocks."""

    def __init__(self, bucket: int, width: int, device: torch.device) -> None:
        self.bucket = bucket
        self._words = 3 * bucket
        pinned = device.type == "cuda"
        size = self._words + bucket * width
        # One run: token ids, positions, lengths, tables, so that a step is one copy.
        self._device_words = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._width = width
        self.inputs = StepInputs(
            token_ids=self._device_words[:bucket],
            positions=self._device_words[bucket : 2 * bucket],
            owners=torch.arange(bucket, dtype=torch.int32, device=device),
            tables=self._device_words[self._words :].view(bucket, width),
            lengths=self._device_words[2 * bucket : self._words],
            num_decodes=bucket,
        )

    def put(self, batch: StepBatch) -> None:
        """Make `batch`, decodes alone, what the next step computes. Waits for no step, only for an old copy."""
        count, width = batch.block_tables.shape
        self._turn ^= 1
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        words = self._staging[self._turn].numpy()
        words.fill(0)
        bucket = self.bucket
        words[:count] = batch.token_ids
        words[bucket : bucket + count] = batch.positions
        words[2 * bucket : 2 * bucket + count] = batch.context_lens
        words[self._words :].reshape(bucket, self._width)[:count, :width] = batch.block_tables
        self._device_words.copy_(self._staging[self._turn], non_blocking=True)
        if self._device_words.is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._copied[self._turn] = event
