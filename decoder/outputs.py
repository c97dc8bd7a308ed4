"""What a step brought, for one sink: typed values that the service turns into one message.

Invariant: for one request the order is started, tokens, finished, then ended or failed, and nothing follows those.
Made by the engine; a `Sink` is whoever listens (a gateway's stream, a bench, a test).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol

import numpy as np

from common.errors import TesseraError
from decoder.sampler import Logprobs
from decoder.sequence import IntArray, RequestNumber


class EndReason(Enum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"


Point = Literal["asked_ns", "admitted_ns", "copied_ns", "begun_ns", "computed_ns"]


@dataclass(slots=True)
class Moments:
    """When a request passed each point on its way to its first token, by the engine's clock; None where it did not.

    queued: it was checked and waits for the engine    asked: its lease was asked for    admitted: the engine has that
    copied: its copy-on-write was run (or it had none)    begun: the first step that computes it began
    computed: the step that gave its first token ended
    """

    queued_ns: int
    asked_ns: int | None = None
    admitted_ns: int | None = None
    copied_ns: int | None = None
    begun_ns: int | None = None
    computed_ns: int | None = None

    def note(self, point: Point, now_ns: int) -> None:
        """It passes a point now; what comes after a preemption changes nothing."""
        if getattr(self, point) is None:
            setattr(self, point, now_ns)

    @property
    def waited_ns(self) -> int:
        """From submission to first admission."""
        return 0 if self.admitted_ns is None else self.admitted_ns - self.queued_ns


@dataclass(frozen=True, slots=True)
class Started:
    """A request got its first token. `prompt_tokens` counts the kept conversation that it continues too, `base_tokens`
    are the last ones of that. `prompt_logprobs`, where asked for, are of every token of `prompt` but the first."""

    number: RequestNumber
    cached_tokens: int
    moments: Moments
    prompt_tokens: int = 0
    base_tokens: tuple[int, ...] = field(default=(), repr=False)
    prompt_logprobs: tuple[Logprobs, ...] = field(default=(), repr=False)
    prompt: IntArray = field(default_factory=lambda: np.empty(0, np.int32), repr=False, compare=False)


class SampleToken(NamedTuple):
    """One token that a sample gained. A tuple, as each step makes one for each sample."""

    number: RequestNumber
    sample: int
    token: int
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Handle:
    """By which a kept conversation of `num_tokens` tokens can be continued; 16 bytes."""

    handle: bytes = field(repr=False)
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SampleEnded:
    """A sample ended; `stop_id` is the token that did it, for STOP. `handle` continues what is kept of it."""

    number: RequestNumber
    sample: int
    reason: EndReason
    stop_id: int | None
    handle: Handle | None = None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """All samples of a request have ended."""

    number: RequestNumber
    completion_tokens: int
    cow_copies: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request ended with an error."""

    number: RequestNumber
    error: TesseraError


@dataclass(slots=True)
class StepResult:
    """Everything one step brought to one sink."""

    started: list[Started] = field(default_factory=list)
    tokens: list[SampleToken] = field(default_factory=list)
    finished: list[SampleEnded] = field(default_factory=list)
    ended: list[RequestEnded] = field(default_factory=list)
    failed: list[RequestFailed] = field(default_factory=list)


class Sink(Protocol):
    """Receives results from the engine's thread, at most one a step."""

    def deliver(self, result: StepResult) -> None:
        """Take a result. Must not block and must not raise."""
