"""The input of one model step: a ragged batch of query tokens over block tables.

Built by `decoder/runner.py` from what the scheduler chose, read by the models and kernels. It is plain data:
it owns no block and knows no request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step of S sequences with T query tokens in all.

    Sequences with one query token (decodes) come first, `num_decodes` of them; prefill chunks follow. The query
    tokens of sequence s are rows `query_starts[s]:query_starts[s + 1]`; they are the last tokens of its context.

    token_ids:     int32 [T]    query tokens
    positions:     int32 [T]    position of each query token in its sequence
    query_starts:  int32 [S+1]  prefix sums of query lengths
    context_lens:  int32 [S]    tokens of the sequence after this step, queries included
    block_tables:  int32 [S, W] blocks of each sequence, padded with the null block (0)
    logit_rows:    int32 [R]    rows of T whose logits are wanted (ascending)
    adapters:      [S]          LoRA adapter of each sequence as the model has packed it, or None; empty: none has one
    """

    token_ids: IntArray
    positions: IntArray
    query_starts: IntArray
    context_lens: IntArray
    block_tables: IntArray
    logit_rows: IntArray
    num_decodes: int
    adapters: tuple[Any | None, ...] = ()


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """How the token of each logit row of a batch is drawn where the logits are, and which inputs were drawn there.

    temperatures: float64 [R]  at or below 1e-4: the likeliest token
    seeds:        uint64 [R]
    samples:      int32 [R]
    positions:    int32 [R]    that the tokens will have
    sources:      int32 [num_decodes] row of the draw before this one whose token is the decode's input; -1: `token_ids`
                  has it
    """

    temperatures: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    samples: IntArray
    positions: IntArray
    sources: IntArray
