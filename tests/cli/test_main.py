"""The `tessera` command itself: which commands there are, and how wrong usage ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.__main__ import COMMANDS, main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`tessera --help` ends with status 0 and lists every command there is."""
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["nonsense"], "there are demo, up, "), (["--nonsense"], "there are demo, up, "), (["upp"], "did you mean up?")],
)
def test_a_command_that_is_not_there_is_refused_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says which commands there are, or the one that was meant; without any the whole list is shown."""
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert arguments[0] in line and said in line and "tessera --help" in line
    assert main([]) == 2
    assert "usage: tessera COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("cachemgr", "decoder", "gateway")])
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command takes --help and ends with status 0."""
    try:
        status = main([name, "--help"])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 0
    assert "usage: tessera" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--pool-blocks", "many"],
        ["up", "--no-such-option"],
        ["demo", "--block-tokens", "17"],
        ["generate"],
        ["generate", "x", "--max-tokens", "1.5"],
        ["generate", "x", "--temperature", "hot"],
        ["generate", "x", "--top-p", "nan"],
        ["chat", "--no-such-option"],
        ["plan", "--layers", "2000"],
        ["plan", "--memory", "2000T"],
        ["adapter"],
        ["generate", "x", "--raw", "--system", "y"],
        ["admin"],
        ["admin", "evict"],
        ["admin", "blocks", "--state", "melted"],
        ["admin", "blocks", "--limit", "0"],
        ["admin", "blocks", "--no-such-option"],
        ["admin", "keys", "melt"],
        ["admin", "keys", "create"],
        ["admin", "create-key", "acme", "--ttl", "1d"],
        ["admin", "drain", "--timeout", "-1"],
        ["model", "fetch", "no-slash"],
        ["model", "fetch", "a/b", "--wheel", "c.whl"],
        ["probe"],
        ["probe", "--target", "unix:x", "--timeout", "0"],
        ["probe", "--target", "nowhere"],
        ["admin", "explain"],
        ["admin", "pin", "--text", "x", "--tokens", "1"],
        ["demo", "--no-such-option"],
        ["bench", "no-such-benchmark"],
        ["up", "--ephemeral", "--state-dir", "here"],
        ["up", "--ephemeral", "--state-dir=here"],
    ],
)
def test_bad_input_ends_with_status_2_and_a_message(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a user types wrong is answered with a message and status 2, never with a traceback."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TESSERA_MODEL", str(tmp_path))
    try:
        status = main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tessera {arguments[0]}")


def test_up_without_a_model_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A newcomer who starts `tessera up` first is told about `tessera model fetch`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TESSERA_MODEL", raising=False)
    assert main(["up"]) == 1
    assert "tessera model fetch" in capsys.readouterr().err


def test_probe_imports_neither_torch_nor_numpy() -> None:
    """The health check of a container starts fast: it loads gRPC and no numerics."""
    program = (
        "import sys; from cli.__main__ import main; "
        "status = main(['probe', '--target', 'unix:/nowhere', '--timeout', '1']); "
        "print(status, sorted({'torch', 'numba', 'numpy', 'tokenizers'} & set(sys.modules)), 'grpc' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "1 [] True"


@pytest.mark.parametrize("moment", ["import", "run", "service"])
def test_ctrl_c_is_quiet_at_any_moment(moment: str, tmp_path: Path) -> None:
    """Ctrl-C ends a command with status 130 and no traceback, while its modules are imported and while it runs.

    So does a service that has not yet taken Ctrl-C into its own hands.
    """
    pause = "print('there', flush=True)\n{0}while True:\n{0}    time.sleep(0.01)\n"
    body = pause.format("") if moment != "run" else "def main(arguments):\n    " + pause.format("    ")
    (tmp_path / "slow_command.py").write_text(f"import time\n{body}", encoding="utf-8")
    program = (
        "import sys; from cli import __main__ as command; command.COMMANDS['slow'] = ('slow_command', ''); "
        "command.COMMANDS['slow_command'] = ('cli.service', ''); command.NEEDS_ITS_NAME = ('slow_command',); "
        f"sys.exit(command.main([{'slow_command' if moment == 'service' else 'slow'!r}]))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert not said.strip()


@pytest.mark.parametrize("name", ["cachemgr", "decoder", "gateway"])
def test_a_service_takes_its_own_options(name: str) -> None:
    """`tessera SERVICE` is `python -m SERVICE`: the same help, and status 2 for an option that it does not have."""
    shown = [
        subprocess.run([sys.executable, "-m", *way, name, "--help"], capture_output=True, text=True, check=True).stdout
        for way in (["cli"], [])
    ]
    assert shown[0] == shown[1]
    assert f"usage: tessera {name}" in shown[0]
    wrong = [sys.executable, "-m", "cli", name, "--no-such-option"]
    refused = subprocess.run(wrong, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line == f"tessera {name}: there is no option '--no-such-option' (see `tessera {name} --help`)"


def test_importing_a_command_leaves_ctrl_c_as_it_was() -> None:
    """A caller's own handling of Ctrl-C is neither used nor lost."""
    before = signal.getsignal(signal.SIGINT)
    assert main(["probe", "--target", "unix:/nowhere", "--timeout", "1"]) == 1
    assert signal.getsignal(signal.SIGINT) is before
