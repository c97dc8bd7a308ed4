"""Beam search without blocks, steps or sequences: which hypotheses go on, which are finished, and when it is over.

The semantics are those of `transformers` 5 with `early_stopping=False`. A hypothesis scores the sum of the
log-probabilities of its tokens, that of the end included, divided by (number of its tokens) ** length_penalty. In each
round the best `width` continuations of all running hypotheses are looked at: those that end are finished; the best
`width` that do not end go on. It is over when `width` are finished and the best one that goes on, scored at its present
length, is not better than the worst of those, or at `max_tokens`, where the best `width` are finished as they are.
Of equal scores the earlier hypothesis, then the smaller token id comes first: the search is deterministic.
Pure; used by `beams.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decoder.sampler import FloatRow, Logprobs, largest
from decoder.sequence import BeamParams, StoppingParams


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Tokens so far, with their log-probabilities where those are asked for. `total` is the sum of the latter; `score`
    is that of a finished one; `stop_id` ended it, or None for the length."""

    tokens: tuple[int, ...]
    total: float
    logprobs: tuple[Logprobs, ...] = ()
    score: float = 0.0
    stop_id: int | None = None


@dataclass(frozen=True, slots=True)
class Expansion:
    """The continuations of one hypothesis that matter: the likeliest, and the likeliest of those that do not end it.

    tokens:   int64 [N] token ids, different ones
    logprobs: float64 [N]
    top:      the likeliest tokens with their log-probabilities, as many as were asked for
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """Running hypothesis `parent` goes on with `token`."""

    parent: int
    token: int


class BeamSearch:
    """One search. `running` are the hypotheses that go on, `finished` the best that are finished, both best first."""

    def __init__(
        self,
        params: BeamParams,
        stopping: StoppingParams,
        bad_ids: frozenset[int] = frozenset(),
        num_logprobs: int | None = None,
    ) -> None:
        self._params = params
        self._stopping = stopping
        self._stop_ids = np.array(sorted(stopping.stop_ids), np.int64)
        self._bad_ids = np.array(sorted(bad_ids), np.int64)
        self._num_logprobs = num_logprobs
        self.running: list[Hypothesis] = [Hypothesis((), 0.0)]
        self.finished: list[Hypothesis] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of each running hypothesis."""
        return len(self.running[0].tokens) if self.running else 0

    def expand(self, row: FloatRow) -> Expansion | None:
        """The continuations under float32 [vocab] raw logits; None where they are not finite."""
        maximum = float(row.max())
        if not np.isfinite(maximum):
            return None
        total = maximum + float(np.log(np.exp(row - np.float32(maximum)).sum(dtype=np.float64)))
        width = min(self._params.width, len(row))
        may_end = self.num_tokens >= self._stopping.min_tokens
        allowed = row.copy()
        allowed[self._bad_ids] = -np.inf
        going_on = allowed.copy()
        going_on[self._stop_ids] = -np.inf
        tokens = largest(going_on, width)
        if may_end:
            tokens = np.union1d(tokens, largest(allowed, width))
        tokens = tokens[np.isfinite((allowed if may_end else going_on)[tokens])]
        likeliest = largest(row, min(self._num_logprobs or 0, len(row)))
        top = tuple((int(token), float(row[token]) - total) for token in likeliest)
        return Expansion(tokens, row[tokens].astype(np.float64) - total, top)

    def advance(self, expansions: Rows[Expansion]) -> list[Choice]:
        """One round: `expansions` of the running hypotheses, in order. The choices make the new running ones, in order;
        none means that the search is over and `finished` is the answer."""
        order = self._ranked(expansions)
        stops = self._stopping.stop_ids
        is_last = self.num_tokens + 1 >= self._stopping.max_tokens
        going_on: list[Hypothesis] = []
        choices: list[Choice] = []
        for place, (total, parent, token) in enumerate(order):
            is_stop = token in stops
            if not (is_stop or is_last):
                if len(going_on) < self._params.width:
                    going_on.append(self._longer(parent, token, total, expansions[parent]))
                    choices.append(Choice(parent, token))
            elif place < self._params.width:
                self._finish(self._longer(parent, token, total, expansions[parent]), token if is_stop else None)
        self.running = going_on
        return [] if self._is_over() else choices

    def _ranked(self, expansions: Rows[Expansion]) -> list[tuple[float, int, int]]:
        # (sum of log-probabilities, parent, token), best first.
        candidates = [
            (self.running[parent].total + logprob, parent, token)
            for parent, expansion in enumerate(expansions)
            for token, logprob in zip(expansion.tokens.tolist(), expansion.logprobs.tolist(), strict=True)
        ]
        return sorted(candidates, key=lambda item: (-item[0], item[1], item[2]))

    def _longer(self, parent: int, token: int, total: float, expansion: Expansion) -> Hypothesis:
        before = self.running[parent]
        logprobs: tuple[Logprobs, ...] = ()
        if self._num_logprobs is not None:
            chosen = float(expansion.logprobs[int(np.flatnonzero(expansion.tokens == token)[0])])
            logprobs = (*before.logprobs, Logprobs(chosen, expansion.top))
        return Hypothesis((*before.tokens, token), total, logprobs)

    def _finish(self, hypothesis: Hypothesis, stop_id: int | None) -> None:
        score = hypothesis.total / len(hypothesis.tokens) ** self._params.length_penalty
        done = Hypothesis(hypothesis.tokens, hypothesis.total, hypothesis.logprobs, score, stop_id)
        self.finished.append(done)
        self.finished.sort(key=lambda item: -item.score)  # stable: of equals the one that was finished first
        del self.finished[self._params.width :]

    def _is_over(self) -> bool:
        if not self.running:
            return True
        if len(self.finished) < self._params.width:
            return False
        best: float = self.running[0].total / self.num_tokens**self._params.length_penalty
        return best <= self.finished[-1].score
