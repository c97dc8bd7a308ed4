"""Whether a connected decoder still answers: a stopped or hung process keeps its connection, and says nothing.

Owns the count of silences. One health check is on its way at a time, a second after the last answer; a silence is a
check without an answer within five seconds. Invariant: only silences in a row count, so neither a slow answer nor a
pause of this very process makes a decoder look hung; any answer, whatever its status, is one. A decoder's loop answers
while the model computes, so that a slow step is no silence. Run by `gateway/decoders.py` for each life of a stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


@dataclass(frozen=True, slots=True)
class Patience:
    """How often to ask, how long to wait for an answer, and after how many silences in a row to give up."""

    every_seconds: float = 1.0
    silence_seconds: float = 5.0
    max_silences: int = 3


DEFAULT_PATIENCE: Final = Patience()


class Liveness:
    """Asks the decoder behind `channel`. `changed` is called whenever `is_silent` does."""

    def __init__(self, channel: grpc.aio.Channel, patience: Patience, changed: Callable[[], None]) -> None:
        self._stub = health_pb2_grpc.HealthStub(channel)
        self._patience = patience
        self._changed = changed
        self.is_silent = False

    async def watch(self) -> None:
        """Ask until so many checks in a row got no answer; returns then."""
        silences = 0
        while silences < self._patience.max_silences:
            silences = 0 if await self._answers() else silences + 1
            if self.is_silent != bool(silences):
                self.is_silent = bool(silences)
                self._changed()
            if not silences:
                await asyncio.sleep(self._patience.every_seconds)

    async def _answers(self) -> bool:
        request = health_pb2.HealthCheckRequest()
        try:
            await self._stub.Check(request, timeout=self._patience.silence_seconds)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED  # a broken connection ends the stream itself
        return True
