"""Which sequences of a decode batch share which run of leading blocks. Host arithmetic on block tables, no device.

`find_groups` chooses among the runs that `attention_plan.shared_spans` finds, which is the CPU step's finding too;
`lay_out` puts groups into slots, and `SharedPlan` is that on a device. A sequence is in one group at most. Only spans
that lie wholly before a sequence's query positions are shared, so the shared part needs no causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import Internal
from decoder.kernels.attention_plan import shared_spans
from decoder.kernels.frame import SPAN
from decoder.kernels.uploads import upload

MIN_SEQUENCES: Final = 8
"""Sequences that share a run from this many on."""

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences (rows of the batch, ascending) whose first `num_blocks` blocks are the same."""

    sequences: tuple[int, ...]
    num_blocks: int

    def slots(self, members: int) -> int:
        """Slots of `members` places that its sequences fill."""
        return -(-len(self.sequences) // members)

    def saved_blocks(self, members: int) -> int:
        """Reads of a block that are spared when each slot, in place of each sequence, reads the run."""
        return (len(self.sequences) - self.slots(members)) * self.num_blocks


@dataclass(slots=True)
class _Run:
    """Rows that agree in their first `spans` spans, and the runs of some of them that go on."""

    rows: NDArray[np.intp]
    spans: int
    longer: list[_Run] = field(default_factory=list)
    chosen: list[Group] = field(default_factory=list)


def find_groups(
    tables: IntArray,
    lengths: IntArray,
    *,
    block_tokens: int,
    members: int,
    query_len: int = 1,
    min_sequences: int = MIN_SEQUENCES,
) -> list[Group]:
    """Disjoint groups that save many block reads, in order of their first sequence.

    tables int32 [batch, width]; lengths int32 [batch], query positions included. From the longest runs down, sequences
    stay in the small groups that share more, or join a large one that shares less, whichever saves more; those that no
    small group took may share what is left. Never worse than the best single group, and not always the best choice of
    several. Empty where the blocks do not make whole spans.
    """
    whole = np.maximum(lengths.astype(np.int64) - query_len, 0) // SPAN
    runs = _runs(tables, whole, block_tokens, min_sequences)
    for run in reversed(runs):  # what is longer comes later
        blocks = run.spans * (SPAN // block_tokens)
        together = [Group(tuple(run.rows.tolist()), blocks)] if blocks else []
        apart = [group for longer in run.longer for group in longer.chosen]
        left = np.setdiff1d(run.rows, [row for group in apart for row in group.sequences])
        if blocks and left.size >= min_sequences:
            apart.append(Group(tuple(left.tolist()), blocks))
        run.chosen = max(together, apart, key=lambda groups: sum(group.saved_blocks(members) for group in groups))
    return sorted(runs[0].chosen, key=lambda group: group.sequences[0])


def _runs(tables: IntArray, whole: NDArray[np.int64], block_tokens: int, min_sequences: int) -> list[_Run]:
    """All runs that enough rows share, a run before those that go on from it; the first is that of no span."""
    runs = [_Run(np.arange(len(tables)), 0)]
    last = np.zeros(len(tables), np.intp)  # the longest run of each row
    for span, rows in shared_spans(tables, whole, block_tokens):
        for index in np.unique(last[rows]).tolist():
            run, here = runs[index], rows[last[rows] == index]
            # Rows that part and name the same blocks later do not share a prefix.
            if here.size < min_sequences or run.spans != span:
                continue
            if span and here.size == run.rows.size:
                run.spans += 1
                continue
            last[here] = len(runs)
            runs.append(_Run(here, span + 1))
            run.longer.append(runs[-1])
    return runs


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Groups in slots, on the host; all arrays int32. A slot is up to `members` sequences of one group.

    slot_members [slots, members]: sequence of each place (0 for an unused one). slot_tables [slots, run] and
    slot_lengths [slots]: the shared contexts, in blocks and in tokens. shared_blocks [batch]: blocks of a sequence that
    its slot has. places [batch]: the place of a sequence in slot_members, -1 for one that shares nothing.
    """

    slot_members: IntArray
    slot_tables: IntArray
    slot_lengths: IntArray
    shared_blocks: IntArray
    places: IntArray


def lay_out(groups: list[Group], tables: IntArray, *, block_tokens: int, members: int) -> SlotLayout:
    """Slots for `groups` of the sequences of `tables`. Raises Internal where there is no group, or no place."""
    if members < 1 or not groups:
        raise Internal(f"no slots of {members} sequences for {len(groups)} groups")
    slots = sum(group.slots(members) for group in groups)
    layout = SlotLayout(
        np.zeros((slots, members), np.int32),
        np.zeros((slots, max(group.num_blocks for group in groups)), np.int32),
        np.zeros(slots, np.int32),
        np.zeros(len(tables), np.int32),
        np.full(len(tables), -1, np.int32),
    )
    slot = 0
    for group in groups:
        for first in range(0, len(group.sequences), members):
            chosen = list(group.sequences[first : first + members])
            layout.slot_members[slot, : len(chosen)] = chosen
            layout.slot_tables[slot, : group.num_blocks] = tables[chosen[0], : group.num_blocks]
            layout.slot_lengths[slot] = group.num_blocks * block_tokens
            layout.shared_blocks[chosen] = group.num_blocks
            layout.places[chosen] = slot * members + np.arange(len(chosen))
            slot += 1
    return layout


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """A `SlotLayout` on a device, int32 throughout. A slot that is not used has length 0, and no place points at it."""

    slot_members: torch.Tensor
    slot_tables: torch.Tensor
    slot_lengths: torch.Tensor
    shared_blocks: torch.Tensor
    places: torch.Tensor

    @property
    def num_slots(self) -> int:
        """Slots, used or not."""
        return self.slot_lengths.numel()

    @property
    def members(self) -> int:
        """Places of a slot."""
        return self.slot_members.shape[1]

    @classmethod
    def of(cls, layout: SlotLayout, device: torch.device) -> SharedPlan:
        """A copy of `layout` in new memory."""
        arrays = (
            layout.slot_members, layout.slot_tables, layout.slot_lengths, layout.shared_blocks, layout.places,
        )  # fmt: skip
        return cls(*(upload(array, device) for array in arrays))
