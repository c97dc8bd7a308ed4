"""A blocking channel of ours is connected again soon after its server is back, also while its calls fail at once.

The server is another process: the threads of one in this process would poll for the channel as well.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc import open_sync_channel, unix_target

SERVER = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2_grpc
server = grpc.server(ThreadPoolExecutor(1))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
server.add_insecure_port(sys.argv[1])
server.start()
print(time.monotonic(), flush=True)
sys.stdin.read()
"""
CLIENT = """
import sys
from pathlib import Path
from tests.common.test_reconnect import rounds_of
print(*rounds_of(Path(sys.argv[1]), 2))
"""
PAUSE_SECONDS = 0.02
LOOK_SECONDS = 5.0  # gRPC's own default


@contextlib.contextmanager
def serving(target: str) -> Iterator[subprocess.Popen[str]]:
    """A process that begins to serve health there, and says when; killed at the end."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield server
    finally:
        server.kill()
        server.communicate()


def rounds_of(folder: Path, rounds: int) -> list[float]:
    """Seconds from when a killed server is up again to the first call that is served, for each round. Calls are made
    all the time, and a round begins when a call of the one before has just been served."""
    target, request = unix_target(folder / "s"), health_pb2.HealthCheckRequest()
    found = []
    with open_sync_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with serving(target):
            stub.Check(request, timeout=30, wait_for_ready=True)
        for _ in range(rounds):
            with serving(target) as server:
                while True:
                    with contextlib.suppress(grpc.RpcError):
                        stub.Check(request, timeout=30)
                        break
                    time.sleep(PAUSE_SECONDS)
                served = time.monotonic()
                assert server.stdout is not None
                found.append(served - float(server.stdout.readline()))
    return found


def test_a_channel_whose_calls_fail_is_connected_again_soon(tmp_path: Path) -> None:
    """Within half of the time that gRPC would let pass by default; of a few rounds one is enough on a busy machine."""
    assert min(rounds_of(tmp_path, 3)) < LOOK_SECONDS / 2


@pytest.mark.slow
def test_without_our_setting_it_takes_seconds(tmp_path: Path) -> None:
    """Positive control: with gRPC's default the round that begins when one has been served waits for the next look."""
    environment = {**os.environ, "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": str(int(LOOK_SECONDS * 1000))}
    arguments = [sys.executable, "-c", CLIENT, str(tmp_path)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[1]) > LOOK_SECONDS / 2
