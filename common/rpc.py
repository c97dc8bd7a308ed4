"""gRPC servers and channels, built one way: keepalive that both ends permit, explicit message limits, bearer secrets.

Nothing else in the product sets a channel or server option.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import FailedPrecondition
from common.kept_sockets import KeptSocket

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
KEEPALIVE_MILLISECONDS = 20_000
KEEPALIVE_TIMEOUT_MILLISECONDS = 10_000

_SHARED = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MILLISECONDS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_SHARED,
    # A client may ping every five seconds, busy or idle; the default floor is five minutes and ends in GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    ("grpc.so_reuseport", 0),
    ("grpc.max_metadata_size", 16 * 1024),
]
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_SHARED,
    ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # what one attempt may take, too: a busy machine is slow
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


def unix_target(path: Path) -> str:
    """The gRPC target of a Unix socket."""
    return f"unix:{path}"


def make_server(interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
    """A server with our options; nothing is bound yet."""
    return grpc.aio.server(interceptors=list(interceptors), options=SERVER_OPTIONS)


def bind(server: grpc.aio.Server, target: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Bind `target` (`unix:<path>` or `host:port`); a Unix socket gets mode 0600. Returns the port, 0 or 1 for Unix.

    A stale socket file of a process that is gone is replaced. Raises FailedPrecondition where binding fails.
    """
    path = Path(target.removeprefix("unix:")) if target.startswith("unix:") else None
    if path is not None and path.is_socket():
        path.unlink()
    try:
        port = server.add_secure_port(target, credentials) if credentials else server.add_insecure_port(target)
    except RuntimeError as error:
        where = "the Unix socket" if path else target
        raise FailedPrecondition(f"cannot listen on {where}: {error}") from None
    if path is not None:
        path.chmod(0o600)
    return int(port)


def bind_kept(server: grpc.aio.Server, path: Path) -> KeptSocket:
    """Bind a Unix socket of this node at `path`, mode 0600, by two names that can restore each other.

    Raises FailedPrecondition where binding fails or the path holds something else. Only under the owner's lock.
    """
    kept = KeptSocket(path)
    kept.clear()
    bind(server, unix_target(kept.kept))
    kept.publish()
    return kept


_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class _Authorized:
    """A multi-callable whose every call brings one more header."""

    def __init__(self, call: Any, header: tuple[str, str]) -> None:
        self._call = call
        self._header = header

    def __call__(self, *args: Any, metadata: Any = None, **options: Any) -> Any:
        return self._call(*args, metadata=(*(metadata or ()), self._header), **options)


class _AuthorizedChannel(grpc.aio.Channel):  # type: ignore[misc,unused-ignore]
    """An aio channel whose calls bring a bearer credential; client interceptors would cost a queue per stream."""

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        self._channel = channel
        self._header = ("authorization", f"Bearer {secret}")

    async def __aenter__(self) -> _AuthorizedChannel:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._channel.close()

    async def close(self, grace: float | None = None) -> None:
        """Close the channel."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """State of the connection."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the state is another one."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the connection is there."""
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        """A unary call."""
        return _Authorized(self._channel.unary_unary(*args, **options), self._header)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        """A call with a response stream."""
        return _Authorized(self._channel.unary_stream(*args, **options), self._header)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        """A call with a request stream."""
        return _Authorized(self._channel.stream_unary(*args, **options), self._header)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        """A call with both."""
        return _Authorized(self._channel.stream_stream(*args, **options), self._header)


def bearer_metadata(secret: str) -> tuple[tuple[str, str], ...]:
    """Call metadata that carries a bearer credential."""
    return (("authorization", f"Bearer {secret}"),)


def open_channel(
    target: str, secret: str | None = None, credentials: grpc.ChannelCredentials | None = None
) -> grpc.aio.Channel:
    """An aio channel with our options; every call brings `secret` as its bearer credential."""
    if credentials is not None:
        channel = grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
    else:
        channel = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    return channel if secret is None else _AuthorizedChannel(channel, secret)


def open_sync_channel(target: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    """A blocking channel with our options, for command line clients; pass `bearer_metadata` with each call."""
    if credentials is not None:
        return grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
    return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)


class Health:
    """The health of a server: NOT_SERVING until told otherwise, for the server ("") and each named service."""

    def __init__(self, server: grpc.aio.Server, service_names: Sequence[str]) -> None:
        self._servicer = health.aio.HealthServicer()
        self._names = ("", *service_names)
        self.serving = False
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, serving: bool) -> None:
        """Tell the truth to everyone who watches. Of two calls at once the later one holds, for every name."""
        self.serving = serving
        for name in self._names:
            status = health_pb2.HealthCheckResponse.SERVING if self.serving else _NOT_SERVING
            await self._servicer.set(name, status)


async def add_health_and_reflection(
    server: grpc.aio.Server, service_names: Sequence[str], *, with_reflection: bool = True
) -> Health:
    """Add `grpc.health.v1` (NOT_SERVING at first) and reflection for `service_names` (full names)."""
    state = Health(server, service_names)
    await state.set(False)
    if with_reflection:
        names = (*service_names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return state
