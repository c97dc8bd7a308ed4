"""Attention's tasks of one step, and which decodes read a span of keys together. Host arithmetic on block tables.

Called by `decoder/models/workspace.py` once a step. Decodes whose tables name the same blocks for a whole span that
lies before their query share one task over it: the span is read once, and their query lanes fill tiles of sixteen that
each alone would leave mostly empty. A lane's sums do not depend on its place, so sharing changes no bit.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from decoder.batch import StepBatch
from decoder.kernels import frame as f

IntArray = NDArray[np.int32]

MIN_SHARING: Final = 2
"""Decodes that share a span from this many on."""
_LANES: Final = 16  # of a tile


class AttentionPlan(NamedTuple):
    """What `decoder/kernels/attention.py` does in one step; all arrays are int32.

    tasks [T, TASK_WORDS]: the longest first. members: rows of the batch that tasks over shared spans name. parts
    [P, 2]: slot and first lane of the partial state of each span of each split decode, in order. part_starts [D + 1]:
    the first part of each decode; one that is not split has none. num_slots: slots of partial states.
    """

    tasks: IntArray
    members: IntArray
    parts: IntArray
    part_starts: IntArray
    num_slots: int


def shared_spans(tables: IntArray, whole: NDArray[np.int64], block_tokens: int) -> list[tuple[int, NDArray[np.intp]]]:
    """(span, rows of `tables`, ascending) for every span that at least MIN_SHARING rows have in the same blocks.

    tables int32 [rows, width]; `whole` [rows]: so many leading spans of each may be shared. A row that shares no span
    shares none after it, so where nothing is shared only the first span is looked at.
    """
    width = f.SPAN // block_tokens
    rows = np.flatnonzero(whole > 0)
    found: list[tuple[int, NDArray[np.intp]]] = []
    span = 0
    while rows.size >= MIN_SHARING and width * block_tokens == f.SPAN:
        ids = np.ascontiguousarray(tables[rows, span * width : (span + 1) * width])
        if (ids == ids[0]).all():
            found.append((span, rows))
        else:
            keys = ids.view(np.dtype((np.void, ids.itemsize * width))).ravel()
            _, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)
            sharing = np.flatnonzero(sizes >= MIN_SHARING)
            found += [(span, rows[group == index]) for index in sharing.tolist()]
            rows = rows[sizes[group] >= MIN_SHARING]
        span += 1
        rows = rows[whole[rows] > span]
    return found


def plan_attention(
    batch: StepBatch, *, group: int, kv_heads: int, threads: int, block_tokens: int, tokens_per_item: int
) -> AttentionPlan:
    """The plan of a checked batch for heads in groups of `group`.

    A decode is one task, unless it shares spans, or is so long that other threads would wait for it: then each span is
    one, and the partial states are merged in the order of the spans.
    """
    decodes = batch.num_decodes
    lengths = batch.context_lens[:decodes].astype(np.int64)
    spans = -(-lengths // f.SPAN)
    shared = shared_spans(batch.block_tables[:decodes], (lengths - 1) // f.SPAN, block_tokens)
    split = (spans > max(1, int(spans.sum()) * kv_heads // (8 * threads))) & (threads > 1)
    for _, rows in shared:
        split[rows] = True
    counts = np.where(split, spans, 0)
    starts = np.zeros(decodes + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    parts = np.full((int(starts[-1]), 2), -1, np.int32)
    alone = max(1, _LANES // group)  # members whose lanes fit one tile
    tiles = -(-tokens_per_item * group // _LANES)  # that one task has room for
    limit = tiles // -(-group // _LANES) * alone
    sizes: list[NDArray[Any]] = []
    tasks: list[NDArray[Any]] = []
    members: list[NDArray[np.intp]] = []
    slots = num_members = 0

    def add(size: NDArray[Any], *columns: Any) -> None:
        sizes.append(size)
        tasks.append(np.stack(np.broadcast_arrays(*columns), axis=-1).reshape(-1, f.TASK_WORDS))

    for span, rows in shared:
        # The first member looks least far, the last one farthest: kernels take a tile's bounds from its ends.
        rows = rows[np.argsort(lengths[rows], kind="stable")]
        for first in range(0, rows.size, limit):
            here = rows[first : first + limit]
            place = np.arange(here.size)
            parts[starts[here] + span] = np.stack([slots + place // alone, place % alone * group], axis=-1)
            add(np.array([here.size]), num_members, here.size, here[0], span, slots, 1)
            members.append(here)
            num_members += here.size
            slots += -(-here.size // alone)
    own = np.flatnonzero(parts[:, 0] < 0)
    owners = np.repeat(np.arange(decodes), counts)[own]
    parts[own, 0], parts[own, 1] = slots + np.arange(own.size), 0
    add(np.ones(own.size, np.int64), owners, 1, owners, own - starts[owners], parts[own, 0], 0)
    slots += own.size
    whole = np.flatnonzero(~split)
    add(spans[whole], whole, 1, whole, -1, 0, 0)
    for sequence in range(decodes, batch.context_lens.size):
        begin, end = int(batch.query_starts[sequence]), int(batch.query_starts[sequence + 1])
        first_rows = np.arange(begin, end, tokens_per_item)
        counts_here = np.minimum(tokens_per_item, end - first_rows)
        add((batch.positions[first_rows] // f.SPAN + 1) * counts_here, first_rows, counts_here, sequence, -1, 0, 0)
    order = np.argsort(-np.concatenate(sizes), kind="stable")
    return AttentionPlan(
        np.concatenate(tasks)[order].astype(np.int32),
        np.concatenate([*members, np.zeros(0, np.intp)]).astype(np.int32),
        parts,
        starts,
        slots,
    )


class Planner:
    """`plan_attention` of one model. Steps of decodes alone have the plan of the step before while no span begins, no
    sequence comes or goes and no block that could be shared changes: then that one is given again."""

    def __init__(self, *, group: int, kv_heads: int, threads: int, block_tokens: int, tokens_per_item: int) -> None:
        self._shape = {
            "group": group,
            "kv_heads": kv_heads,
            "threads": threads,
            "block_tokens": block_tokens,
            "tokens_per_item": tokens_per_item,
        }
        self._block_tokens = block_tokens
        self._known: tuple[IntArray, IntArray, IntArray] | None = None
        self._last: AttentionPlan

    def plan(self, batch: StepBatch) -> AttentionPlan:
        """The plan of a checked batch."""
        lengths = batch.context_lens
        if not lengths.size or batch.num_decodes != lengths.size:
            self._known = None
            return plan_attention(batch, **self._shape)
        whole = (lengths - 1) // f.SPAN
        # All that the plan of decodes looks at: spans, which length is the longer one, blocks of whole spans.
        blocks = batch.block_tables[:, : int(whole.max()) * f.SPAN // self._block_tokens]
        facts = (whole, lengths - lengths[0], blocks)
        if self._known is None or not all(map(np.array_equal, facts, self._known)):
            self._last = plan_attention(batch, **self._shape)
            self._known = (whole, facts[1], blocks.copy())
        return self._last
