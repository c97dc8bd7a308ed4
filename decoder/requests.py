"""The requests in the decoder and what their sinks are told. Owns the life of a request from submission to its end.

Invariant: a request is told of its start once, of each token once and of its end once, and of nothing after that; a
number is used by one request of a sink at a time. Called by the engine's thread alone; it holds no blocks and chooses
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import AlreadyExists, TesseraError
from decoder.outputs import (
    EndReason,
    Handle,
    Moments,
    Point,
    RequestEnded,
    RequestFailed,
    SampleEnded,
    SampleToken,
    Sink,
    Started,
    StepResult,
)
from decoder.prompt_logprobs import PromptScores
from decoder.sampler import Logprobs
from decoder.sequence import Request, RequestNumber, Sequence, SequenceId


class ActiveRequest:
    """One request that has not ended."""

    __slots__ = (
        "accepted", "base_tokens", "cached_tokens", "consumed", "cow_copies", "drafted", "generated", "has_started",
        "is_open", "is_paused", "moments", "open_samples", "request", "scores", "sequences", "sink",
    )  # fmt: skip

    def __init__(self, request: Request, sink: Sink, now_ns: int) -> None:
        self.request = request
        self.sink = sink
        self.moments = Moments(now_ns)
        self.cached_tokens = 0
        self.base_tokens: tuple[int, ...] = ()
        self.has_started = False
        self.is_open = True
        self.is_paused = False
        self.open_samples = set(range(request.sampling.num_samples))
        self.sequences: list[Sequence] = []
        self.generated = 0
        self.consumed = 0
        self.cow_copies = 0
        self.drafted = 0
        self.accepted = 0
        top = request.num_prompt_logprobs
        self.scores = None if top is None else PromptScores(top)

    def admit(self, cached_tokens: int, now_ns: int) -> None:
        """The first admission; later ones change nothing."""
        if self.moments.admitted_ns is None:
            self.moments.admitted_ns = now_ns
            self.cached_tokens = cached_tokens


class RequestTable:
    """All requests, by sink and number and by sequence, and the results of the step under way."""

    def __init__(self, window_tokens: int) -> None:
        self._window_tokens = window_tokens
        self._requests: dict[tuple[Sink, RequestNumber], ActiveRequest] = {}
        self._owners: dict[SequenceId, ActiveRequest] = {}
        self._results: dict[Sink, StepResult] = {}

    def __len__(self) -> int:
        return len(self._requests)

    # ---- finding

    def all(self) -> list[ActiveRequest]:
        """Every request, oldest first."""
        return list(self._requests.values())

    def find(self, sink: Sink, number: RequestNumber) -> ActiveRequest | None:
        """The request of that number, if it has not ended."""
        return self._requests.get((sink, number))

    def of(self, sequence: Sequence) -> ActiveRequest:
        """The request that a live sequence runs for."""
        return self._owners[sequence.sequence_id]

    # ---- living

    def open(self, request: Request, sink: Sink, now_ns: int) -> ActiveRequest:
        """Take a request in. Raises AlreadyExists while another one of that number has not ended."""
        key = (sink, request.number)
        if key in self._requests:
            raise AlreadyExists("this stream has a request of that number already", reason="REQUEST_NUMBER_IN_USE")
        active = ActiveRequest(request, sink, now_ns)
        self._requests[key] = active
        return active

    def add_sequence(self, active: ActiveRequest, sequence: Sequence) -> None:
        """A sequence runs for a request from now on."""
        active.sequences.append(sequence)
        sequence.scores = active.scores
        sequence.paused = active.is_paused
        self._owners[sequence.sequence_id] = active

    def drop_sequence(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        active = self._owners.pop(sequence.sequence_id, None)
        if active is not None:
            active.sequences.remove(sequence)

    def note(self, point: Point, sequences: Iterable[Sequence], now_ns: int) -> None:
        """The requests of these sequences pass a point on the way to their first tokens."""
        for sequence in sequences:
            active = self._owners.get(sequence.sequence_id)
            if active is not None and not active.has_started:
                active.moments.note(point, now_ns)

    def read(self, active: ActiveRequest, tokens: int) -> None:
        """The client has read `tokens` tokens in all; never goes back."""
        active.consumed = max(active.consumed, tokens)
        self._update_pause(active)

    # ---- telling

    def gain(self, active: ActiveRequest, sample: int, token: int, logprobs: Logprobs | None) -> None:
        """A sample gained a token."""
        result, number = self._result(active.sink), active.request.number
        if not active.has_started:
            active.has_started = True
            result.started.append(
                Started(
                    number,
                    active.cached_tokens,
                    active.moments,
                    len(active.request.prompt),
                    active.base_tokens,
                    () if active.scores is None else tuple(active.scores.values),
                    active.request.prompt,
                )
            )
        active.generated += 1
        result.tokens.append(SampleToken(number, sample, token, logprobs))
        self._update_pause(active)

    def end_sample(
        self, active: ActiveRequest, sample: int, reason: EndReason, stop_id: int | None, handle: Handle | None = None
    ) -> None:
        """A sample ended by itself; the last one ends the request."""
        if active.is_open and sample in active.open_samples:
            ended = SampleEnded(active.request.number, sample, reason, stop_id, handle)
            self._result(active.sink).finished.append(ended)
            self.leave_sample(active, sample)

    def leave_sample(self, active: ActiveRequest, sample: int) -> None:
        """A sample is over without a word about it (its reader ended it); the last one ends the request."""
        active.open_samples.discard(sample)
        if active.is_open and not active.open_samples:
            self._close(active)
            ended = RequestEnded(
                active.request.number, active.generated, active.cow_copies, active.drafted, active.accepted
            )
            self._result(active.sink).ended.append(ended)

    def fail(self, active: ActiveRequest, error: TesseraError) -> None:
        """A request ends with an error."""
        if active.is_open:
            self._close(active)
            self.refuse(active.sink, active.request.number, error)

    def forget(self, active: ActiveRequest) -> None:
        """A request ends and nobody is there to be told."""
        self._close(active)
        active.open_samples.clear()

    def refuse(self, sink: Sink, number: RequestNumber, error: TesseraError) -> None:
        """A request that was never taken in fails."""
        self._result(sink).failed.append(RequestFailed(number, error))

    def silence(self, sinks: Iterable[Sink]) -> None:
        """Drop what was to be told to sinks that are gone."""
        for sink in sinks:
            self._results.pop(sink, None)

    def deliver(self) -> None:
        """Tell every sink what the step brought, one result each."""
        results, self._results = self._results, {}
        for sink, result in results.items():
            sink.deliver(result)

    def _close(self, active: ActiveRequest) -> None:
        active.is_open = False
        self._requests.pop((active.sink, active.request.number), None)

    def _result(self, sink: Sink) -> StepResult:
        result = self._results.get(sink)
        if result is None:
            result = self._results[sink] = StepResult()
        return result

    def _update_pause(self, active: ActiveRequest) -> None:
        window = self._window_tokens * active.request.sampling.num_samples
        paused = active.generated - active.consumed > window
        if paused != active.is_paused:
            active.is_paused = paused
            for sequence in active.sequences:
                sequence.paused = paused
