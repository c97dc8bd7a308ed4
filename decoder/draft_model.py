"""A second, smaller model that guesses tokens, with keys and values of its own. Owns how far each sequence is computed.

Invariants: its blocks (`draft_blocks.py`) are private memory of this process, a fixed number of them, and belong to one
sequence each; a block beyond a sequence's right tokens is overwritten, never read. Its prompt is computed here again,
in chunks beside the steps, and a sequence is guessed for once it has caught up. Where blocks lack, sequences that are
not asked about now lose theirs; where they still lack, there is no guess. Guesses are greedy. Called by the speculator,
on the engine's thread; it knows no lease, and nothing of it reaches the cache manager.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from common.config import Options
from common.errors import InvalidArgument
from common.layout import NULL_BLOCK
from common.logs import get_logger
from common.memory import check_available
from decoder.batch import StepBatch
from decoder.cache_api import Arena
from decoder.draft_blocks import MOST_GUESSES, DraftBlocks, Table
from decoder.grouped_arena import private_arena, usable_blocks
from decoder.runner import StepModel
from decoder.sequence import IntArray, Sequence, SequenceId, SequenceState
from decoder.weights import WeightsDtype, load_model
from decoder.weights.loader import longest_context
from decoder.weights.source import open_source

NO_TOKENS: Final[IntArray] = np.empty(0, np.int32)


@dataclass(slots=True)
class _Draft:
    """How far a sequence is computed here: its first `computed` tokens, and after them those of `guessed`."""

    sequence: Sequence
    table: Table = field(default_factory=Table)
    computed: int = 0
    guessed: IntArray = field(default_factory=lambda: NO_TOKENS)

    def settle(self) -> None:
        """Count the guesses that the sequence has gained, and forget the others."""
        told = self.sequence.tokens[self.computed : self.computed + len(self.guessed)]
        right = self.guessed[: len(told)] == told
        self.computed += int(right.argmin()) if not right.all() else len(told)
        self.guessed = NO_TOKENS


class DraftModel:
    """A drafter over `model` and `arena`, which lies as the model's layout says and is nobody else's.

    At most `chunk_tokens` tokens are computed in each call to catch up.
    """

    def __init__(self, model: StepModel, arena: Arena, chunk_tokens: int) -> None:
        self._model = model
        self._arena = arena
        self._chunk_tokens = chunk_tokens
        self._max_position: int = model.config.max_position
        self._blocks = DraftBlocks(model.layout, arena)
        self._drafts: dict[SequenceId, _Draft] = {}  # the one asked for last comes last

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence has."""
        return self._blocks.num_free

    @property
    def num_free_window_blocks(self) -> int:
        """Window blocks that no sequence has; 0 where the model has no layer groups."""
        return self._blocks.num_free_windows

    def propose(self, wanted: Rows[tuple[Sequence, int]]) -> list[IntArray]:
        """See Drafter."""
        asked = {sequence.sequence_id for sequence, _ in wanted}
        self._drop_ended()
        guesses: dict[SequenceId, list[int]] = {}
        parts: list[tuple[_Draft, IntArray]] = []
        counts: dict[SequenceId, int] = {}
        budget = self._chunk_tokens
        for sequence, count in wanted:
            draft = self._draft_of(sequence)
            count = min(count, self._max_position - sequence.num_tokens, MOST_GUESSES)
            tokens = sequence.tokens[draft.computed :][: min(budget, self._blocks.most_tokens)]
            end = draft.computed + len(tokens)
            if count < 1 or not len(tokens) or not self._admit(draft, sequence.num_tokens + count, asked):
                continue
            self._blocks.cover(draft.table, end + (count if end == sequence.num_tokens else 0))
            budget -= len(tokens)
            parts.append((draft, tokens))
            if end == sequence.num_tokens:
                counts[sequence.sequence_id] = count
                guesses[sequence.sequence_id] = []
        while parts:
            chosen = self._compute(parts)
            parts = []
            for draft, token in chosen:
                name = draft.sequence.sequence_id
                if name not in guesses or token is None:
                    continue
                guesses[name].append(token)
                if len(guesses[name]) < counts[name]:
                    parts.append((draft, np.array([token], np.int32)))
        for name, tokens_ in guesses.items():
            self._drafts[name].guessed = np.array(tokens_[:-1], np.int32)  # the last one was not computed
            self._drafts[name].computed = self._drafts[name].sequence.num_tokens
        return [np.array(guesses.get(sequence.sequence_id, []), np.int32) for sequence, _ in wanted]

    # ---- blocks

    def _drop_ended(self) -> None:
        for name, draft in list(self._drafts.items()):
            if draft.sequence.state is SequenceState.FINISHED:
                self._drop(name)

    def _drop(self, name: SequenceId) -> None:
        self._blocks.release(self._drafts.pop(name).table)

    def _draft_of(self, sequence: Sequence) -> _Draft:
        draft = self._drafts.pop(sequence.sequence_id, None) or _Draft(sequence)
        self._drafts[sequence.sequence_id] = draft
        draft.settle()
        self._blocks.leave(draft.table, draft.computed)
        return draft

    def _admit(self, draft: _Draft, num_tokens: int, asked: set[SequenceId]) -> bool:
        request = draft.sequence.request
        most_tokens = max(num_tokens, len(request.prompt) + request.stopping.max_tokens)
        for name in [name for name in self._drafts if name not in asked]:
            if self._blocks.fits(draft.table, num_tokens, most_tokens):
                break
            self._drop(name)
        if not self._blocks.fits(draft.table, num_tokens, most_tokens):
            return False
        self._blocks.admit(draft.table, num_tokens, most_tokens)
        return True

    # ---- computing

    def _compute(self, parts: list[tuple[_Draft, IntArray]]) -> list[tuple[_Draft, int | None]]:
        """One forward pass; the likeliest token after each part, None where there is none."""
        parts = sorted(parts, key=lambda part: len(part[1]) > 1)
        try:
            logits = self._model.forward(self._batch(parts), self._arena)
        except Exception:
            for draft in self._drafts.values():  # what was guessed before is told to nobody
                draft.computed = min(draft.computed, draft.sequence.num_tokens)
            raise
        chosen: list[tuple[_Draft, int | None]] = []
        for (draft, tokens), row in zip(parts, logits, strict=True):
            draft.computed += len(tokens)
            chosen.append((draft, _likeliest(row)))
        return chosen

    def _batch(self, parts: list[tuple[_Draft, IntArray]]) -> StepBatch:
        counts = [len(tokens) for _, tokens in parts]
        starts = np.zeros(len(parts) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        firsts = [draft.computed for draft, _ in parts]
        tables = np.full((len(parts), max(len(draft.table.blocks) for draft, _ in parts)), NULL_BLOCK, np.int32)
        for row, (draft, _) in zip(tables, parts, strict=True):
            row[: len(draft.table.blocks)] = draft.table.blocks
        positions = [np.arange(first, first + count) for first, count in zip(firsts, counts, strict=True)]
        return StepBatch(
            token_ids=np.concatenate([tokens for _, tokens in parts]).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_starts=starts,
            context_lens=np.array(firsts, np.int32) + np.array(counts, np.int32),
            block_tables=tables,
            logit_rows=starts[1:] - np.int32(1),
            num_decodes=counts.count(1),
        )


def _likeliest(row: NDArray[np.float32]) -> int | None:
    best = int(row.argmax())
    return best if np.isfinite(row[best]) else None


def load_draft(
    options: Options, model: StepModel, dtype: WeightsDtype, progress: Callable[[str, float], None]
) -> DraftModel:
    """The draft model that the options name, ready to guess for `model`. Raises InvalidArgument where it cannot."""
    if options.draft_model is None:
        raise InvalidArgument("draft_model", "is not set; allowed is a GGUF file or a Hugging Face directory")
    if dtype == "file" and options.draft_model.is_dir():
        dtype = "int8"  # a directory has no bits of its own
    # Its context may be shorter than that of the model it guesses for.
    longest = longest_context(open_source(options.draft_model).config)
    draft = load_model(
        options.draft_model, dtype, options.block_tokens, options.kv_dtype, options.threads,
        lambda stage, fraction: progress(f"draft {stage}", fraction),
        min(options.max_context or 0, longest), options.weights_cache,
    )  # fmt: skip
    check_same_vocabulary(model, draft)
    num_blocks = num_draft_blocks(draft, options.draft_kv_bytes)
    check_available(draft.layout.arena_bytes(num_blocks), "draft_kv_bytes", "keys and values of the draft model")
    arena = private_arena(draft.layout, num_blocks)
    draft.warm_up(arena)
    get_logger().info(
        "draft_model_loaded", model=options.draft_model.name, blocks=usable_blocks(arena),
        window_blocks=draft.layout.num_window_blocks(num_blocks),
    )  # fmt: skip
    return DraftModel(draft, arena, options.chunk_tokens)


def num_draft_blocks(model: StepModel, kv_bytes: int) -> int:
    """Usable blocks of an arena that fits `kv_bytes`, with window blocks and null blocks. Raises InvalidArgument where
    there is none."""
    layout = model.layout
    count: int = layout.blocks_in(kv_bytes)
    while count > 0 and layout.arena_bytes(count) > kv_bytes:
        count -= 1
    if count < 1:
        raise InvalidArgument(
            "draft_kv_bytes", f"is {kv_bytes}; allowed is {layout.arena_bytes(1)} and more with this draft model"
        )
    return count


def check_same_vocabulary(model: StepModel, draft: StepModel) -> None:
    """Refuse a draft model whose ids mean something else. Raises InvalidArgument with what differs."""
    for what in ("vocab_size", "eos_token_ids", "bos_token_id"):
        ours, theirs = getattr(model.config, what), getattr(draft.config, what)
        if ours != theirs:
            raise InvalidArgument(
                "draft_model", f"has {what} {theirs}; allowed is that of the model, {ours}: both must share a tokenizer"
            )
