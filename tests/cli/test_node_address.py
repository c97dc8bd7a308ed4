"""Where clients send the keys of a state directory: to its running node, to an address that was named, else nowhere."""

from __future__ import annotations

import errno
import io
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cli.__main__ import main
from cli.node import Node
from cli.node_address import find_address
from cli.node_lock import sole_supervisor
from cli.up import tell_endpoint
from common.config import build_parser, load_options
from common.paths import StatePaths
from tests.cli.support import write_key
from tests.cli.test_clients import Inference, asked, inference

__all__ = ("inference",)


def test_the_endpoint_of_a_running_node_is_found(tmp_path: Path) -> None:
    """What `tessera up` leaves behind is found while it runs, its certificate too; what is given goes first."""
    paths = StatePaths(tmp_path)
    assert find_address(paths) is None
    flags = ["--listen", "0.0.0.0:6001", "--insecure-listen", "--state-dir", str(tmp_path)]
    for more, expected in (
        ([], ("127.0.0.1:6001", None)),
        (["--tls-cert", "/c.pem", "--tls-key", "/k.pem"], ("localhost:6001", Path("/c.pem"))),
    ):
        options = load_options(build_parser("up").parse_args([*flags, *more]), {"HOME": "/nowhere"})
        paths.prepare()
        with sole_supervisor(paths):
            assert find_address(paths) is None, "what the one before left counts for nothing"
            tell_endpoint(Node(options, paths, ()))
            assert find_address(paths) == expected
            assert find_address(paths, "other:1") == ("other:1", None)
        assert paths.endpoint_file.exists()
        assert find_address(paths) is None


@pytest.mark.parametrize("command", [["generate", "Hi"], ["chat"], ["admin", "explain", "--text", "Hi"]])
def test_no_key_goes_to_what_listens_where_a_node_was(
    command: list[str],
    inference: Inference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where no node runs on the state directory, nothing is called, be it that a killed one left its address: the
    command says so and how to start one. With the node's lock held, and with --endpoint, the same server is called."""
    paths = StatePaths(tmp_path)
    paths.prepare()
    write_key(paths.default_key)
    write_key(paths.admin_key)
    at = f"unix:{tmp_path}/g.sock"
    state = ["--state-dir", str(tmp_path)]
    with sole_supervisor(paths):
        paths.endpoint_file.write_text(f"{at}\n")
    tessera_up = f"start one with `tessera up --state-dir {tmp_path}`"
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    for listens in (True, False):
        if not listens:
            paths.endpoint_file.unlink()
        assert main([*command, *state]) == 1
        told = capsys.readouterr().err
        assert f"no node runs on {tmp_path}; {tessera_up}" in told and "--endpoint" in told
    assert not inference[0].metadata
    main([*command, *state, "--endpoint", at])
    assert inference[0].metadata, "control: an address that was named"
    inference[0].metadata.clear()
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    with sole_supervisor(paths):
        paths.endpoint_file.write_text(f"{at}\n")
        main([*command, *state])
    assert inference[0].metadata, "control: its node runs"


def test_a_state_directory_that_is_closed_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose it is may have a node there: nobody is told that none runs, or to start one. Control: an open one."""
    assert main(["generate", "Hi", "--state-dir", str(tmp_path)]) == 1
    assert "no node runs on" in capsys.readouterr().err

    def refuse(path: Any, *_flags: Any, **_more: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("cli.node_lock.os.open", refuse)
    assert main(["generate", "Hi", "--state-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"tessera generate: --state-dir {tmp_path} is closed to this user: Permission denied\n"
    )


def test_a_chat_sends_no_key_to_what_comes_after_its_node(
    inference: Inference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node ends between two questions, and its port is another's: the second question is not sent."""
    paths = StatePaths(tmp_path)
    paths.prepare()
    write_key(paths.default_key)
    running = ExitStack()
    running.enter_context(sole_supervisor(paths))
    paths.endpoint_file.write_text(f"unix:{tmp_path}/g.sock\n")

    class Lines(io.StringIO):
        def readline(self, *sizes: Any) -> str:  # type: ignore[override]
            if self.tell():
                running.close()
            return super().readline(*sizes)

    monkeypatch.setattr("sys.stdin", Lines("one\ntwo\n"))
    assert main(["chat", "--state-dir", str(tmp_path)]) == 1
    assert [turn[-1] for _, turn in asked(inference[0])] == ["one"]
    assert len(inference[0].metadata) == 1
    assert "no node runs on" in capsys.readouterr().err
