"""Which tokens a sequence has seen, for the penalties. Owns the counts of one sequence.

Invariant: the counts cover exactly the tokens of the sequence, cached prompt tokens included, so that neither a prefix
hit nor a neighbour nor a preemption changes them. Called by the sampler; changes no token.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from decoder.sequence import IntArray, SamplingParams

HIGHEST_LOGIT: Final = float(np.finfo(np.float32).max)


class SeenTokens:
    """Counts over the tokens of one sequence; `advance` before each use."""

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._num_seen = 0
        self._counts: dict[int, int] = {}  # token -> occurrences in the answer; prompt tokens have at least 0

    def advance(self, tokens: IntArray) -> None:
        """Count the tokens that were not counted yet. `tokens` are all tokens of the sequence, int32 [N]."""
        if self._num_seen < self._num_prompt:
            for token in np.unique(tokens[: self._num_prompt]).tolist():
                self._counts.setdefault(token, 0)
            self._num_seen = self._num_prompt
        for token in tokens[self._num_seen :].tolist():
            self._counts[token] = self._counts.get(token, 0) + 1
        self._num_seen = len(tokens)

    def after(self, tokens: IntArray) -> SeenTokens:
        """The counts as they would be with `tokens`, int32, appended to the answer; these stay as they are."""
        other = SeenTokens(self._num_prompt)
        other._num_seen = self._num_seen + len(tokens)
        other._counts = dict(self._counts)
        for token in tokens.tolist():
            other._counts[token] = other._counts.get(token, 0) + 1
        return other

    def apply(self, logits: NDArray[np.float32], params: SamplingParams) -> None:
        """Penalise float32 [vocab] in place.

        The repetition penalty (Keskar et al. 2019, CTRL, section 4.1) goes by prompt and answer; presence and
        frequency penalties go by the answer. What leaves the range of float32 stays at its end: a penalty close to 0
        makes a seen token with a positive logit certain, and never infinite.
        """
        tokens = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
        values = logits[tokens].astype(np.float64)
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / penalty, values * penalty)
        values -= params.frequency_penalty * counts
        values -= params.presence_penalty * (counts > 0)
        logits[tokens] = np.clip(values, -HIGHEST_LOGIT, HIGHEST_LOGIT)
