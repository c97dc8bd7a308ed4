"""`DecodeService`: one stream for each gateway, one message a step, every request of the gateway on it.

Invariants: the welcome comes first; a bad submission fails alone; when a stream ends, whichever way, its requests are
cancelled. Converts step results to protobuf and decides nothing. Runs on the IO event loop; results come from the
engine's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from common.errors import InvalidArgument, ResourceExhausted, Unavailable
from common.interceptors import failure_fields
from decoder.adapter_pool import AdapterPool
from decoder.engine import Engine
from decoder.outputs import EndReason, Moments, SampleToken, StepResult
from decoder.sampler import Logprobs
from decoder.sequence import RequestNumber
from decoder.submissions import Submissions
from decoder.validation import ServedModel
from tessera.decode.v1 import decode_pb2, decode_pb2_grpc
from tessera.inference.v1 import inference_pb2

SERVICE_NAME: Final = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name
# Windows bound what waits for a gateway that stands still; this bounds one whose windows are never reached.
MAX_WAITING_RESULTS: Final = 16_384
JOINED_BYTES: Final = 4 * 1024 * 1024  # a message grows no more beyond this
_REASONS: Final = {
    EndReason.STOP: inference_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True)
class Backend:
    """What serves the streams, once the model is loaded."""

    engine: Engine
    model: ServedModel
    welcome: decode_pb2.Welcome
    adapters: AdapterPool | None = None


class GatewayStream:
    """The sink of one gateway: results of the engine wait here for the stream, joined where it is slow."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int = MAX_WAITING_RESULTS) -> None:
        self._loop = loop
        self._limit = limit
        self._waiting: deque[StepResult] = deque()
        self._ready = asyncio.Event()
        self._closed = False

    def deliver(self, result: StepResult) -> None:
        """See Sink; from any thread."""
        self._waiting.append(result)
        self._wake()

    def close(self) -> None:
        """No more will come: `next` ends."""
        self._closed = True
        self._wake()

    async def next(self) -> decode_pb2.StepOutput | None:
        """What has come since the last call, in one message; None at the end. Raises where far too much has."""
        while not self._waiting:
            if self._closed:
                return None
            self._ready.clear()
            if not self._waiting and not self._closed:
                await self._ready.wait()
        if len(self._waiting) > self._limit:
            raise ResourceExhausted(
                "the gateway does not read its stream", subject="results", needed=len(self._waiting), usable=self._limit
            )
        output = decode_pb2.StepOutput()
        while self._waiting and output.ByteSize() < JOINED_BYTES:
            add_result(output, self._next_part())
        return output

    def _next_part(self) -> StepResult:
        # Starts with the log-probabilities of long prompts go one by one: together they may pass a message's limit.
        first = self._waiting[0]
        if len(first.started) > 1 and any(started.prompt_logprobs for started in first.started):
            return StepResult(started=[first.started.pop(0)])
        return self._waiting.popleft()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self._ready.set)


class DecodeService(decode_pb2_grpc.DecodeServiceServicer):
    """Serves gateways once `backend` is set; until then it answers UNAVAILABLE."""

    def __init__(self) -> None:
        self.backend: Backend | None = None

    async def Connect(  # noqa: N802 - the name of the RPC
        self, request_iterator: AsyncIterator[decode_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[decode_pb2.ConnectResponse]:
        """Carry a gateway's requests until either side ends the stream."""
        backend = self.backend
        if backend is None:
            raise Unavailable("the decoder is loading its model", reason="LOADING")
        stream = GatewayStream(asyncio.get_running_loop())
        # The generator may be left suspended when a call dies in mid-send; this callback comes in every case.
        context.add_done_callback(lambda _: backend.engine.disconnect(stream))
        reading = asyncio.create_task(self._read(backend, stream, request_iterator))
        try:
            yield decode_pb2.ConnectResponse(welcome=backend.welcome)
            while (output := await stream.next()) is not None:
                yield decode_pb2.ConnectResponse(step=output)
            await reading  # raises what the gateway did wrong
        finally:
            reading.cancel()
            backend.engine.disconnect(stream)

    async def _read(
        self, backend: Backend, stream: GatewayStream, requests: AsyncIterator[decode_pb2.ConnectRequest]
    ) -> None:
        submissions = Submissions(backend.engine, backend.model, stream, backend.adapters)
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "submit":
                        submissions.submit(request.submit)
                    case "cancel":
                        submissions.cancel(request.cancel)
                    case "vocabulary":
                        submissions.tell_vocabulary(request.vocabulary)
                    case "consumed":
                        number = RequestNumber(request.consumed.request)
                        backend.engine.consumed(stream, number, request.consumed.tokens)
                    case _:
                        raise InvalidArgument("message", "is not set, or not one of this build")
        finally:
            submissions.close()
            stream.close()


def add_result(output: decode_pb2.StepOutput, result: StepResult) -> None:
    """Add what a step brought to a message; the order within each list is that of the steps."""
    for started in result.started:
        output.started.add(
            request=started.number,
            cached_tokens=started.cached_tokens,
            queue_nanoseconds=max(0, started.moments.waited_ns),
            base_tokens=started.base_tokens,
            prompt_tokens=started.prompt_tokens,
            prompt_logprobs=[
                _token_logprob(token, value)
                for token, value in zip(started.prompt[1:].tolist(), started.prompt_logprobs, strict=False)
            ],
            moments=_moments(started.moments),
        )
    for token in result.tokens:
        _add_token(output, token)
    for finished in result.finished:
        output.finished.add(
            request=finished.number,
            index=finished.sample,
            reason=_REASONS[finished.reason],
            stop_token_id=finished.stop_id,
            session_handle=b"" if finished.handle is None else finished.handle.handle,
            session_tokens=0 if finished.handle is None else finished.handle.num_tokens,
        )
    for ended in result.ended:
        output.ended.add(
            request=ended.number,
            completion_tokens=ended.completion_tokens,
            cow_copies=ended.cow_copies,
            drafted_tokens=ended.drafted_tokens,
            accepted_tokens=ended.accepted_tokens,
        )
    for failed in result.failed:
        retry = failed.error.retry_after_seconds
        output.failed.add(
            request=failed.number,
            retry_after_nanoseconds=0 if retry is None else int(retry * 1e9),
            **failure_fields(failed.error),
        )


def _moments(moments: Moments) -> decode_pb2.Moments:
    return decode_pb2.Moments(
        queued_nanoseconds=moments.queued_ns,
        asked_nanoseconds=moments.asked_ns or 0,
        admitted_nanoseconds=moments.admitted_ns or 0,
        copied_nanoseconds=moments.copied_ns or 0,
        begun_nanoseconds=moments.begun_ns or 0,
        computed_nanoseconds=moments.computed_ns or 0,
    )


def _add_token(output: decode_pb2.StepOutput, token: SampleToken) -> None:
    item = output.tokens.add(request=token.number, index=token.sample, token_ids=(token.token,))
    if token.logprobs is not None:
        item.logprobs.append(_token_logprob(token.token, token.logprobs))


def _token_logprob(token: int, value: Logprobs) -> inference_pb2.TokenLogprob:
    top = [inference_pb2.TopLogprob(token_id=other, logprob=logprob) for other, logprob in value.top]
    return inference_pb2.TokenLogprob(token_id=token, logprob=value.chosen, top=top)
