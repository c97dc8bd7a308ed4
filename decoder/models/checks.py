"""Whether a batch fits a model and an arena: one check for the models whose kernels work on addresses.

A wrong block id would read or write another tenant's memory, so nothing is launched before this has passed.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from common.errors import Internal
from common.layout import NULL_BLOCK, KvLayout
from decoder.batch import StepBatch
from decoder.grouped_arena import GroupedArena
from decoder.kernels.compiled import cached_entry

# What a batch that does not fit is refused with, by the number that `_first_fault` gives.
_FAULTS: Final = (
    "",
    "query_starts are not prefix sums of positive lengths",
    "the first num_decodes sequences must have one query token",
    "query tokens are not the last of their context",
    "positions of a sequence do not follow each other",
    "a context is longer than its block table or the model's range",
    "a block table names a block outside the arena",
    "a token id is outside the vocabulary",
    "a logit row is outside the batch",
)


@cached_entry
def _first_fault(
    tokens: Any, positions: Any, starts: Any, contexts: Any, tables: Any, rows: Any, num_decodes: int, num_blocks: int,
    max_context: int, vocab_size: int,
) -> int:  # fmt: skip
    """The number of what is wrong, or 0. The arrays, int32, have lengths that go together."""
    sequences = contexts.size
    if starts[sequences] != tokens.size:
        return 1
    if num_decodes < 0 or num_decodes > sequences:
        return 2
    end = 0
    for sequence in range(sequences):
        start, end = end, starts[sequence + 1]
        if starts[sequence] != start or end <= start or end > tokens.size:
            return 1
        if sequence < num_decodes and end != start + 1:
            return 2
        if positions[end - 1] + 1 != contexts[sequence]:
            return 3
        for row in range(start, end):
            if positions[row] != contexts[sequence] - (end - row):
                return 4
        if contexts[sequence] > max_context:
            return 5
    for row in range(tables.shape[0]):
        for column in range(tables.shape[1]):
            if tables[row, column] < 0 or tables[row, column] >= num_blocks:
                return 6
    for row in range(tokens.size):
        if tokens[row] < 0 or tokens[row] >= vocab_size:
            return 7
    for index in range(rows.size):
        if rows[index] < 0 or rows[index] >= tokens.size:
            return 8
    return 0


def check_batch(batch: StepBatch, *, num_blocks: int, block_tokens: int, max_position: int, vocab_size: int) -> None:
    """Raise Internal when `batch` does not fit an arena of `num_blocks` blocks (the null block included)."""
    tokens, sequences = batch.token_ids.size, batch.context_lens.size
    tables = batch.block_tables
    if batch.positions.size != tokens or batch.query_starts.size != sequences + 1 or tables.shape[0] != sequences:
        raise Internal("the arrays of a batch have different lengths")
    if not tokens:
        return
    arrays = (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens, tables, batch.logit_rows)
    fault = _first_fault(
        *[np.ascontiguousarray(array, np.int32) for array in arrays], batch.num_decodes, num_blocks,
        min(max_position, tables.shape[1] * block_tokens), vocab_size,
    )  # fmt: skip
    if fault:
        raise Internal(_FAULTS[fault])


def check_window_blocks(batch: StepBatch, arena: GroupedArena, layout: KvLayout) -> None:
    """Raise Internal where a block that a checked batch writes, or that a window of it touches, has no window block.

    Null blocks of a table are passed by: padding names them, and batches that only warm up.
    """
    tables, size = batch.block_tables, layout.block_tokens
    if not batch.token_ids.size:
        return
    first = batch.positions[batch.query_starts[:-1]] + 1 - layout.window_tokens
    places = np.arange(tables.shape[1])
    needed = (places >= np.maximum(first, 0)[:, None] // size) & (places <= (batch.context_lens[:, None] - 1) // size)
    found = arena.of[tables]
    if (needed & (found == NULL_BLOCK) & (tables != NULL_BLOCK)).any():
        raise Internal("a block that a step reads or writes has no window block")
    if found.min() < 0 or found.max() >= len(arena.window_blocks):
        raise Internal("a window block is outside the arena")
