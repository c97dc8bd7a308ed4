"""A decoder that keeps its connection and says nothing: no new requests, then no stream; slow is not hung."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import Unavailable
from common.interceptors import BearerInterceptor, ErrorInterceptor
from common.rpc import bind, make_server, unix_target
from common.tokens import pack_tokens
from gateway.decoders import DecoderClient
from gateway.liveness import Patience
from tessera.decode.v1 import decode_pb2, decode_pb2_grpc
from tests.gateway.support import INTERNAL_SECRET, FakeDecoder, async_test, eventually

PATIENCE = Patience(every_seconds=0.02, silence_seconds=1.0, max_silences=3)


class GatedHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc,unused-ignore]
    """Answers each check `delay` seconds late, and not at all while the gate is closed."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.delay = 0.0
        self.asked = 0

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked += 1
        await self.gate.wait()
        await asyncio.sleep(self.delay)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)


@dataclass
class Here:
    """One client and the decoder behind it."""

    client: DecoderClient
    decoder: FakeDecoder
    health: GatedHealth
    changes: list[bool] = field(default_factory=list)  # whether it could be routed to, at each change

    def submit(self) -> Any:
        submit = decode_pb2.Submit(request_id="r", grant=b"g", tokens=pack_tokens([5, 6, 7]))
        submit.sampling.n = 1
        submit.stopping.max_tokens = 3000
        submit.stopping.ignore_eos = True
        return self.client.submit(submit, 1)


@asynccontextmanager
async def connected() -> AsyncIterator[Here]:
    """A connected client with a short patience."""
    folder = Path(tempfile.mkdtemp(prefix="tl-"))
    server = make_server([ErrorInterceptor(), BearerInterceptor(INTERNAL_SECRET)])
    decoder, health = FakeDecoder(), GatedHealth()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(decoder, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    bind(server, unix_target(folder / "d.sock"))
    await server.start()
    changes: list[bool] = []
    client = DecoderClient(
        0, unix_target(folder / "d.sock"), INTERNAL_SECRET, lambda: changes.append(client.model is not None), PATIENCE
    )
    client.start()
    try:
        await eventually(lambda: client.model is not None)
        yield Here(client, decoder, health, changes)
    finally:
        health.gate.set()
        await client.close()
        await server.stop(None)
        shutil.rmtree(folder)


@async_test
async def test_a_silent_decoder_is_not_routed_to_and_comes_back() -> None:
    """After one silence it has no model and takes no request; with the next answer it does, on the same stream."""
    async with connected() as here:
        here.health.gate.clear()
        await eventually(lambda: here.client.model is None)
        with pytest.raises(Unavailable):
            here.submit()
        here.health.gate.set()
        await eventually(lambda: here.client.model is not None)
        assert here.decoder.connections == 1
        assert here.changes == [True, False, True]
        await here.submit().next()


@async_test
async def test_a_hung_decoder_loses_its_stream_and_its_requests_may_be_retried() -> None:
    """After three silences in a row the running request fails with UNAVAILABLE; when it answers it serves again."""
    async with connected() as here:

        async def never() -> None:
            await asyncio.Event().wait()

        here.decoder.step_gate = never
        stream = here.submit()
        await eventually(lambda: bool(here.decoder.running))
        here.health.gate.clear()
        with pytest.raises(Unavailable) as caught:
            await stream.next()
        assert caught.value.retry_after_seconds
        here.decoder.step_gate = None
        here.health.gate.set()
        await eventually(lambda: here.client.model is not None)
        assert here.decoder.connections >= 2
        await here.submit().next()


@async_test
async def test_a_slow_decoder_is_not_a_hung_one() -> None:
    """Answers that come late, each within the bound, are no silence; nor is a request that waits for its tokens."""
    async with connected() as here:
        here.decoder.gate.clear()
        stream = here.submit()
        here.health.delay = PATIENCE.silence_seconds / 4
        asked = here.health.asked
        await eventually(lambda: here.health.asked >= asked + 6, 30.0)
        assert here.client.model is not None
        assert here.changes == [True]
        here.decoder.gate.set()
        await stream.next()
        assert here.decoder.connections == 1
