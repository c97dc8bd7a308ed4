"""Log-probabilities of a prompt's own tokens. Owns which positions are scored, and the values.

Invariant: positions are scored once each and in order, from logits that were computed from this request's own tokens in
this request: such a request reads nothing from the cache. The logits of a position are gone after the step that
computed them, so no more than a step's rows of [rows, vocab] are ever held; `SCORED_TOKENS` bounds those. Called by the
runner, the step loop and the request table; it draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.sampler import Logprobs, logprobs
from decoder.sequence import Sequence

SCORED_TOKENS: Final = 64  # of one step, over all requests
MAX_ENTRIES: Final = 32_768  # of one request: tokens times (1 + top)


@dataclass(slots=True)
class PromptScores:
    """The scores of one prompt, token 1 first: the first token has nothing before it. `num_top` likeliest of each."""

    num_top: int
    values: list[Logprobs] = field(default_factory=list)

    def missing(self, first: int, count: int, num_prompt: int) -> range:
        """Of positions `first`..`first + count - 1`, those whose logits score a token and have not yet."""
        return range(max(first, len(self.values)), min(first + count, num_prompt - 1))


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows `row`.. of the logits are those of `positions` of a sequence's prompt."""

    sequence: Sequence
    positions: range
    row: int


def limit_scored(chunks: Rows[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
    """The chunks of a step, cut so that at most `SCORED_TOKENS` tokens are of prompts that are still to be scored."""
    left, limited = SCORED_TOKENS, []
    for sequence, count in chunks:
        if sequence.scores is not None and sequence.scores.missing(sequence.launched, count, sequence.num_prompt):
            count = min(count, left)
            left -= count
        if count:
            limited.append((sequence, count))
    return limited


def score_prompts(scored: Rows[ScoredRows], logits: NDArray[np.float32]) -> None:
    """Score what float32 [R, vocab] has; the same rows once more change nothing. Never raises over one sequence's
    numbers: those that are not finite fail at its draw."""
    for part in scored:
        scores, tokens = part.sequence.scores, part.sequence.tokens
        if scores is None:
            continue
        for index, position in enumerate(part.positions):
            if position == len(scores.values):
                row = logits[part.row + index]
                scores.values.append(logprobs(row, int(tokens[position + 1]), scores.num_top))
