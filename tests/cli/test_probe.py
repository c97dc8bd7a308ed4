"""`tessera probe`: what health looks like from outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.__main__ import main
from cli.probe import check_health
from tests.cli.support import FakeHealth, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(
    ("state", "status", "shown"), [(SERVING, 0, "SERVING"), (NOT_SERVING, 1, "NOT_SERVING")], ids=["up", "down"]
)
def test_status_follows_health(
    tmp_path: Path, state: int, status: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 0 means serving; anything else is 1."""
    target = f"unix:{tmp_path}/x.sock"
    fake = FakeHealth({"": state})
    with serving(target, lambda server: health_pb2_grpc.add_HealthServicer_to_server(fake, server)):
        assert main(["probe", "--target", target]) == status
    streams = capsys.readouterr()
    assert (streams.out + streams.err).strip() == shown


def test_one_service_can_be_asked_for(tmp_path: Path) -> None:
    """--service asks for one service; one that is not there is named as such."""
    target = f"unix:{tmp_path}/x.sock"
    fake = FakeHealth({"": NOT_SERVING, "a.B": SERVING})
    with serving(target, lambda server: health_pb2_grpc.add_HealthServicer_to_server(fake, server)):
        assert check_health(target, 5.0, "a.B") == "SERVING"
        assert check_health(target, 5.0, "c.D") == "NO_SUCH_SERVICE"


def test_nobody_there_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A socket that nobody listens on is unhealthy, not an exception."""
    assert main(["probe", "--target", f"unix:{tmp_path}/none.sock", "--timeout", "1"]) == 1
    assert capsys.readouterr().err == f"NO_ANSWER (UNAVAILABLE) at unix:{tmp_path}/none.sock\n"


def test_a_certificate_that_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--tls-ca with a missing file ends with a message."""
    assert main(["probe", "--target", "127.0.0.1:1", "--tls-ca", str(tmp_path / "none.pem")]) == 2
    assert f"--tls-ca {tmp_path}/none.pem: No such file" in capsys.readouterr().err
