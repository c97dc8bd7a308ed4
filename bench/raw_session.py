"""One decoder's stream to a daemon, as the benches use it: without a model, an engine or a thread.

Invariant: it asks as a decoder does, with the decoder's own values and messages, and a task waits for the next answer
before the question is sent; it asks one thing at a time. `bench/wire.py` times it.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import grpc
import numpy as np

from common.arena_frames import PROTOCOL_VERSION
from decoder.cache_api import Report, SequenceReport
from decoder.cache_messages import request_of
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc
from tessera.common.v1 import common_pb2

BLOCK_TOKENS = 16
NOTHING = np.zeros(0, np.int32)
LAYOUT = common_pb2.KvLayout(
    num_layers=1,
    num_kv_heads=1,
    head_dim=16,
    block_tokens=BLOCK_TOKENS,
    dtype="float32",
    quantization="none",
    version=1,
)
KEY = common_pb2.CacheKey(weights_digest=b"w" * 32, kv_dtype="float32", kv_quantization="none", layout_version=1)


class Session:
    """One decoder's stream; each `ask` waits for its answer. Raises RuntimeError where an operation was refused."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = cache_pb2_grpc.CacheServiceStub(channel).Session()  # type: ignore[no-untyped-call,unused-ignore]
        self._sequence = 0
        self._revision = 0
        self._answered: asyncio.Future[cache_pb2.SessionResponse] | None = None
        self._reading = asyncio.create_task(self._read())

    async def ask(self, **operation: Any) -> cache_pb2.SessionResponse:
        self._sequence += 1
        return await self._answer(
            cache_pb2.SessionRequest(sequence=self._sequence, applied_revision=self._revision, **operation)
        )

    async def _answer(self, request: cache_pb2.SessionRequest) -> cache_pb2.SessionResponse:
        answered = self._answered = asyncio.get_running_loop().create_future()
        await self._call.write(request)
        response = await answered
        if response.WhichOneof("result") == "failure":
            raise RuntimeError(f"{response.failure.reason}: {response.failure.message}")
        self._revision = response.revision
        return response

    async def _read(self) -> None:
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                if self._answered is not None and response.sequence == self._sequence:
                    self._answered.set_result(response)
        finally:
            if self._answered is not None and not self._answered.done():
                self._answered.set_exception(RuntimeError("the stream ended before the answer"))

    async def attach(self) -> None:
        await self.ask(
            attach=cache_pb2.AttachRequest(
                protocol_version=PROTOCOL_VERSION, decoder_name="bench", layout=LAYOUT, process_id=os.getpid()
            )
        )

    async def acquire(self, grant: bytes, tokens: bytes) -> cache_pb2.AcquireResponse:
        request = cache_pb2.AcquireRequest(grant=grant, key=KEY, tokens=tokens, request_id="bench", priority=50)
        return (await self.ask(acquire=request)).acquire

    async def report(self, *sequences: SequenceReport) -> None:
        """As a decoder reports: its own values, turned into its own message."""
        self._sequence += 1
        report = Report(
            sequences, NOTHING, wanted=0, generated_tokens=0, preemptions=0, queued=0, applied_revision=self._revision
        )
        done = await self._answer(request_of(report, self._sequence, self._revision, KEY))
        if done.report.refusals:
            raise RuntimeError(done.report.refusals[0].failure.message)

    async def close(self) -> None:
        self._reading.cancel()
        await self._call.done_writing()
        self._call.cancel()
