"""Guessing tokens ahead, so that one step may bring several. Owns who guesses, how much, and that it costs nobody else.

Invariants: a guess changes no token. A step computes the last token and the guesses after it as one chunk; each token
is drawn from its own row with its own position's random number, as without guessing, and the guess after it counts
only where it is the token that was drawn. That is stricter than the acceptance of Leviathan et al. 2023 (algorithm 1):
not the distribution alone but every token is the one of plain decoding. Guesses take what decodes and prefills leave
of a step, and unused credit; they preempt nobody and make nobody wait. What a wrong guess wrote lies beyond the
computed tokens of its sequence: it is never read, never sealed and overwritten later. Called by the step loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from typing import Final, Protocol

import numpy as np

from common.logs import get_logger, where
from decoder.draft_pace import DraftPace
from decoder.scheduler import Plan, Scheduler
from decoder.sequence import IntArray, Sequence, SpeculationMode

NGRAM_TOKENS: Final = (3, 2)  # tried in this order
LOOKBACK_TOKENS: Final = 32_768  # how far back an earlier occurrence is looked for; bounds the time of a guess


class Drafter(Protocol):
    """A way of guessing."""

    def propose(self, wanted: Rows[tuple[Sequence, int]]) -> list[IntArray]:
        """For each (sequence, count) at most `count` token ids, int32, that may come next; empty is no guess."""


class PromptLookup:
    """Guesses what followed the last tokens where they occurred before (Saxena 2023, prompt lookup decoding)."""

    def propose(self, wanted: Rows[tuple[Sequence, int]]) -> list[IntArray]:
        """See Drafter."""
        return [lookup(sequence.tokens, count) for sequence, count in wanted]


def lookup(tokens: IntArray, count: int) -> IntArray:
    """What followed the latest earlier occurrence of the last 3, else 2, of `tokens` (int32 [N]); at most `count`."""
    tokens = tokens[-LOOKBACK_TOKENS:]
    for size in NGRAM_TOKENS:
        if len(tokens) <= size:
            continue
        ends = np.flatnonzero(tokens[size - 1 : -1] == tokens[-1]) + size  # where an occurrence would have ended
        for offset in range(2, size + 1):
            ends = ends[tokens[ends - offset] == tokens[-offset]]
        if len(ends):
            return tokens[ends[-1] : ends[-1] + count]
    return tokens[:0]


class Speculator:
    """Fills in the guesses of a plan."""

    def __init__(self, scheduler: Scheduler, drafters: Mapping[SpeculationMode, Drafter] | None = None) -> None:
        self._scheduler = scheduler
        self._drafters: dict[SpeculationMode, Drafter] = {SpeculationMode.PROMPT_LOOKUP: PromptLookup()}
        self._drafters.update(drafters or {})

    def draft(self, plan: Plan) -> None:
        """Guess for the decodes of `plan`, within the tokens that it leaves of a step."""
        spare = self._scheduler.mixed_chunk_tokens - len(plan.decodes) - sum(count for _, count in plan.chunks)
        wanted: dict[SpeculationMode, list[tuple[Sequence, int]]] = {}
        for sequence in plan.decodes:
            speculation = sequence.request.speculation
            if speculation is None:
                continue
            if sequence.pace is None:
                sequence.pace = DraftPace(speculation.draft_tokens)
            count = min(_useful(sequence), spare, self._scheduler.draft_room(sequence))
            if count < 1:
                sequence.pace.passed()
                continue
            spare -= count
            wanted.setdefault(speculation.mode, []).append((sequence, count))
        for mode, asked in wanted.items():
            self._ask(mode, asked, plan)

    def _ask(self, mode: SpeculationMode, asked: list[tuple[Sequence, int]], plan: Plan) -> None:
        try:
            guesses = self._drafters[mode].propose(asked)
        except Exception as error:  # noqa: BLE001 - without guesses the step is a plain one
            get_logger().error("draft_failed", mode=mode.value, error=type(error).__name__, frames=where(error))
            guesses = [sequence.tokens[:0] for sequence, _ in asked]
        for (sequence, _), guess in zip(asked, guesses, strict=True):
            count = self._scheduler.cover_drafts(sequence, len(guess))
            if count:
                plan.drafts[sequence.sequence_id] = guess[:count].copy()
            elif sequence.pace is not None:
                sequence.pace.passed()


def _useful(sequence: Sequence) -> int:
    # The step brings one token more than are guessed, and what comes after the last one is never computed.
    left = sequence.request.stopping.max_tokens - sequence.num_generated - 1
    return 0 if sequence.pace is None else min(sequence.pace.length, left)
