"""What `generate` and `chat` do while a node is not ready: a bounded wait, announced, and none where nobody starts."""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.__main__ import main
from cli.node_lock import sole_supervisor
from cli.node_phase import COMPILING, DRAINING, STARTING, tell_phase
from cli.node_wait import MOMENT_SECONDS, START_SECONDS, wait_for_node
from common.paths import StatePaths
from tests.cli.support import FakeHealth, serving, write_key
from tests.cli.test_clients import Inference, inference

__all__ = ("inference",)


class Clock:
    """Time that passes in `sleep` alone, and what happens when it has come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: dict[float, Callable[[], None]] = {}

    def read(self) -> float:
        """Seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass, and do what is due."""
        self.now += seconds
        for due in [at for at in self.events if at <= self.now]:
            self.events.pop(due)()


def wait(paths: StatePaths, clock: Clock, *, seconds: int | None = None, endpoint: str | None = None) -> float:
    """How long a command with these options waits."""
    options = Namespace(state_dir=paths.state_dir, endpoint=endpoint, wait=seconds, tls_ca=None)
    began = clock.now
    wait_for_node(options, clock=clock.read, sleep=clock.sleep)
    return clock.now - began


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    """A state directory."""
    made = StatePaths(tmp_path)
    made.prepare()
    return made


def test_a_node_that_starts_is_waited_for_until_it_is_ready(
    paths: StatePaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while it compiles; one line says what is waited for and how long, and names the option. The wait ends with
    the start, at its bound, or when the node begins to end."""
    clock = Clock()
    tell_phase(paths, STARTING)
    clock.events = {2.0: lambda: tell_phase(paths, COMPILING), 7.0: lambda: tell_phase(paths, None)}
    assert wait(paths, clock) == pytest.approx(7.0, abs=0.2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        f"tessera: the node of {paths.state_dir} is not ready yet; waiting at most {START_SECONDS} s; "
        "--wait SECONDS says how long\n"
    )
    tell_phase(paths, STARTING)
    assert wait(paths, clock) == pytest.approx(START_SECONDS, abs=0.2)
    clock.events = {clock.now + 3: lambda: tell_phase(paths, DRAINING)}
    assert wait(paths, clock) == pytest.approx(3.0, abs=0.2)


def test_nobody_waits_where_nothing_starts(paths: StatePaths, capsys: pytest.CaptureFixture[str]) -> None:
    """With a node that drains, for an address that was named, and where the user says 0; without a node, for more than
    the moment in which one that is typed before may say that it starts."""
    clock = Clock()
    assert wait(paths, clock) == pytest.approx(MOMENT_SECONDS, abs=0.2)
    assert wait(paths, clock, seconds=0) == 0
    tell_phase(paths, DRAINING)
    assert wait(paths, clock) == 0
    tell_phase(paths, STARTING)
    assert wait(paths, clock, endpoint="127.0.0.1:1") == 0
    assert wait(paths, clock, seconds=0) == 0
    assert capsys.readouterr().err == ""
    assert wait(paths, clock, seconds=4, endpoint="127.0.0.1:1") == pytest.approx(4.0, abs=0.2), "control"


def test_a_node_that_was_typed_just_before_is_waited_for(paths: StatePaths, capsys: pytest.CaptureFixture[str]) -> None:
    """It says nothing until it holds its lock, which takes a moment."""
    clock = Clock()
    clock.events = {0.4: lambda: tell_phase(paths, STARTING), 5.0: lambda: tell_phase(paths, None)}
    assert wait(paths, clock) == pytest.approx(5.0, abs=0.2)
    assert "is not ready yet" in capsys.readouterr().err


def test_who_asks_for_it_waits_until_the_gateway_is_serving(
    tmp_path: Path, paths: StatePaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --wait any gateway is waited for, by its health: while nobody listens, and while it has no decoder yet."""
    clock, target = Clock(), f"unix:{tmp_path}/g.sock"
    health = FakeHealth({"": health_pb2.HealthCheckResponse.NOT_SERVING})

    def register(server: grpc.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(health, server)

    def become_ready() -> None:
        health.states[""] = health_pb2.HealthCheckResponse.SERVING

    assert wait(paths, clock, seconds=1, endpoint=target) == pytest.approx(1.0, abs=0.2)
    with serving(target, register):
        clock.events = {clock.now + 2: become_ready}
        assert wait(paths, clock, seconds=30, endpoint=target) == pytest.approx(2.0, abs=0.2)
        capsys.readouterr()
        assert wait(paths, clock, seconds=30, endpoint=target) == 0
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [["generate", "Hi"], ["chat"]])
def test_a_question_right_after_the_start_is_answered(
    command: list[str], inference: Inference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command waits before it reads the key and the address, which are not there yet when it begins."""
    paths = StatePaths(tmp_path)
    paths.prepare()
    tell_phase(paths, STARTING)

    def get_ready(_seconds: float) -> None:
        write_key(paths.default_key)
        paths.endpoint_file.write_text(f"unix:{tmp_path}/g.sock\n")
        tell_phase(paths, None)

    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    waiting = wait_for_node
    monkeypatch.setattr(f"cli.{command[0]}.wait_for_node", lambda options: waiting(options, sleep=get_ready))
    with sole_supervisor(paths):
        assert main([*command, "--state-dir", str(tmp_path)]) == 0
    assert len(inference[0].requests) == 1
