"""Which sequences of a decode batch share which run of leading blocks. Host arithmetic on block tables, no device.

`find_groups` chooses; `SharedPlan.build` lays out the two decodes. A sequence is in one group at most. Only blocks that
lie wholly before a sequence's query positions are shared, so the shared part needs no causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import Internal

MIN_SEQUENCES: Final = 8
MIN_SHARED_TOKENS: Final = 2048
_MAX_LEVELS: Final = 64

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences (rows of the batch, ascending) whose first `num_blocks` blocks are the same."""

    sequences: tuple[int, ...]
    num_blocks: int


def find_groups(
    tables: IntArray, usable_blocks: IntArray, *, min_sequences: int = MIN_SEQUENCES, min_blocks: int = 1
) -> list[Group]:
    """Disjoint groups that save many block reads, in order of their first sequence.

    tables int32 [batch, width]; usable_blocks int32 [batch], so many leading blocks of each may be shared. Sharing a
    run of b blocks among n sequences saves (n - 1) * b reads. From the longest runs down, sequences stay in the small
    groups that share more, or join a large one that shares less, whichever saves more; those that no small group took
    may share what is left. Never worse than the best single group, and not always the best choice of several.
    """
    chosen, _ = _best(tables, usable_blocks, np.arange(len(tables)), 0, min_sequences, max(1, min_blocks))
    return sorted(chosen, key=lambda group: group.sequences[0])


def _best(
    tables: IntArray,
    usable: IntArray,
    rows: NDArray[np.intp],
    depth: int,
    min_sequences: int,
    min_blocks: int,
    level: int = 0,
) -> tuple[list[Group], int]:
    # `rows` agree in their first `depth` blocks. Each level of the recursion ends at a place where they part.
    if rows.size < min_sequences:
        return [], 0
    limit = int(usable[rows].min())
    same = (tables[rows, depth:limit] == tables[rows[0], depth:limit]).all(axis=0)
    run = depth + (same.size if same.all() else int(same.argmin()))
    together = [Group(tuple(rows.tolist()), run)] if run >= min_blocks else []
    apart: list[Group] = []
    longer = rows[usable[rows] > run]
    for block in np.unique(tables[longer, run]).tolist() if longer.size and level < _MAX_LEVELS else ():
        part = longer[tables[longer, run] == block]
        apart += _best(tables, usable, part, run, min_sequences, min_blocks, level + 1)[0]
    left = np.setdiff1d(rows, [row for group in apart for row in group.sequences])
    if together and left.size >= min_sequences:
        apart.append(Group(tuple(left.tolist()), run))
    return max(((groups, _saved(groups)) for groups in (together, apart)), key=lambda choice: choice[1])


def _saved(groups: list[Group]) -> int:
    return sum((len(group.sequences) - 1) * group.num_blocks for group in groups)


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """Two decodes in place of one. A slot is up to `members` sequences of one group: its queries are one row block.

    slot_members int64 [slots * members]: sequence of each place (0 for an unused one). slot_tables int32 [slots, run]
    and slot_lengths int32 [slots]: the shared contexts. rest_tables int32 [batch, width] and rest_lengths int32
    [batch]: what is left of each sequence, with its query positions. places int32 [batch]: the place of a sequence in
    slot_members, -1 for one that shares nothing.
    """

    slot_members: torch.Tensor
    slot_tables: torch.Tensor
    slot_lengths: torch.Tensor
    rest_tables: torch.Tensor
    rest_lengths: torch.Tensor
    places: torch.Tensor
    members: int

    @property
    def num_slots(self) -> int:
        """Slots of all groups; 0 where nothing is shared."""
        return self.slot_lengths.numel()

    @classmethod
    def build(
        cls,
        tables: IntArray,
        lengths: IntArray,
        *,
        block_tokens: int,
        members: int,
        device: torch.device,
        query_len: int = 1,
        min_sequences: int = MIN_SEQUENCES,
        min_tokens: int = MIN_SHARED_TOKENS,
    ) -> SharedPlan:
        """Plan for the host's copies of tables [batch, width] and lengths [batch] (0 for an empty place).

        `members` sequences at most make a slot: rows of a block over rows of a sequence. Raises Internal on numbers
        that do not fit.
        """
        if members < 1 or tables.shape[0] != lengths.size or (lengths > tables.shape[1] * block_tokens).any():
            raise Internal(f"no shared plan for tables {tables.shape} and slots of {members} sequences")
        usable = (np.maximum(lengths - query_len, 0) // block_tokens).astype(np.int32)
        groups = find_groups(tables, usable, min_sequences=min_sequences, min_blocks=-(-min_tokens // block_tokens))
        places = np.full(lengths.size, -1, np.int32)
        shared = np.zeros(lengths.size, np.int32)
        slots: list[tuple[Group, tuple[int, ...]]] = []
        for group in groups:
            for first in range(0, len(group.sequences), members):
                chosen = group.sequences[first : first + members]
                places[list(chosen)] = len(slots) * members + np.arange(len(chosen))
                shared[list(chosen)] = group.num_blocks
                slots.append((group, chosen))
        width = max((group.num_blocks for group in groups), default=1)
        slot_members = np.zeros((len(slots), members), np.int64)
        slot_tables = np.zeros((len(slots), width), np.int32)
        for slot, (group, chosen) in enumerate(slots):
            slot_members[slot, : len(chosen)] = chosen
            slot_tables[slot, : group.num_blocks] = tables[chosen[0], : group.num_blocks]
        slot_lengths = np.array([group.num_blocks * block_tokens for group, _ in slots], np.int32)
        column = shared[:, None] + np.arange(tables.shape[1])
        rest = np.take_along_axis(tables, np.minimum(column, tables.shape[1] - 1), axis=1)
        rest[column >= tables.shape[1]] = 0

        def to(array: IntArray | NDArray[np.int64]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return cls(
            slot_members=to(slot_members.ravel()),
            slot_tables=to(slot_tables),
            slot_lengths=to(slot_lengths),
            rest_tables=to(rest),
            rest_lengths=to(lengths - shared * np.int32(block_tokens)),
            places=to(places),
            members=members,
        )
