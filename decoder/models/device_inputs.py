"""A batch's way to the device: as new tensors for steps with chunks, into fixed memory for decode steps.

Invariant: the fixed memory of a shape never moves, and its unused places are empty (null blocks, length 0), so a
recorded decode step of that shape computes whatever batch was put in last. Two staging areas alternate, so that a
batch can be put in while the copy of the one before is under way.
"""

# Classes of torch.cuda without annotations.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from decoder.batch import IntArray, StepBatch
from decoder.kernels.gpu import power_of_two
from decoder.kernels.lora.plan import AdapterRows, RowGroups
from decoder.kernels.paged_prefill.triton import plan
from decoder.kernels.shared_prefix_decode.plan import SharedPlan, SlotLayout
from decoder.kernels.uploads import upload as on_device
from decoder.models.device_attention import MAX_DECODES
from decoder.models.device_batch import PrefillInputs, StepInputs

BUCKETS: Final[tuple[int, ...]] = (1, 2, 4, *range(8, 257, 8), 384, 512, 768, MAX_DECODES)


def bucket_of(decodes: int) -> int:
    """The smallest recorded batch size that has room for `decodes` sequences."""
    return next(size for size in BUCKETS if size >= decodes)


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What a recorded step is made for: so many sequences, slots of shared runs, and tiles of rows with adapters (0:
    none), for adapters that go down to `lowered` numbers and change the products in `products`."""

    bucket: int
    slots: int = 0
    tiles: int = 0
    tile_rows: int = 0
    lowered: int = 0
    products: int = 0

    @classmethod
    def of(cls, batch: StepBatch, shared: SlotLayout | None, groups: RowGroups | None) -> DecodeShape:
        """The smallest shape that has room for a batch of decodes alone; sizes of adapters are powers of two."""
        bucket, slots = bucket_of(batch.num_decodes), 0 if shared is None else power_of_two(shared.slot_lengths.size)
        if groups is None:
            return cls(bucket, slots)
        tiles, lowered = power_of_two(len(groups.tiles)), power_of_two(groups.lowered)
        return cls(bucket, slots, tiles, groups.tile_rows, lowered, groups.products)


def upload(
    batch: StepBatch,
    group: int,
    rows: int,
    device: torch.device,
    shared: SlotLayout | None = None,
    groups: RowGroups | None = None,
    window_tables: IntArray | None = None,
) -> StepInputs:
    """Inputs of any step. `group` is the model's query heads of a key head, `rows` those of a prefill block."""
    decodes = batch.num_decodes
    owners = np.repeat(np.arange(batch.context_lens.size, dtype=np.int32), np.diff(batch.query_starts))
    prefill = None
    if decodes < batch.context_lens.size:
        starts = batch.query_starts[decodes:] - np.int32(decodes)
        prefill = PrefillInputs(
            on_device(starts, device), plan(starts, batch.context_lens[decodes:], group, rows, device)
        )
    return StepInputs(
        token_ids=on_device(batch.token_ids, device),
        positions=on_device(batch.positions, device),
        owners=on_device(owners, device),
        tables=on_device(batch.block_tables, device),
        lengths=on_device(batch.context_lens, device),
        num_decodes=decodes,
        prefill=prefill,
        logit_rows=on_device(batch.logit_rows.astype(np.int64), device),
        shared=None if shared is None else SharedPlan.of(shared, device),
        adapters=None if groups is None else AdapterRows.of(groups, device),
        window_tables=None if window_tables is None else on_device(window_tables, device),
    )


class DecodeInputs:
    """The fixed memory of decode steps of a shape, with tables of `width` blocks and slots of `members` sequences, and
    where the layout is `grouped`, tables of as many window blocks."""

    def __init__(
        self, shape: DecodeShape, width: int, members: int, device: torch.device, *, grouped: bool = False
    ) -> None:
        bucket, slots = shape.bucket, shape.slots
        sizes: dict[str, tuple[int, ...]] = {}
        if shape.tiles:  # first, since addresses are two words
            sizes |= {"addresses": (2 * shape.tiles,), "tiles": (shape.tiles, 2), "rows": (bucket,)}
        sizes |= {"token_ids": (bucket,), "positions": (bucket,), "lengths": (bucket,), "tables": (bucket, width)}
        if grouped:
            sizes["window_tables"] = (bucket, width)
        if slots:
            sizes |= {
                "slot_members": (slots, members), "slot_tables": (slots, width), "slot_lengths": (slots,),
                "shared_blocks": (bucket,), "places": (bucket,),
            }  # fmt: skip
        # One run, so that a step is one copy.
        self._sizes = sizes
        size = sum(math.prod(shape) for shape in sizes.values())
        self._device_words = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = [torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)]
        self._staged = [self._parts(staging.numpy()) for staging in self._staging]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        parts = self._parts(self._device_words)
        names = ("slot_members", "slot_tables", "slot_lengths", "shared_blocks", "places")
        adapters = None
        if shape.tiles:
            addresses = parts["addresses"].view(torch.int64)
            sizes_of = (shape.tile_rows, shape.lowered, shape.products)
            adapters = AdapterRows(addresses, parts["tiles"], parts["rows"], *sizes_of)
        self.inputs = StepInputs(
            token_ids=parts["token_ids"],
            positions=parts["positions"],
            owners=torch.arange(bucket, dtype=torch.int32, device=device),
            tables=parts["tables"],
            lengths=parts["lengths"],
            num_decodes=bucket,
            shared=SharedPlan(*(parts[name] for name in names)) if slots else None,
            adapters=adapters,
            window_tables=parts.get("window_tables"),
        )

    def _parts(self, words: Any) -> dict[str, Any]:
        parts, first = {}, 0
        for name, shape in self._sizes.items():
            last = first + math.prod(shape)
            parts[name] = words[first:last].reshape(shape)
            first = last
        return parts

    def put(
        self,
        batch: StepBatch,
        shared: SlotLayout | None = None,
        groups: RowGroups | None = None,
        window_tables: IntArray | None = None,
    ) -> None:
        """Make `batch`, decodes alone, what the next step computes. Waits for no step, only for an old copy."""
        count, width = batch.block_tables.shape
        self._turn ^= 1
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        self._staging[self._turn].zero_()
        words = self._staged[self._turn]
        words["token_ids"][:count] = batch.token_ids
        words["positions"][:count] = batch.positions
        words["lengths"][:count] = batch.context_lens
        words["tables"][:count, :width] = batch.block_tables
        if window_tables is not None:
            words["window_tables"][:count, :width] = window_tables
        if shared is not None:
            slots, run = shared.slot_tables.shape
            words["slot_members"][:slots] = shared.slot_members
            words["slot_tables"][:slots, :run] = shared.slot_tables
            words["slot_lengths"][:slots] = shared.slot_lengths
            words["shared_blocks"][:count] = shared.shared_blocks
            words["places"][:] = -1
            words["places"][:count] = shared.places
        if groups is not None:
            words["addresses"].view(np.int64)[: len(groups.tables)] = groups.tables
            words["tiles"][: len(groups.tiles)] = groups.tiles
            words["rows"][: groups.rows.size] = groups.rows
        self._device_words.copy_(self._staging[self._turn], non_blocking=True)
        if self._device_words.is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._copied[self._turn] = event
