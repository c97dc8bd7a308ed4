"""Servers and channels: credentials are demanded, errors carry their details, nothing internal leaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import InvalidArgument, ResourceExhausted, TesseraError, Unavailable
from common.interceptors import BearerInterceptor, ErrorInterceptor, error_from_rpc
from common.logs import configure_logs
from common.rpc import Health, add_health_and_reflection, bind, make_server, open_channel, unix_target
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc

SERVICE = "tessera.cache.v1.CredentialService"


class Raising(cache_pb2_grpc.CredentialServiceServicer, cache_pb2_grpc.CacheServiceServicer):  # type: ignore[misc]
    """Raises what the test gave it."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def Authenticate(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        if self.error is not None:
            raise self.error
        return cache_pb2.AuthenticateResponse(tenant="t")

    async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        if self.error is not None:
            raise self.error
        async for request in request_iterator:
            yield cache_pb2.SessionResponse(sequence=request.sequence)


async def call(path: Path, error: Exception | None, secret: str | None, kind: str = "unary") -> Any:
    """Start a server that raises `error`, call it with `secret`, and return the answer."""
    server = make_server([BearerInterceptor("right"), ErrorInterceptor()])
    servicer = Raising(error)
    cache_pb2_grpc.add_CredentialServiceServicer_to_server(servicer, server)
    cache_pb2_grpc.add_CacheServiceServicer_to_server(servicer, server)
    health = await add_health_and_reflection(server, [SERVICE])
    bind(server, unix_target(path))
    await server.start()
    try:
        async with open_channel(unix_target(path), secret) as channel:
            if kind == "health":
                await health.set(True)
                return await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
            if kind == "stream":
                stream = cache_pb2_grpc.CacheServiceStub(channel).Session()
                await stream.write(cache_pb2.SessionRequest(sequence=7))
                return await stream.read()
            return await cache_pb2_grpc.CredentialServiceStub(channel).Authenticate(
                cache_pb2.AuthenticateRequest(key="k"), timeout=10
            )
    finally:
        await server.stop(None)


@pytest.mark.parametrize("kind", ["unary", "stream"])
@pytest.mark.parametrize("secret", [None, "wrong", "right but longer", "x" * 2000])
def test_a_wrong_credential_is_refused(tmp_path: Path, kind: str, secret: str | None) -> None:
    """Without the one secret no handler runs, whatever kind of call it is."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(call(tmp_path / "s", None, secret, kind))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_the_right_credential_is_served(tmp_path: Path, kind: str) -> None:
    """The positive control of the refusals."""
    answer = asyncio.run(call(tmp_path / "s", None, "right", kind))
    assert answer.tenant == "t" if kind == "unary" else answer.sequence == 7


def test_health_is_open(tmp_path: Path) -> None:
    """A probe needs no credential."""
    answer = asyncio.run(call(tmp_path / "s", None, None, "health"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("sampling.top_p", "is 2; allowed is (0, 1]"),
        ResourceExhausted(
            "too big", subject="blocks", needed=40, usable=32, reason="EXCEEDS_POOL", retry_after_seconds=1.5
        ),
        Unavailable("the decoder is away", metadata={"decoder": "0"}),
    ],
)
@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_an_error_crosses_the_wire_whole(tmp_path: Path, error: TesseraError, kind: str) -> None:
    """Code, reason, message, numbers and the retry hint come back as the same typed error."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(call(tmp_path / "s", error, "right", kind))
    back = error_from_rpc(caught.value)
    assert type(back) is type(error)
    assert (back.message, back.reason, back.metadata) == (error.message, error.reason, error.metadata)
    assert back.retry_after_seconds == error.retry_after_seconds
    raw = next(v for k, v in caught.value.trailing_metadata() if k == "grpc-status-details-bin")
    kinds = {item.TypeName() for item in status_pb2.Status.FromString(raw).details}
    assert error_details_pb2.ErrorInfo.DESCRIPTOR.full_name in kinds
    if isinstance(error, InvalidArgument):
        assert error_details_pb2.BadRequest.DESCRIPTOR.full_name in kinds


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_an_unexpected_error_keeps_its_text_to_itself(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A defect of ours becomes INTERNAL; what it said reaches neither the caller nor the log, where it was does."""
    configure_logs("test")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(call(tmp_path / "s", KeyError("tsr_secret"), "right", kind))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    said = capsys.readouterr().err
    assert "tsr_secret" not in str(caught.value) + said
    assert "KeyError" in said
    assert "test_rpc.py" in said


def test_a_unix_socket_is_private(tmp_path: Path) -> None:
    """Only the owner may connect, and a stale file of a dead process is no obstacle."""
    asyncio.run(call(tmp_path / "s", None, "right"))
    asyncio.run(call(tmp_path / "s", None, "right"))
    path = tmp_path / "t"

    async def mode() -> int:
        server = make_server()
        bind(server, unix_target(path))
        await server.start()
        try:
            return path.stat().st_mode & 0o777
        finally:
            await server.stop(None)

    assert asyncio.run(mode()) == 0o600


def test_of_two_changes_of_health_at_once_the_later_one_holds() -> None:
    """A drain that begins while a service is about to say SERVING: every name is NOT_SERVING afterwards."""

    async def body() -> set[int]:
        state = Health(make_server(), ["one", "two"])
        said: dict[str, int] = {}

        async def slow_set(name: str, status: int) -> None:
            said[name] = status
            for _ in range(5 if status == health_pb2.HealthCheckResponse.SERVING else 0):
                await asyncio.sleep(0)  # the earlier change is the slower one

        state._servicer.set = slow_set  # type: ignore[method-assign,assignment]
        first = asyncio.create_task(state.set(True))
        await asyncio.sleep(0)
        await state.set(False)
        await first
        return set(said.values())

    assert asyncio.run(body()) == {health_pb2.HealthCheckResponse.NOT_SERVING}
