"""What `tessera up` leaves behind and says around a start, over a supervisor that starts no process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli import up
from cli.client import Client
from cli.errors import CommandError
from cli.interrupts import Interrupts
from cli.node import Node
from cli.node_address import find_address
from cli.node_lock import sole_supervisor
from cli.node_phase import describe_phase, tell_phase
from common.config import build_parser, load_options
from common.paths import StatePaths
from tests.cli.support import write_key


class FakeSupervisor:
    """Does in `start` what a test says, and then is stopped."""

    def __init__(self, start: Callable[[], None], stop: Callable[[], None] = lambda: None) -> None:
        self._start = start
        self._stop = stop

    def start(self, _seconds: float) -> None:
        """Ready, or not."""
        self._start()

    def pids(self) -> dict[str, int]:
        """Of nobody."""
        return {}

    def poll(self) -> None:
        """The node has been asked to stop by now."""
        raise AssertionError("it goes on")

    def stop(self, _grace: float, _hurry: Callable[[], bool]) -> bool:
        """Clean."""
        self._stop()
        return True


class Stopping(Interrupts):
    """Somebody pressed Ctrl-C."""

    def __init__(self) -> None:
        self._count = 1


@pytest.fixture
def node() -> Iterator[Node]:
    """A node on a port that is not the default one; nothing of it runs."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        flags = ["--listen", "127.0.0.1:6001", "--state-dir", folder]
        options = load_options(build_parser("up").parse_args(flags), {"HOME": "/nowhere"})
        paths = StatePaths(Path(folder))
        paths.prepare()
        yield Node(options, paths, ())


def run(node: Node, monkeypatch: pytest.MonkeyPatch, start: Callable[[], None], stop: Callable[[], None]) -> int:
    """`tessera up` on `node`, from its lock to its end."""
    monkeypatch.setattr(up, "make_supervisor", lambda _node, _interrupts: FakeSupervisor(start, stop))
    return up._run(node, Stopping())


def fail() -> None:
    """The model is bad."""
    raise CommandError("decoder-0 could not start")


def nothing() -> None:
    """Nothing happens."""


def test_the_key_is_shown_when_the_node_is_first_ready(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A first start that fails after the key was made shows none; the next that succeeds does, and no later one."""

    def make_key_and_fail() -> None:
        write_key(node.paths.default_key, "tsr_first")
        fail()

    said = []
    for start in (make_key_and_fail, fail, nothing, nothing):
        run(node, monkeypatch, start, nothing)
        said.append(capsys.readouterr().out)
    assert ["tsr_first" in text for text in said] == [False, False, True, False]
    assert "(of tenant default; shown this once)" in said[2]
    assert str(node.paths.default_key) in said[3]


def test_a_key_that_was_there_before_is_not_shown(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node of an older version, or one whose key's mark was lost, shows where the key lies and not the key."""
    write_key(node.paths.default_key, "tsr_old")
    assert run(node, monkeypatch, nothing, nothing) == 0
    said = capsys.readouterr().out
    assert "tsr_old" not in said and str(node.paths.default_key) in said


def test_a_key_that_nobody_made_can_be_replaced(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tenants of before whose key's file is lost: in its place stands how to make another, at each start until then."""
    for _ in range(2):
        assert run(node, monkeypatch, nothing, nothing) == 0
        assert "make another one: tessera admin create-key default" in capsys.readouterr().out
    write_key(node.paths.default_key)
    node.paths.default_key.chmod(0o644)
    node.paths.unshown_key_mark.touch()
    run(node, monkeypatch, nothing, nothing)
    said = capsys.readouterr().out
    assert "0600" in said and "tsk_test" not in said


@pytest.mark.parametrize("start", [nothing, fail])
def test_clients_know_the_address_from_the_start_to_the_end(
    node: Node, monkeypatch: pytest.MonkeyPatch, start: Callable[[], None]
) -> None:
    """While it starts and while it drains, what clients say of it names its own port; when it has ended, none."""
    seen: list[tuple[str, str]] = []

    def look() -> None:
        address = find_address(node.paths)
        seen.append((address.endpoint if address else "", str(describe_phase(node.paths))))

    def start_and_look() -> None:
        look()
        start()

    with sole_supervisor(node.paths):
        assert run(node, monkeypatch, start_and_look, look) == (1 if start is fail else 0)
    assert [address for address, _ in seen] == ["127.0.0.1:6001"] * 2
    assert ["is starting" in phase for _, phase in seen] == [True, False]
    assert ["is draining" in phase for _, phase in seen] == [False, True]
    assert not node.paths.endpoint_file.exists() and not node.paths.phase_file.exists()


def test_clients_read_that_kernels_are_compiled(node: Node) -> None:
    """The supervisor's word that a decoder compiles becomes the node's phase."""
    supervisor = up.make_supervisor(node, Stopping())
    tell_phase(node.paths, "starting")
    assert "kernels" not in str(describe_phase(node.paths))
    supervisor.compiling()
    phase = str(describe_phase(node.paths))
    assert "is compiling" in phase and "once per machine" in phase and "until it says that it is ready" in phase


@pytest.mark.parametrize(("answer", "offers_chat"), [(True, True), (False, False), (None, True)])
def test_a_chat_is_offered_only_to_a_model_that_takes_one(
    answer: bool | None,
    offers_chat: bool,
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a chat template the lines to try name `generate --raw` alone; where the gateway cannot be asked, both."""

    def has_chat_template(_client: Client) -> bool:
        if answer is None:
            raise CommandError("nothing answers")
        return answer

    monkeypatch.setattr(Client, "has_chat_template", has_chat_template)
    write_key(node.paths.default_key)
    assert run(node, monkeypatch, nothing, nothing) == 0
    said = capsys.readouterr().out
    lines = [line.split()[1:] for line in said.partition("\ntry\n")[2].splitlines()]
    assert any(words[:1] == ["chat"] for words in lines) is offers_chat
    assert [("--raw" in words) for words in lines if words[:1] == ["generate"]] == [not offers_chat]
