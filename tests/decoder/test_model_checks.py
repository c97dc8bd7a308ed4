"""A batch that does not fit the model or the arena is refused before a kernel sees an address, and writes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import Internal
from decoder.batch import StepBatch
from decoder.grouped_arena import private_arena
from decoder.weights.loader import load_model
from tests.tiny_models import make_tiny_llama


def ints(*values: int) -> NDArray[np.int32]:
    """An int32 array."""
    return np.array(values, np.int32)


RIGHT = StepBatch(ints(5, 6, 7), ints(0, 1, 2), ints(0, 3), ints(3), np.array([[1]], np.int32), ints(2), 0)


def test_wrong_batches_are_refused_and_write_nothing(tmp_path: Path) -> None:
    """Each wrong array by itself, with what is said about it; the right batch passes and writes."""
    model = load_model(make_tiny_llama(tmp_path / "tiny"), "float32", 16)
    arena = private_arena(model.layout, 2)
    before = arena.copy()
    wrong = [
        (replace(RIGHT, positions=ints(0, 1)), "different lengths"),
        (replace(RIGHT, query_starts=ints(0, 2)), "prefix sums"),
        (replace(RIGHT, query_starts=ints(0, 4)), "prefix sums"),
        (replace(RIGHT, query_starts=ints(1, 3)), "prefix sums"),
        (replace(RIGHT, num_decodes=1), "one query token"),
        (replace(RIGHT, num_decodes=2), "one query token"),
        (replace(RIGHT, context_lens=ints(4)), "last of their context"),
        (replace(RIGHT, positions=ints(1, 1, 2)), "follow each other"),
        (replace(RIGHT, positions=ints(0, 2, 2)), "follow each other"),
        (replace(RIGHT, block_tables=np.array([[3]], np.int32)), "outside the arena"),
        (replace(RIGHT, block_tables=np.array([[-1]], np.int32)), "outside the arena"),
        (replace(RIGHT, token_ids=ints(5, 6, 512)), "outside the vocabulary"),
        (replace(RIGHT, logit_rows=ints(3)), "outside the batch"),
    ]
    for batch, said in wrong:
        with pytest.raises(Internal, match=said):
            model.forward(batch, arena)
        assert np.array_equal(arena, before)
    assert np.isfinite(model.forward(RIGHT, arena)).all()
    assert not np.array_equal(arena, before)
