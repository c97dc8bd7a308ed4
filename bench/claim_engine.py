"""What `bench/claims.py` asks an engine: batches of requests of mixed lengths, and when their tokens came.

`ClaimEngine` runs them on the engine of `bench/local_engine.py`, in this process. Everything else here is arithmetic
over what came back.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from bench.local_engine import READ_AHEAD, STALL_SECONDS, LocalEngine
from bench.setting import Setting
from cli.errors import CommandError
from common.errors import TesseraError
from decoder.outputs import StepResult
from decoder.sequence import Request, RequestNumber, SamplingParams, StoppingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, the number of tokens of each answer, and how many answers are drawn."""

    prompt: tuple[int, ...]
    new_tokens: int
    samples: int = 1


@dataclass(slots=True)
class Timed:
    """When an `Ask` was handed in (`began`) and when the tokens of its sample 0 came, in seconds of one clock."""

    began: float
    cached_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]


@dataclass(frozen=True, slots=True)
class Batch:
    """All of a batch that was asked together; `peak_blocks` are the most blocks its sequences held at a time."""

    answers: tuple[Timed, ...]
    seconds: float
    steps: int
    peak_blocks: int


class Asker(Protocol):
    """An engine as the claims see it."""

    def run(self, asks: Sequence[Ask]) -> Batch:
        """Hand all in at once, and go on until all have ended."""

    def forget(self) -> None:
        """Empty the prefix cache."""


class _Sink:
    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.timed: dict[RequestNumber, Timed] = {}
        self.open = 0
        self.error: TesseraError | None = None
        self._told: dict[RequestNumber, int] = {}

    def deliver(self, result: StepResult) -> None:
        """Called by the engine at the end of a step."""
        now = time.perf_counter()
        for started in result.started:
            self.timed[started.number].cached_tokens = started.cached_tokens
        for token in result.tokens:
            if token.sample == 0:
                self.timed[token.number].arrivals.append(now)
            told = self._told[token.number] = self._told.get(token.number, 0) + 1
            if told % READ_AHEAD == 0:
                self._engine.engine.consumed(self, token.number, told)
        self.open -= len(result.ended) + len(result.failed)
        for failed in result.failed:
            self.error = failed.error


class ClaimEngine:
    """See Asker. Greedy for one sample, temperature 1 for several; nothing ends before its tokens are there. `model`:
    that of another engine, which does not compute meanwhile."""

    def __init__(self, setting: Setting, pool_bytes: int, max_batch: int, model: Any = None) -> None:
        self.local = LocalEngine(setting, pool_bytes, max_batch, model)
        self._numbers = itertools.count(1)

    def run(self, asks: Sequence[Ask]) -> Batch:
        """See Asker. Raises CommandError where a request fails or nothing moves."""
        sink, began = _Sink(self.local), time.perf_counter()
        for ask in asks:
            number = RequestNumber(next(self._numbers))
            sink.timed[number] = Timed(time.perf_counter())
            sampling = SamplingParams(1.0 if ask.samples > 1 else 0.0, seed=1, num_samples=ask.samples)
            prompt, stopping = np.array(ask.prompt, np.int32), StoppingParams(ask.new_tokens)
            self.local.engine.submit(Request(number, f"bench-{number}", b"", prompt, sampling, stopping), sink)
        sink.open = len(asks)
        steps, peak, moved = 0, 0, time.perf_counter()
        while sink.open and sink.error is None:
            if self.local.engine.step():
                steps, moved = steps + 1, time.perf_counter()
                snapshot = self.local.manager.snapshot()
                peak = max(peak, snapshot.active_blocks - snapshot.credit_blocks)
            elif time.perf_counter() - moved > STALL_SECONDS:
                raise CommandError(f"the engine stands still with {sink.open} requests open")
        seconds = time.perf_counter() - began
        if sink.error is not None:
            raise CommandError(f"the engine failed a request: {sink.error.message}")
        self.local.engine.step()  # tells the cache manager of the last releases
        return Batch(tuple(sink.timed.values()), seconds, steps, peak)

    def forget(self) -> None:
        """See Asker."""
        self.local.manager.evict(everything=True)


def in_waves(engine: Asker, asks: Sequence[Ask], size: int) -> tuple[float, int]:
    """Static batching: `size` requests at a time, the next ones when the longest has ended; until then a fixed batch
    computes all its rows, those of the others for nothing (Yu et al. 2022, section 3.1). Seconds and steps."""
    waves = []
    for begin in range(0, len(asks), size):
        wave = asks[begin : begin + size]
        longest = max(ask.new_tokens for ask in wave)
        waves.append(engine.run([replace(ask, new_tokens=longest) for ask in wave]))
    return sum(wave.seconds for wave in waves), sum(wave.steps for wave in waves)


def mixed_lengths(seed: int, count: int, mean: float, most: int) -> list[int]:
    """Lengths of answers as conversations have them: log-normal, most short and few very long, 1..`most`.

    A log-normal of sigma 1 has a mean of exp(mu + 1/2); ShareGPT's answers are near it (Kwon et al. 2023, figure 11:
    prompts of 161 tokens and answers of 338 on average, with a long tail).
    """
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - 0.5, 1.0, count)
    return [int(length) for length in np.clip(np.rint(drawn), 1, most)]
