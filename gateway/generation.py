"""One request's stream: what the decoder brings becomes what the client sees, in the order the contract gives.

Owns that order: accepted with the first token, deltas, exactly one finished for each sample, one summary last; and
the counting of tokens, up to and including the one that completed a stop. A sample that meets a stop string is ended
here and cancelled at the decoder. Made by `gateway/service.py` for each call; it knows no gRPC call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from common.errors import Internal, TesseraError
from common.logs import get_logger
from gateway.decode_stream import DecodeStream, Gain, RequestEnd, SampleEnd, Start, Update
from gateway.detokenizer import Detokenizer
from gateway.sample import Sample
from gateway.sessions import handle_bytes, handle_text
from gateway.stops import StopAutomaton, StopScanner
from gateway.validation import Plan
from tessera.decode.v1 import decode_pb2
from tessera.inference.v1 import inference_pb2 as pb

NO_ENDS: Final[dict[int, SampleEnd]] = {}
CONFIRM_SECONDS: Final = 10.0  # how long a decoder may take to confirm samples that were ended here


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came and when it was sent on, in seconds of the gateway's clock."""

    arrived: float
    submitted: float


class Generation:
    """The life of one request after it was sent to a decoder. `clock` gives seconds and never goes back."""

    def __init__(
        self,
        stream: DecodeStream,
        plan: Plan,
        *,
        request_id: str,
        tenant: str,
        prompt_tokens: int,
        new_detokenizer: Callable[[], Detokenizer],
        arrival: Arrival,
        clock: Callable[[], float],
        cut: Callable[[bytes, int], Awaitable[None]] | None = None,
    ) -> None:
        automaton = StopAutomaton(plan.stops) if plan.stops else None
        self._samples = [
            Sample(
                new_detokenizer(), StopScanner(automaton, include_stop=plan.include_stop) if automaton else None, plan
            )
            for _ in range(plan.num_samples)
        ]
        self._num_open = plan.num_samples
        self._stream = stream
        self._plan = plan
        self.request_id = request_id
        self._tenant = tenant
        self._prompt_tokens = prompt_tokens
        self._goes_on = bool(plan.session.handle) and not prompt_tokens
        self._arrival = arrival
        self._clock = clock
        self._cut = cut
        self._start: Start | None = None
        self._first_token: float | None = None
        self._ended = RequestEnd(cow_copies=0)

    async def run(self, write: Callable[[pb.GenerateResponse], Awaitable[None]]) -> None:
        """Send all events of the stream. Raises the error that ended the request, if one did.

        `write` waits while the client does not read; until it returns nothing more is taken from the decoder.
        """
        while True:
            update = await self._next()
            for response in self._apply(update):
                if update.sample_ends and response.finished.session_handle:
                    await self._settle(response.finished)
                await write(response)
            if update.end is not None:
                self._ended = update.end
                break
            # Only now has the client's side taken what came before.
            self._stream.consumed(update.num_tokens)
        if not self._has_ended:
            raise Internal("a decoder ended the request before its samples")
        await write(pb.GenerateResponse(summary=self._summary()))

    @property
    def completion_tokens(self) -> int:
        """Tokens that count, over all samples, so far."""
        return sum(sample.num_tokens for sample in self._samples)

    def counters(self) -> dict[str, object]:
        """What a log may say of this request."""
        return {
            "request_id": self.request_id,
            "tenant": self._tenant,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": 0 if self._start is None else self._start.cached_tokens,
            "completion_tokens": self.completion_tokens,
        }

    def moments(self) -> dict[str, int]:
        """When it passed each point on its way to its first token, in nanoseconds of the machine's monotonic clock; 0
        where it did not."""
        at = decode_pb2.Moments() if self._start is None else self._start.moments
        first = 0.0 if self._first_token is None else self._first_token
        return {
            "arrived_ns": int(self._arrival.arrived * 1e9),
            "submitted_ns": int(self._arrival.submitted * 1e9),
            "queued_ns": at.queued_nanoseconds,
            "asked_ns": at.asked_nanoseconds,
            "admitted_ns": at.admitted_nanoseconds,
            "copied_ns": at.copied_nanoseconds,
            "begun_ns": at.begun_nanoseconds,
            "computed_ns": at.computed_nanoseconds,
            "first_token_ns": int(first * 1e9),
        }

    @property
    def _has_ended(self) -> bool:
        return self._num_open == 0

    async def _next(self) -> Update:
        if not self._has_ended:
            return await self._stream.next()
        # Every sample is finished for the client; the decoder's last word only adds counters.
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                return await self._stream.next()
        except (TimeoutError, TesseraError) as error:
            get_logger().warning("end_unconfirmed", request_id=self.request_id, error=type(error).__name__)
            return Update(end=RequestEnd(cow_copies=0))

    def _apply(self, update: Update) -> list[pb.GenerateResponse]:
        responses: list[pb.GenerateResponse] = []
        if update.start is not None:
            self._start = update.start
            self._prompt_tokens = update.start.prompt_tokens or self._prompt_tokens
            if self._goes_on:  # the answer goes on where the one before ended, in mid-word perhaps
                for sample in self._samples:
                    sample.prime(update.start.base_tokens)
        ends = {end.index: end for end in update.sample_ends} if update.sample_ends else NO_ENDS
        if update.gains and self._first_token is None:
            if self._start is None:
                raise Internal("a decoder sent tokens before the start of their request")
            self._first_token = self._clock()
            responses.append(pb.GenerateResponse(accepted=self._accepted(self._start)))
        for gain in update.gains:
            self._gain(gain, ends.get(gain.index), responses)
        for end in update.sample_ends:
            responses += self._end(end)
        return responses

    def _gain(self, gain: Gain, end: SampleEnd | None, responses: list[pb.GenerateResponse]) -> None:
        # Comes once a token: messages are filled in field by field, which takes a third of the time that keywords do.
        sample = self._sample(gain.index)
        if sample.has_ended or sample.stop is not None:  # came before the decoder heard that it is cancelled
            return
        text, used, stop = sample.feed(gain.token_ids, None if end is None else end.stop_token_id)
        if end is not None and stop is None:
            tail, stop = sample.flush()
            text += tail
        response = pb.GenerateResponse()
        delta = response.delta
        delta.index, delta.text = gain.index, text
        delta.token_ids.extend(gain.token_ids[:used])
        if self._plan.wants_logprobs:
            delta.logprobs.extend(gain.logprobs[:used])
        responses.append(response)
        if stop is not None and end is None and self._plan.session.keep_seconds:
            sample.stop = stop
            self._stream.cancel_sample(gain.index, finish=True)
        elif stop is not None:
            responses.append(self._finish(gain.index, pb.FINISH_REASON_STOP, stop, end))
            if end is None:
                self._stream.cancel_sample(gain.index)

    def _end(self, end: SampleEnd) -> list[pb.GenerateResponse]:
        sample = self._sample(end.index)
        if sample.has_ended:
            return []
        if sample.stop is not None:
            return [self._finish(end.index, pb.FINISH_REASON_STOP, sample.stop, end)]
        responses = []
        text, stop = sample.flush()  # nothing, where the last tokens came in the same step
        if text:
            responses.append(pb.GenerateResponse(delta=pb.Delta(index=end.index, text=text)))
        if stop is not None:
            responses.append(self._finish(end.index, pb.FINISH_REASON_STOP, stop, end))
        else:
            token = "" if end.stop_token_id is None else str(end.stop_token_id)
            responses.append(self._finish(end.index, end.reason, token, end))
        return responses

    def _finish(self, index: int, reason: int, stop: str, end: SampleEnd | None) -> pb.GenerateResponse:
        self._samples[index].has_ended = True
        self._num_open -= 1
        if reason not in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_ABORTED):
            raise Internal("a decoder ended a sample for a reason that is not known")
        name = pb.FinishReason.Name(reason)
        finished = pb.Finished(index=index, reason=name, stop=stop)
        if end is not None and end.session_handle:
            finished.session_handle, finished.session_tokens = handle_text(end.session_handle), end.session_tokens
        return pb.GenerateResponse(finished=finished)

    async def _settle(self, finished: pb.Finished) -> None:
        """Cut a kept conversation to what its client was given: the decoder may have gone on past a stop string."""
        given = self._prompt_tokens + self._samples[finished.index].num_tokens
        if finished.session_tokens <= given or self._cut is None:
            return
        try:
            await self._cut(handle_bytes(finished.session_handle), given)
            finished.session_tokens = given
        except TesseraError as error:
            get_logger().warning("session_not_cut", request_id=self.request_id, reason=error.reason)
            finished.ClearField("session_handle")
            finished.ClearField("session_tokens")

    def _sample(self, index: int) -> Sample:
        if not 0 <= index < len(self._samples):
            raise Internal("a decoder named a sample that was not asked for")
        return self._samples[index]

    def _accepted(self, start: Start) -> pb.Accepted:
        return pb.Accepted(
            request_id=self.request_id,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=start.cached_tokens,
            prompt_logprobs=start.prompt_logprobs,
        )

    def _summary(self) -> pb.Summary:
        start = self._start or Start(0, 0.0)
        now, arrival = self._clock(), self._arrival
        first = now if self._first_token is None else self._first_token
        queued = arrival.submitted - arrival.arrived + start.queue_seconds
        return pb.Summary(
            usage=pb.Usage(
                prompt_tokens=self._prompt_tokens,
                cached_tokens=start.cached_tokens,
                completion_tokens=self.completion_tokens,
                cow_copies=self._ended.cow_copies,
                drafted_tokens=self._ended.drafted_tokens,
                accepted_tokens=self._ended.accepted_tokens,
            ),
            timing=pb.Timing(
                queue_seconds=queued,
                prefill_seconds=max(0.0, first - arrival.arrived - queued),
                decode_seconds=now - first,
                ttft_seconds=first - arrival.arrived,
                total_seconds=now - arrival.arrived,
            ),
        )
