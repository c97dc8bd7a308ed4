"""The client of one decoder: one multiplexed stream for all requests, opened again whenever it breaks.

Owns the dispatch of step outputs to requests and the rule that a request lives and dies with the stream it was sent
on: when that is lost, all of its requests fail with UNAVAILABLE. A decoder that answers no health check gets no new
requests, and after some more of them its stream is given up. A request never waits for another's reader, as handing
over never blocks. Used by `gateway/decoder_pool.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from common.errors import TesseraError, Unavailable
from common.interceptors import code_of, make_error
from common.logs import get_logger
from common.rpc import open_channel
from gateway.decode_stream import DecodeStream, RequestEnd, SampleEnd, Start, Update
from gateway.liveness import DEFAULT_PATIENCE, Liveness, Patience
from gateway.outbox import Outbox
from tessera.decode.v1 import decode_pb2, decode_pb2_grpc

RECONNECT_SECONDS: Final = 0.1
MAX_RECONNECT_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """What a decoder serves, from its welcome."""

    name: str
    vocab_size: int
    max_context_tokens: int
    block_tokens: int
    dtype: str
    kv_dtype: str


@dataclass(slots=True)
class _Link:
    """One life of the stream."""

    model: DecoderModel
    max_batch: int
    window_tokens: int
    outbox: Outbox
    streams: dict[int, DecodeStream]
    liveness: Liveness
    last_number: int = 0
    knows_vocabulary: bool = False


class DecoderClient:
    """The decoder with number `index` behind `target`. `changed` is called when it comes or goes."""

    def __init__(
        self, index: int, target: str, secret: str, changed: Callable[[], None], patience: Patience = DEFAULT_PATIENCE
    ) -> None:
        self.index = index
        self._target = target
        self._secret = secret
        self._changed = changed
        self._patience = patience
        self._link: _Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_refusal = ""
        self._log = get_logger().bind(decoder=index)

    @property
    def model(self) -> DecoderModel | None:
        """What it serves now; None while it is away or silent."""
        return None if self._link is None or self._link.liveness.is_silent else self._link.model

    @property
    def load(self) -> int:
        """Samples that it runs or holds for us."""
        return 0 if self._link is None else sum(stream.num_samples for stream in self._link.streams.values())

    @property
    def capacity(self) -> int:
        """Samples that it runs at once."""
        return 0 if self._link is None else self._link.max_batch

    def start(self) -> None:
        """Begin to connect, and go on for ever."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the stream; its requests fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def submit(
        self, submit: decode_pb2.Submit, num_samples: int, vocabulary: decode_pb2.Vocabulary | None = None
    ) -> DecodeStream:
        """Send a request (its number is filled in), and before it the `vocabulary` that it needs, if that was not sent
        yet. Raises Unavailable while the decoder is away or silent."""
        link = self._link
        if link is None or link.liveness.is_silent:
            raise decoder_away()
        link.last_number += 1
        submit.request = link.last_number
        stream = DecodeStream(
            link.last_number, num_samples, link.window_tokens, link.outbox, lambda number: _forget(link, number)
        )
        link.streams[stream.number] = stream
        if vocabulary is not None and not link.knows_vocabulary:
            link.outbox.vocabulary(vocabulary)
            link.knows_vocabulary = True
        link.outbox.submit(submit)
        return stream

    def abandon_all(self, error: TesseraError) -> None:
        """End every request with `error`."""
        if self._link is not None:
            for stream in list(self._link.streams.values()):
                stream.abandon(error)

    async def _run(self) -> None:
        delay = RECONNECT_SECONDS
        while True:
            try:
                async with open_channel(self._target, self._secret) as channel:
                    welcomed = await self._serve(channel)
                delay = RECONNECT_SECONDS if welcomed else min(2 * delay, MAX_RECONNECT_SECONDS)
            except grpc.RpcError as error:
                code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "UNKNOWN"
                if code != self._last_refusal:  # once, not at every try
                    self._log.info("decoder_unreachable", code=code)
                self._last_refusal = code
                delay = min(2 * delay, MAX_RECONNECT_SECONDS)
            except grpc.aio.UsageError as error:
                self._log.warning("decoder_stream_misused", error=type(error).__name__)
            await asyncio.sleep(delay)

    async def _serve(self, channel: grpc.aio.Channel) -> bool:
        """Run one stream to its end. True if the decoder had introduced itself."""
        call = decode_pb2_grpc.DecodeServiceStub(channel).Connect(wait_for_ready=True)  # type: ignore[no-untyped-call]
        tasks: list[asyncio.Task[None]] = []
        try:
            first = await call.read()
            if first is grpc.aio.EOF or not first.HasField("welcome"):
                self._log.warning("decoder_refused", why="its first message is no welcome")
                return False
            link = _open_link(first.welcome, Liveness(channel, self._patience, self._liveness_changed))
            reading = asyncio.create_task(self._read(call, link))
            watching = asyncio.create_task(link.liveness.watch())
            tasks = [reading, watching, asyncio.create_task(_write(call, link.outbox))]
            self._link, self._last_refusal = link, ""
            self._log.info("decoder_connected", model=link.model.name)
            self._changed()
            await asyncio.wait((reading, watching), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            else:
                self._log.warning("decoder_hung", requests=len(link.streams))
            return True
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._lose()

    async def _read(self, call: Any, link: _Link) -> None:
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                if message.HasField("step"):
                    _dispatch(link, message.step)
        except grpc.aio.AioRpcError as error:
            self._log.info("decoder_stream_broken", code=error.code().name)

    def _liveness_changed(self) -> None:
        if self._link is not None:
            self._log.warning("decoder_silent" if self._link.liveness.is_silent else "decoder_answers_again")
        self._changed()

    def _lose(self) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        log = self._log.warning if link.streams else self._log.info
        log("decoder_lost", requests=len(link.streams))
        for stream in list(link.streams.values()):
            stream.fail(decoder_away())
        link.streams.clear()
        self._changed()


def decoder_away() -> Unavailable:
    """The error of a request whose decoder is gone."""
    return Unavailable("the decoder of this request is away; try again", reason="DECODER_AWAY", retry_after_seconds=1.0)


async def _write(call: Any, outbox: Outbox) -> None:
    try:
        while True:
            await call.write(await outbox.next())
    except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        call.cancel()  # the reader sees the end and tells everyone


def _forget(link: _Link, number: int) -> None:
    link.streams.pop(number, None)


def _open_link(welcome: decode_pb2.Welcome, liveness: Liveness) -> _Link:
    model = welcome.model
    described = DecoderModel(
        name=model.name,
        vocab_size=model.vocab_size,
        max_context_tokens=model.max_context_tokens,
        block_tokens=max(1, model.block_tokens),
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
    )
    return _Link(described, max(1, welcome.max_batch), max(1, welcome.window_tokens), Outbox(), {}, liveness)


def _dispatch(link: _Link, step: decode_pb2.StepOutput) -> None:
    """Hand each request what a message holds for it; a slow stream may have joined several steps into one."""
    updates: dict[int, Update] = {}

    def of(request: int) -> Update:
        update = updates.get(request)
        if update is None:
            update = updates[request] = Update()
        return update

    for started in step.started:
        of(started.request).start = Start(
            started.cached_tokens,
            started.queue_nanoseconds / 1e9,
            started.prompt_tokens,
            tuple(started.base_tokens),
            tuple(started.prompt_logprobs),
            started.moments,
        )
    for gained in step.tokens:
        of(gained.request).add_tokens(gained.index, gained.token_ids, gained.logprobs)
    for finished in step.finished:
        stop = finished.stop_token_id if finished.HasField("stop_token_id") else None
        of(finished.request).sample_ends.append(
            SampleEnd(finished.index, finished.reason, stop, finished.session_handle, finished.session_tokens)
        )
    for ended in step.ended:
        of(ended.request).end = RequestEnd(ended.cow_copies, ended.drafted_tokens, ended.accepted_tokens)
    for failed in step.failed:
        of(failed.request).failure = _failure(failed)
    for number, update in updates.items():
        stream = link.streams.get(number)  # a request that was closed here may still get the rest of its step
        if stream is not None:
            stream.push(update)


# Fields of the internal protocol that stand for one of the client's.
_PUBLIC_FIELDS: Final = {"base_tokens": "session.num_tokens", "base_handle": "session.handle"}


def _failure(failed: decode_pb2.RequestFailed) -> TesseraError:
    message, metadata = failed.message, dict(failed.metadata)
    field = metadata.get("field", "")
    if field in _PUBLIC_FIELDS:
        metadata["field"] = _PUBLIC_FIELDS[field]
        message = message.replace(f"{field}:", f"{metadata['field']}:", 1)
    return make_error(
        code_of(failed.code),
        message,
        reason=failed.reason,
        metadata=metadata,
        retry_after_seconds=failed.retry_after_nanoseconds / 1e9 if failed.retry_after_nanoseconds else None,
    )
