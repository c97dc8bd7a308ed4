"""`tessera probe`: asks one process for its health, for container health checks and scripts.

It imports gRPC and nothing heavier, needs no credential (`grpc.health.v1` is open), and ends within its timeout.
Exit status: 0 serving, 1 anything else, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.files import read_authority
from common.addresses import check_listen
from common.arguments import CommandParser, seconds
from common.rpc import open_sync_channel

NO_ANSWER = "NO_ANSWER"


def check_health(target: str, timeout_seconds: float, service: str = "", tls_ca: bytes | None = None) -> str:
    """The health of `target` (`unix:<path>` or `host:port`): SERVING, NOT_SERVING, or why it did not answer."""
    credentials = None if tls_ca is None else grpc.ssl_channel_credentials(tls_ca)
    with open_sync_channel(target, credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
            return "NO_SUCH_SERVICE" if code is grpc.StatusCode.NOT_FOUND else f"{NO_ANSWER} ({code.name})"
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 0 if the target is serving."""
    parser = CommandParser(prog="tessera probe", description="Ask one process for its health.")
    parser.add_argument(
        "--target", required=True, type=_target, metavar="TARGET", help="unix:/path/to.sock or host:port"
    )
    parser.add_argument("--service", default="", metavar="NAME", help="full name of one service (default: the process)")
    parser.add_argument(
        "--timeout", type=seconds(0, 600), default=2.0, metavar="SECONDS", help="how long to wait (default 2)"
    )
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="PEM certificates to trust, for a gateway with TLS")
    options = parser.parse_args(arguments)
    state = check_health(options.target, options.timeout, options.service, read_authority(options.tls_ca))
    if state == "SERVING":
        print(state)
        return 0
    print(f"{state} at {options.target}" if state.startswith(NO_ANSWER) else state, file=sys.stderr)
    return 1


def _target(text: str) -> str:
    try:
        return check_listen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
