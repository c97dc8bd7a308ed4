"""Turns a plan into the model's input. Owns the step buffers and the order of rows: single tokens first, then chunks.

Invariant: the arrays of a batch are contiguous, and valid until the next `build`. Called by the engine once a step;
it chooses nothing and changes no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from common.layout import NULL_BLOCK
from decoder.batch import DrawColumns, StepBatch
from decoder.cache_api import Arena
from decoder.prompt_logprobs import ScoredRows
from decoder.scheduler import Plan
from decoder.sequence import IntArray, Sequence, SequenceId


class StepModel(Protocol):
    """What the engine needs of a model; `decoder.models` has the real one."""

    @property
    def config(self) -> Any:
        """Has `vocab_size`, `eos_token_ids` and `max_position`."""

    @property
    def layout(self) -> Any:
        """The KvLayout of its arena."""

    def forward(self, batch: StepBatch, arena: Arena) -> NDArray[np.float32]:
        """Logits, float32 [R, vocab], valid until the next call; writes keys and values of the batch's tokens."""

    def copy_blocks(self, arena: Arena, sources: IntArray, targets: IntArray, num_tokens: IntArray) -> None:
        """Copy the first `num_tokens[i]` tokens of block `sources[i]` to `targets[i]`."""


class Launched(Protocol):
    """A step that was queued on a device."""

    def wait(self) -> IntArray:
        """The drawn ids, int32 [R], -1 where a row was not finite; returns when the step has finished. Raises what went
        wrong in it."""


@runtime_checkable
class AheadModel(StepModel, Protocol):
    """A model whose steps can be queued, the next before the ids of the one before are known. Whatever is queued runs
    in order, copies of blocks and `forward` too."""

    def launch(self, batch: StepBatch, arena: Arena, draws: DrawColumns) -> Launched:
        """Queue a step and the drawing of its tokens. The arrays may be changed when this has returned."""

    def quiesce(self) -> None:
        """Returns when nothing that was queued can touch the arena any more. Never raises."""


@dataclass(frozen=True, slots=True)
class Work:
    """A batch, the sequences of its rows with the tokens each computes, and those whose logits come back.

    sampled: (sequence, its first row of the logits): one row, with `drafts` one more for each of them
    drafts:  tokens guessed to come after the last one of a sequence, int32
    scored:  rows that score tokens of prompts
    """

    batch: StepBatch
    parts: list[tuple[Sequence, int]]
    sampled: list[tuple[Sequence, int]]
    drafts: dict[SequenceId, IntArray]
    scored: list[ScoredRows]


def adapters_of(parts: Rows[tuple[Sequence, int]]) -> tuple[Any | None, ...]:
    """`StepBatch.adapters` of the sequences of a step."""
    adapters = tuple(sequence.adapter for sequence, _ in parts)
    return adapters if any(adapter is not None for adapter in adapters) else ()


class Runner:
    """Builds batches of up to `max_batch` sequences; the buffers grow to the largest step seen."""

    def __init__(self, max_batch: int, chunk_tokens: int) -> None:
        self._tokens = np.empty(max_batch + chunk_tokens, np.int32)
        self._positions = np.empty_like(self._tokens)
        self._tables = np.empty(max_batch * 16, np.int32)

    def build(self, plan: Plan) -> Work:
        """The batch of `plan`, which has work."""
        drafts = plan.drafts
        singles = [(sequence, 1) for sequence in plan.decodes if sequence.sequence_id not in drafts]
        singles += [(sequence, 1) for sequence, count in plan.chunks if count == 1]
        chunks = [(item, 1 + len(drafts[item.sequence_id])) for item in plan.decodes if item.sequence_id in drafts]
        chunks += [(sequence, count) for sequence, count in plan.chunks if count > 1]
        parts = singles + chunks
        starts = np.arange(len(parts) + 1, dtype=np.int32)
        if chunks:
            starts[len(singles) + 1 :] = len(singles) + np.cumsum([count for _, count in chunks])
        total = int(starts[-1])
        if total > len(self._tokens):
            self._tokens, self._positions = np.empty(total, np.int32), np.empty(total, np.int32)
        tokens, positions = self._tokens[:total], self._positions[:total]
        firsts = [sequence.launched for sequence, _ in parts]
        if singles:
            tokens[: len(singles)] = [sequence.next_token or 0 for sequence, _ in singles]
            positions[: len(singles)] = firsts[: len(singles)]
        starts_of = starts[len(singles) : -1].tolist()
        for (sequence, count), first, start in zip(chunks, firsts[len(singles) :], starts_of, strict=True):
            known = min(count, sequence.remaining)
            tokens[start : start + known] = sequence.tokens[first : first + known]
            tokens[start + known : start + count] = drafts.get(sequence.sequence_id, sequence.tokens[:0])
            positions[start : start + count] = np.arange(first, first + count, dtype=np.int32)
        contexts = positions[starts[1:] - 1] + 1
        sampled: list[tuple[Sequence, int]] = []
        scored: list[ScoredRows] = []
        logit_rows: list[int] = []
        for (sequence, count), end in zip(parts, starts[1:].tolist(), strict=True):
            if sequence.scores is not None:
                wanted = sequence.scores.missing(sequence.launched, count, sequence.num_prompt)
                if wanted:
                    scored.append(ScoredRows(sequence, wanted, len(logit_rows)))
                    start = end - count - sequence.launched
                    logit_rows += range(start + wanted.start, start + wanted.stop)
            guessed = count - sequence.remaining
            if guessed >= 0:  # its last known token is computed, and what is guessed after it
                sampled.append((sequence, len(logit_rows)))
                logit_rows += range(end - 1 - guessed, end)
        batch = StepBatch(
            token_ids=tokens,
            positions=positions,
            query_starts=starts,
            context_lens=contexts,
            block_tables=self._fill_tables(parts),
            logit_rows=np.array(logit_rows, np.int32),
            num_decodes=len(singles),
            adapters=adapters_of(parts),
        )
        return Work(batch, parts, sampled, drafts, scored)

    def _fill_tables(self, parts: Rows[tuple[Sequence, int]]) -> IntArray:
        width = max(sequence.num_blocks for sequence, _ in parts)
        size = len(parts) * width
        if size > len(self._tables):
            self._tables = np.empty(2 * size, np.int32)
        tables = self._tables[:size].reshape(len(parts), width)
        tables.fill(NULL_BLOCK)
        for row, (sequence, _) in zip(tables, parts, strict=True):
            row[: sequence.num_blocks] = sequence.table
        return tables
