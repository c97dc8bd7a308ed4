"""What a device step reads of a batch: plain data on the device, made by `device_inputs.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from decoder.kernels.lora.plan import AdapterRows
from decoder.kernels.paged_prefill.triton import PrefillPlan
from decoder.kernels.shared_prefix_decode.plan import SharedPlan


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """The chunks of a step, which come after its decodes: starts int32 [C + 1] of their rows, counted from the first
    chunk's, and the plan that all layers share."""

    starts: torch.Tensor
    plan: PrefillPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A batch on the device, as `StepBatch` has it; `owners` int32 [T] is the sequence of each row.

    logit_rows int64 [R]; None where every row's logits are wanted. An empty place of a decode batch has position 0,
    length 0 and a table of null blocks. `shared`: runs of blocks that decodes read together; None without. `adapters`:
    rows that have one; None without. `window_tables`: window blocks in the places of `tables`; None without groups of
    layers.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    owners: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    num_decodes: int
    prefill: PrefillInputs | None = None
    logit_rows: torch.Tensor | None = None
    shared: SharedPlan | None = None
    adapters: AdapterRows | None = None
    window_tables: torch.Tensor | None = None
