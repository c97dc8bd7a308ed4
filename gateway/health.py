"""The gateway's health: SERVING only while the cache manager answers and one decoder at least is connected.

Owns the promise that health follows the truth within a second. A decoder that comes or goes is known at once from
its stream, one that hangs after some seconds (`gateway/liveness.py`); the cache manager is asked four times a second.
Run by `gateway/application.py`.
"""

from __future__ import annotations

import asyncio
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.logs import get_logger
from common.rpc import Health
from gateway.decoder_pool import DecoderPool

PROBE_SECONDS: Final = 0.25
PROBE_TIMEOUT_SECONDS: Final = 0.5
_ANSWERED: Final = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)


class HealthMonitor:
    """Keeps `health` true to the state of `daemon` (a channel to the cache manager) and `pool`."""

    def __init__(self, health: Health, daemon: grpc.aio.Channel, pool: DecoderPool) -> None:
        self._health = health
        self._stub = health_pb2_grpc.HealthStub(daemon)
        self._pool = pool
        self._daemon_answers = False
        self._draining = False
        self._changed = asyncio.Event()
        pool.on_change(self._changed.set)

    async def run(self) -> None:
        """Watch for ever."""
        probe = asyncio.create_task(self._probe())
        try:
            while True:
                await self._publish()
                await self._changed.wait()
                self._changed.clear()
        finally:
            probe.cancel()

    async def drain(self) -> None:
        """NOT_SERVING from now on, whatever comes."""
        self._draining = True
        await self._publish()

    async def _publish(self) -> None:
        serving = self._daemon_answers and self._pool.is_ready and not self._draining
        if serving != self._health.serving:
            await self._health.set(serving)
            get_logger().info("health_changed", serving=serving)

    async def _probe(self) -> None:
        while True:
            answers = await self._ask()
            if answers != self._daemon_answers:
                self._daemon_answers = answers
                self._changed.set()
            await asyncio.sleep(PROBE_SECONDS)

    async def _ask(self) -> bool:
        try:
            answer = await self._stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code() in _ANSWERED  # it is there, and keeps no health of its own
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
