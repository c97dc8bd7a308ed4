"""From the messages of one gateway to the engine. Owns the submissions whose constraints are being compiled, or whose
adapters are being read.

Invariants: a bad submission fails alone; a request without a constraint, and with no adapter that is not in memory, is
never held up; what comes for a request while it is prepared (a cancel) comes to the engine after it, or ends it here;
at most `MAX_COMPILING` wait for the threads that prepare. Made by the service for each stream; runs on the IO event
loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from dataclasses import replace
from typing import Final

from common.errors import FailedPrecondition, Internal, ResourceExhausted, TesseraError, Unimplemented
from common.logs import get_logger, where
from decoder.adapter_pool import AdapterPool
from decoder.engine import Engine
from decoder.outputs import RequestFailed, Sink, StepResult
from decoder.sequence import Request, RequestNumber
from decoder.structure import compile_constraint
from decoder.validation import ServedModel, request_of
from decoder.vocabulary import Vocabulary
from tessera.decode.v1 import decode_pb2

MAX_COMPILING: Final = 64  # of one stream
READER: Final = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="adapter")
COMPILER: Final = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")


class Submissions:
    """The way in of one gateway; `sink` is told what fails before it gets to the engine."""

    def __init__(self, engine: Engine, model: ServedModel, sink: Sink, adapters: AdapterPool | None = None) -> None:
        self._engine = engine
        self._adapters = adapters
        self._model = model
        self._sink = sink
        self._vocabulary: Vocabulary | None = None
        self._compiling: dict[RequestNumber, asyncio.Task[None]] = {}
        self._cancels: dict[RequestNumber, list[decode_pb2.Cancel]] = {}

    def tell_vocabulary(self, message: decode_pb2.Vocabulary) -> None:
        """The gateway's tokens. Raises InvalidArgument where they do not fit the model."""
        self._vocabulary = Vocabulary(message.tokens, self._model.vocab_size, self._model.eos_ids)

    def submit(self, submit: decode_pb2.Submit) -> None:
        """Check a request and pass it on, once its adapter is in memory and its constraint compiled."""
        number = RequestNumber(submit.request)
        try:
            request = request_of(submit, self._model)
            if submit.adapter:
                request = replace(request, adapter=self._pool().find(submit.adapter))
            if submit.output.HasField("constraint") or (submit.adapter and request.adapter is None):
                self._begin(request, submit)
                return
        except TesseraError as error:
            self._fail(number, error)
            return
        self._engine.submit(request, self._sink)

    def cancel(self, cancel: decode_pb2.Cancel) -> None:
        """End a request or one of its samples."""
        number = RequestNumber(cancel.request)
        task = self._compiling.get(number)
        if task is None:
            sample = cancel.index if cancel.HasField("index") else None
            self._engine.cancel(self._sink, number, sample, finish=cancel.finish)
        elif cancel.HasField("index"):
            self._cancels.setdefault(number, []).append(cancel)
        else:
            task.cancel()

    def close(self) -> None:
        """The stream is over: what is compiled is for nobody."""
        for task in self._compiling.values():
            task.cancel()

    def _pool(self) -> AdapterPool:
        if self._adapters is None:
            raise Unimplemented(
                "adapter: this decoder serves none", reason="FIELD_UNIMPLEMENTED", metadata={"field": "adapter"}
            )
        return self._adapters

    def _begin(self, request: Request, submit: decode_pb2.Submit) -> None:
        constrained = submit.output.HasField("constraint")
        if constrained and self._vocabulary is None:
            raise FailedPrecondition("a constraint was sent before the vocabulary", reason="NO_VOCABULARY")
        if request.number in self._compiling or len(self._compiling) >= MAX_COMPILING:
            raise ResourceExhausted(
                "too many constraints and adapters wait to be prepared", subject="constraints",
                needed=len(self._compiling) + 1, usable=MAX_COMPILING, reason="QUEUE_FULL", retry_after_seconds=1.0,
            )  # fmt: skip
        task = asyncio.create_task(self._prepare(request, submit))
        self._compiling[request.number] = task
        task.add_done_callback(lambda _: self._forget(request.number, task))

    def _forget(self, number: RequestNumber, task: asyncio.Task[None]) -> None:
        if self._compiling.get(number) is task:
            del self._compiling[number]
            self._cancels.pop(number, None)

    async def _prepare(self, request: Request, submit: decode_pb2.Submit) -> None:
        loop = asyncio.get_running_loop()
        vocabulary = self._vocabulary
        try:
            if submit.adapter and request.adapter is None:
                use = await loop.run_in_executor(READER, self._pool().load, submit.adapter)
                request = replace(request, adapter=use)
            if submit.output.HasField("constraint") and vocabulary is not None:
                kind = submit.output.constraint.WhichOneof("kind")
                text = getattr(submit.output.constraint, kind)
                constraint = await loop.run_in_executor(
                    COMPILER, compile_constraint, kind, text, vocabulary, request.stopping.stop_ids
                )
                request = replace(request, constraint=constraint)
        except TesseraError as error:
            self._fail(request.number, error)
            return
        except Exception as error:  # noqa: BLE001 - one request's constraint must not end its neighbours
            get_logger().error("preparation_failed", error=type(error).__name__, frames=where(error))
            self._fail(request.number, Internal("this request could not be prepared"))
            return
        self._engine.submit(request, self._sink)
        cancels = self._cancels.pop(request.number, [])
        del self._compiling[request.number]
        for cancel in cancels:
            self.cancel(cancel)

    def _fail(self, number: RequestNumber, error: TesseraError) -> None:
        self._sink.deliver(StepResult(failed=[RequestFailed(number, error)]))
