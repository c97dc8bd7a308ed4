"""What `tessera up` leaves behind and says around a start, over a supervisor that starts no process."""

from __future__ import annotations

import errno
import io
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli import up
from cli.__main__ import main
from cli.client import Client
from cli.demo import free_port
from cli.errors import CommandError
from cli.fresh_state import FreshState
from cli.interrupts import Interrupts
from cli.node import Node
from cli.node_address import find_address
from cli.node_lock import sole_supervisor
from cli.node_phase import describe_phase, tell_phase
from cli.supervisor import RefusedStart
from common.config import build_parser, load_options
from common.paths import StatePaths
from tests.cli.support import write_key
from tests.tiny_models import make_tiny_llama


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short path: where several processes share the tests pytest's own leaves no room for a socket's
    name."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        yield Path(folder)


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
    return up._run(node, Stopping(), FreshState(node))


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
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        run(node, monkeypatch, start, nothing)
        said.append(capsys.readouterr().out)
    assert ["tsr_first" in text for text in said] == [False, False, True, False]
    assert "(of tenant default; shown this once)" in said[2]
    assert str(node.paths.default_key) in said[3]


def test_the_key_is_shown_to_a_terminal_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a file or a pipe goes where the key lies, at each start until a terminal showed it."""
    said = []
    for terminal in (False, False, True, False):
        with monkeypatch.context() as patched:
            patched.setattr(sys.stdout, "isatty", lambda shown=terminal: shown)
            run(node, patched, lambda: write_key(node.paths.default_key, "tsr_first") and None, nothing)
        said.append(capsys.readouterr().out)
    assert ["tsr_first" in text for text in said] == [False, False, True, False]
    assert [f"in {node.paths.default_key}  (of tenant default" in text for text in said] == [True, True, False, False]


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


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "pipe"), OSError(errno.ENOSPC, "full")])
def test_a_node_outlives_the_reader_of_its_lines(node: Node, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """`tessera up | head`, or a full disk behind `up > file`: it becomes ready, and drains when asked, all the same."""

    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            nonlocal tried
            tried += 1
            raise error

    tried, stopped = 0, []
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", Gone())
    assert run(node, monkeypatch, nothing, lambda: stopped.append(True)) == 0
    assert stopped and tried >= 3
    assert not node.paths.endpoint_file.exists()


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


def start(model: Path, state: Path, *flags: str) -> int:
    """`tessera up` with these flags; the exit status."""
    return main(
        ["up", "--model", str(model), "--state-dir", str(state), "--listen", f"127.0.0.1:{free_port()}", *flags]
    )


def test_a_start_that_is_refused_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options, a taken port and a folder that cannot be made leave no folder, nor any that it would lie in; what
    was there before stays."""
    model, state = make_tiny_llama(tmp_path / "model"), tmp_path / "new" / "state"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for flags, reason in (
            (["--max-context", "999999"], "--max-context"),
            (["--pool-blocks", "many"], "--pool-blocks"),
            (["--admin-listen", f"127.0.0.1:{taken.getsockname()[1]}"], "is in use by another process"),
        ):
            assert start(model, state, *flags) != 0
            assert reason in capsys.readouterr().err
            assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    assert start(model, tmp_path / "file" / "state") == 1
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o700)
    assert start(model, kept, "--max-context", "999999") == 2
    assert kept.is_dir() and not list(kept.iterdir())


def test_what_a_start_made_goes_with_it_where_a_process_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that only one of the processes finds unreadable: keys, tenants and logs are gone again, and the terminal
    says why and that."""
    model = make_tiny_llama(tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    assert start(model, tmp_path / "new" / "state", "--pool-blocks", "32") == 1
    told = capsys.readouterr().err
    assert "tokenizer.json is not readable" in told and "could not start" in told
    assert f"{tmp_path}/new/state is removed again, with its logs" in told
    assert not (tmp_path / "new").exists()


def test_only_a_refused_start_takes_away_what_it_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that ended otherwise, be it that a process crashed too often, leaves its logs; so does one in a folder that
    was there before."""

    def refuse() -> None:
        raise RefusedStart("decoder-0 could not start")

    for state, begin, stays in (("a", fail, True), ("b", nothing, True), ("c", refuse, False), ("tmp", refuse, True)):
        (tmp_path / "tmp").mkdir(mode=0o700, exist_ok=True)
        flags = ["--state-dir", str(tmp_path / state)]
        options = load_options(build_parser("up").parse_args(flags), {"HOME": "/nowhere"})
        run(Node(options, StatePaths(options.state_dir), ()), monkeypatch, begin, nothing)
        assert (tmp_path / state).exists() is stays, state


@pytest.mark.parametrize("name", ["audit.log", "adapters", "notes.txt"])
def test_a_state_directory_that_somebody_used_is_not_taken_away(name: str, tmp_path: Path) -> None:
    """Once an operator changed something, or put something there, what a start made stays; without that it goes."""
    flags = ["--state-dir", str(tmp_path / "new" / "state")]
    options = load_options(build_parser("up").parse_args(flags), {"HOME": "/nowhere"})
    for used in (True, False):
        node = Node(options, StatePaths(options.state_dir), ())
        fresh = FreshState(node)
        write_key(node.paths.default_key)
        other = node.paths.state_dir / name
        if used:
            other.touch()
        assert fresh.remove() is not used
        assert node.paths.state_dir.exists() is used
        if used:
            assert not FreshState(node).remove(), "it was there before"
            shutil.rmtree(tmp_path / "new")
