"""What the tests of the command line share: polling with a deadline, and small servers that answer as ours do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DEADLINE_SECONDS = 20.0


def wait_until(
    holds: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS, *, interval: float = 0.01
) -> None:
    """Poll until `holds`, so many seconds after each answer; fails with `what` when the time is over."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(interval)


class FakeHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc,unused-ignore]
    """Health by service name; unknown names are NOT_FOUND."""

    def __init__(self, states: Mapping[str, int]) -> None:
        self.states = dict(states)

    def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the name is gRPC's
        """Answer as the standard service does."""
        if request.service not in self.states:
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self.states[request.service])


@contextmanager
def serving(target: str, *add: Callable[[grpc.Server], None]) -> Iterator[int]:
    """A plain gRPC server on `target`; yields its port (1 for a Unix socket)."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    for register in add:
        register(server)
    port = server.add_insecure_port(target)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def write_key(path: Path, text: str = "tsk_test") -> Path:
    """A credential file as the cache manager makes it."""
    path.write_text(text + "\n", encoding="utf-8")
    path.chmod(0o600)
    return path
