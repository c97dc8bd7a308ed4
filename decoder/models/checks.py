"""Whether a batch fits a model and an arena: one check for the models whose kernels work on addresses.

A wrong block id would read or write another tenant's memory, so nothing is launched before this has passed.
"""

from __future__ import annotations

import numpy as np

from common.errors import Internal
from common.layout import NULL_BLOCK, KvLayout
from decoder.batch import StepBatch
from decoder.grouped_arena import GroupedArena


def check_batch(batch: StepBatch, *, num_blocks: int, block_tokens: int, max_position: int, vocab_size: int) -> None:
    """Raise Internal when `batch` does not fit an arena of `num_blocks` blocks (the null block included)."""
    tokens, sequences = batch.token_ids.size, batch.context_lens.size
    starts = batch.query_starts
    if batch.positions.size != tokens or starts.size != sequences + 1 or batch.block_tables.shape[0] != sequences:
        raise Internal("the arrays of a batch have different lengths")
    if not tokens:
        return
    lengths = np.diff(starts)
    if starts[0] != 0 or starts[-1] != tokens or lengths.min() < 1:
        raise Internal("query_starts are not prefix sums of positive lengths")
    if not 0 <= batch.num_decodes <= sequences or (lengths[: batch.num_decodes] != 1).any():
        raise Internal("the first num_decodes sequences must have one query token")
    if not np.array_equal(batch.positions[starts[1:] - 1] + 1, batch.context_lens):
        raise Internal("query tokens are not the last of their context")
    if not np.array_equal(batch.positions[starts[:-1]] + lengths, batch.context_lens):
        raise Internal("positions of a sequence do not follow each other")
    if batch.context_lens.max() > min(max_position, batch.block_tables.shape[1] * block_tokens):
        raise Internal("a context is longer than its block table or the model's range")
    if batch.block_tables.min() < 0 or batch.block_tables.max() >= num_blocks:
        raise Internal("a block table names a block outside the arena")
    if batch.token_ids.min() < 0 or batch.token_ids.max() >= vocab_size:
        raise Internal("a token id is outside the vocabulary")
    if batch.logit_rows.size and not 0 <= batch.logit_rows.min() <= batch.logit_rows.max() < tokens:
        raise Internal("a logit row is outside the batch")


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
