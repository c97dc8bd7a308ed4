"""The supervisor over real, tiny children: order, restarts, drain, and that nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.child import Child, ChildSpec, LogTail
from cli.errors import CommandError
from cli.log_lines import COMPILING
from cli.restarts import RestartLimits
from cli.supervisor import Stopped, Supervisor, describe_status
from tests.cli.support import wait_until

# A child that says when it starts and ends in one shared file, in order; `touch(ready)` makes it healthy.
CHILD = textwrap.dedent(
    """
    import os, signal, sys, time
    name, record, ready, mode = sys.argv[1:5]
    def note(what):
        with open(record, "a") as file:
            file.write(f"{what} {name}\\n")
    def end(*_):
        note("end")
        sys.exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else end)
    note("start")
    open(ready, "w").close()
    while mode == "crash" and not os.path.exists(ready + ".seen"):
        time.sleep(0.01)
    if mode in ("crash", "refuse", "silent"):
        if mode != "silent":
            print("this one always dies", file=sys.stderr)
        sys.exit(3)
    while True:
        time.sleep(0.05)
    """
)


class Rig:
    """Children of `CHILD` below one folder, and what was said about them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "record"
        self.said: list[str] = []
        self.script = folder / "child.py"
        self.script.write_text(CHILD, encoding="utf-8")
        self.asked_to_stop = False
        self.made: list[Supervisor] = []

    def spec(self, name: str, mode: str = "run") -> ChildSpec:
        """One child; its health target is the file that it makes when it is up."""
        ready = str(self.folder / f"{name}.ready")
        return ChildSpec(name, (sys.executable, str(self.script), name, str(self.record), ready, mode), ready)

    def supervisor(self, *stages: list[ChildSpec], limits: RestartLimits | None = None) -> Supervisor:
        """A supervisor that takes a file for health."""
        made = Supervisor(
            stages,
            self.folder,
            self.said.append,
            limits=limits or RestartLimits(0.02, 0.1, 3, 60.0),
            healthy=self.is_healthy,
            stopping=lambda: self.asked_to_stop,
        )
        self.made.append(made)
        return made

    def is_healthy(self, target: str) -> bool:
        """Whether the child has made its file; the child learns that it was seen."""
        if not Path(target).exists():
            return False
        Path(target + ".seen").touch()
        return True

    def events(self) -> list[str]:
        """What the children noted, in order."""
        return self.record.read_text(encoding="utf-8").splitlines() if self.record.exists() else []


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A rig whose children are gone afterwards, whatever the test did."""
    made = Rig(tmp_path)
    yield made
    for supervisor in made.made:
        supervisor.stop(0.0)


def is_gone(pid: int) -> bool:
    """Whether no process (a zombie apart) has this id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_stages_start_in_order_and_stop_in_reverse(rig: Rig) -> None:
    """Nothing starts before the first stage is healthy; they end in order: gateway, decoders, cache manager."""
    supervisor = rig.supervisor([rig.spec("cachemgr")], [rig.spec("decoder-0")], [rig.spec("gateway")])
    supervisor.start(20.0)
    assert supervisor.is_ready()
    assert supervisor.stop(10.0)
    events = rig.events()
    assert events[0] == "start cachemgr"
    assert set(events[1:3]) == {"start decoder-0", "start gateway"}
    assert events[3:] == ["end gateway", "end decoder-0", "end cachemgr"]


def test_nothing_starts_while_the_first_stage_is_not_healthy(rig: Rig) -> None:
    """A cache manager that does not become healthy keeps everything else from starting."""
    never = ChildSpec("cachemgr", rig.spec("cachemgr").command, str(rig.folder / "never"))
    supervisor = rig.supervisor([never], [rig.spec("decoder-0")])
    with pytest.raises(CommandError, match="not ready after 0 s: cachemgr"):
        supervisor.start(0.5)
    assert list(supervisor.pids()) == ["cachemgr"]


def test_a_child_that_dies_is_started_again(rig: Rig) -> None:
    """A killed child comes back with another process id, its end is explained, and the others are left alone."""
    supervisor = rig.supervisor([rig.spec("cachemgr")], [rig.spec("decoder-0")])
    supervisor.start(20.0)
    before = supervisor.pids()
    os.kill(before["decoder-0"], signal.SIGKILL)

    def back() -> bool:
        supervisor.poll()
        return supervisor.is_ready() and supervisor.pids()["decoder-0"] != before["decoder-0"]

    wait_until(back, "the decoder is back")
    assert supervisor.pids()["cachemgr"] == before["cachemgr"]
    assert any("killed by SIGKILL" in line for line in rig.said)


def test_a_killed_child_floods_no_terminal(rig: Rig) -> None:
    """What a child logged about its work stays in its log when it is killed; an error is told once."""
    lines = ['{"event": "request_left", "level": "info"}'] * 12
    (rig.folder / "loud").write_text(
        "\n".join([*lines, '{"event": "odd_thing", "level": "error"}', ""]), encoding="utf-8"
    )
    program = "import sys, time; print(open(sys.argv[1]).read(), flush=True); open(sys.argv[2], 'w'); time.sleep(600)"
    ready = str(rig.folder / "ready")
    spec = ChildSpec("decoder-0", (sys.executable, "-c", program, str(rig.folder / "loud"), ready), ready)
    supervisor = rig.supervisor([spec])
    supervisor.start(20.0)
    os.kill(supervisor.pids()["decoder-0"], signal.SIGKILL)

    def told() -> bool:
        supervisor.poll()
        return any("starts again" in line for line in rig.said)

    wait_until(told, "its end is told")
    assert "request_left" in (rig.folder / "decoder-0.log").read_text(encoding="utf-8")
    first = [line.partition(" (process")[0] for line in rig.said[: rig.said.index(told_line(rig))]]
    assert sorted(first) == ["decoder-0", "decoder-0 is ready", "decoder-0: odd thing"]


def told_line(rig: Rig) -> str:
    """The line that announces the next start."""
    return next(line for line in rig.said if "starts again" in line)


def test_compiling_is_told_at_once_and_passed_on(rig: Rig) -> None:
    """What a decoder says of its kernels is on the terminal, and the owner hears that it compiles."""
    compiling = json.dumps({"event": "kernels_compiling", "level": "info", "functions": 0, "seconds": 0})
    program = "import sys, time; print(sys.argv[1], flush=True); time.sleep(600)"
    spec = ChildSpec("decoder-0", (sys.executable, "-c", program, compiling), str(rig.folder / "ready"))
    supervisor = rig.supervisor([spec])
    heard: list[str] = []
    supervisor.compiling = lambda: heard.append("compiling")
    with pytest.raises(CommandError, match="not ready"):
        supervisor.start(-1.0)

    def told() -> bool:
        supervisor.poll()
        return any(line.startswith(f"decoder-0: {COMPILING}") for line in rig.said)

    assert not heard
    wait_until(told, "it is told")
    assert heard == ["compiling"]


def test_a_long_silence_is_broken_by_whom_the_others_wait_for(rig: Rig) -> None:
    """Five seconds after its last word the user reads that a decoder is waited for, with what it does and where its log
    is; then each fifteen seconds again. Of the gateway, which waits for the decoder, nothing is said."""
    program = "import time; time.sleep(600)"
    decoder, gateway = (
        ChildSpec(name, (sys.executable, "-c", program), str(rig.folder / name)) for name in ("decoder-0", "gateway")
    )
    supervisor = rig.supervisor([], [decoder], [gateway])
    now = [0.0]
    supervisor.clock = lambda: now[0]
    with pytest.raises(CommandError, match="not ready"):
        supervisor.start(-1.0)
    for second, told in ((4.0, 0), (5.0, 0), (5.6, 1), (20.0, 1), (21.0, 2), (35.5, 2)):
        now[0] = second
        supervisor.poll()
        assert len(rig.said) == told, second
    log = rig.folder / "decoder-0.log"
    waiting = "waiting for decoder-0, {} s after its start ({}); its log: {}"
    assert rig.said == [waiting.format(second, "its program is being loaded", log) for second in (6, 21)]
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "model_loading", "level": "info", "stage": "kernels", "fraction": 0.0}) + "\n")
    now[0] = 36.0
    supervisor.poll()
    now[0] = 41.5
    supervisor.poll()
    word = "loading the model: kernels 0 %"
    assert rig.said[2:] == [f"decoder-0: {word}", waiting.format(42, word, log)]


def test_a_child_that_keeps_dying_ends_the_node_with_its_last_words(rig: Rig) -> None:
    """After too many rapid crashes the supervisor gives up, and what the child said last stands on the terminal."""
    supervisor = rig.supervisor([rig.spec("cachemgr")], [rig.spec("decoder-0", "crash")])
    with pytest.raises(CommandError, match="decoder-0 ended 4 times"):
        supervisor.start(20.0)
        while True:
            supervisor.poll()
    assert supervisor.stop(10.0)
    assert rig.events().count("start decoder-0") == 4
    assert any("this one always dies" in line for line in rig.said)
    assert rig.events()[-1] == "end cachemgr"


def test_a_child_that_refuses_to_start_is_not_started_again(rig: Rig) -> None:
    """A child that ends with an error before it ever was healthy ends the node at once, with its last words."""
    never = ChildSpec("gateway", rig.spec("gateway", "refuse").command, str(rig.folder / "never"))
    with pytest.raises(CommandError, match="gateway could not start"):
        rig.supervisor([never]).start(20.0)
    assert rig.events() == ["start gateway"]
    assert any("this one always dies" in line for line in rig.said)


@pytest.mark.parametrize("free", [4096, 1 << 30])
def test_a_full_disk_is_named_where_a_child_could_say_nothing(
    rig: Rig, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no room for its last words, the terminal has the reason; where there is room, none is made up."""
    monkeypatch.setattr("cli.child.shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    never = ChildSpec("gateway", rig.spec("gateway", "silent").command, str(rig.folder / "never"))
    with pytest.raises(CommandError, match="gateway could not start"):
        rig.supervisor([never]).start(20.0)
    assert any("4096 bytes left" in line for line in rig.said) is (free == 4096)


def test_an_answer_from_a_port_of_somebody_else_is_not_readiness(rig: Rig) -> None:
    """Another node on the same port answers SERVING; the gateway is ready only once its own process listens there."""
    plain = rig.spec("gateway")
    spec = ChildSpec("gateway", plain.command, plain.health_target, own_port=50051)
    supervisor = rig.supervisor([spec])
    asked: list[tuple[int, int]] = []

    def owns(pid: int, port: int) -> bool:
        asked.append((pid, port))
        return len(asked) > 1

    supervisor.owns = lambda pid, port: False
    with pytest.raises(CommandError, match="not ready after 1 s: gateway"):
        supervisor.start(1.0)
    assert not supervisor.is_ready()
    assert not any("is ready" in line for line in rig.said)
    supervisor.stop(10.0)
    supervisor.owns = owns
    supervisor.start(20.0)
    assert supervisor.is_ready()
    assert asked[-1] == (supervisor.pids()["gateway"], 50051)


def test_a_child_that_ended_is_never_ready(rig: Rig) -> None:
    """A gateway that could not have its port and ended is not ready, however well somebody else answers for it."""
    spec = ChildSpec("gateway", rig.spec("gateway", "refuse").command, "health")
    supervisor = rig.supervisor([spec])

    def healthy(target: str) -> bool:
        wait_until(lambda: all(is_gone(pid) for pid in supervisor.pids().values()), "the child has ended")
        return True

    supervisor.healthy = healthy
    with pytest.raises(CommandError, match="gateway could not start"):
        supervisor.start(20.0)
    assert not any("is ready" in line for line in rig.said)


def test_waiting_for_health_ends_when_time_is_over(rig: Rig) -> None:
    """A child that never becomes healthy is named when the time is over."""
    never = ChildSpec("gateway", rig.spec("gateway").command, str(rig.folder / "never"))
    with pytest.raises(CommandError, match="not ready after 0 s: gateway"):
        rig.supervisor([never]).start(0.1)


def test_asking_to_stop_ends_the_wait(rig: Rig) -> None:
    """Ctrl-C during the start raises Stopped at once."""
    rig.asked_to_stop = True
    never = ChildSpec("gateway", rig.spec("gateway").command, str(rig.folder / "never"))
    with pytest.raises(Stopped):
        rig.supervisor([never]).start(20.0)


@pytest.mark.parametrize("hurried", [True, False])
def test_a_child_that_ignores_the_drain_is_killed(rig: Rig, hurried: bool) -> None:
    """SIGKILL follows when the grace is over, or at once when the user hurries; the stop then counts as unclean."""
    supervisor = rig.supervisor([rig.spec("decoder-0", "stubborn")])
    supervisor.start(20.0)
    pid = supervisor.pids()["decoder-0"]
    assert not supervisor.stop(600.0 if hurried else 0.2, lambda: hurried)
    assert is_gone(pid)
    assert rig.said[-1] == "decoder-0 was killed"


def test_children_do_not_outlive_a_killed_supervisor(rig: Rig) -> None:
    """kill -9 of the supervisor ends every child, even one that ignores SIGTERM."""
    ready = rig.folder / "decoder-0.ready"
    program = textwrap.dedent(
        f"""
        import pathlib, sys, time
        from cli.child import Child, ChildSpec
        spec = ChildSpec("decoder-0", {rig.spec("decoder-0", "stubborn").command!r})
        child = Child.start(spec, pathlib.Path({str(rig.folder / "x.log")!r}), dict(**__import__("os").environ))
        print(child.pid, flush=True)
        time.sleep(600)
        """
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        wait_until(ready.exists, "the child runs")
        assert not is_gone(pid), "positive control: it lives while its supervisor does"
    finally:
        owner.kill()
        owner.communicate()
    wait_until(lambda: is_gone(pid), "the child is gone")


def test_children_have_process_groups_and_logs_of_their_own(rig: Rig) -> None:
    """Ctrl-C on the terminal reaches no child, and a log is readable by its owner alone."""
    supervisor = rig.supervisor([rig.spec("gateway")])
    supervisor.start(20.0)
    pid = supervisor.pids()["gateway"]
    assert os.getpgid(pid) == pid != os.getpgid(0)
    assert (rig.folder / "gateway.log").stat().st_mode & 0o777 == 0o600


def test_a_new_life_begins_on_a_line_of_its_own(rig: Rig) -> None:
    """Where the one before ended within a line, on a full disk, say; after a whole line nothing is added."""
    log = rig.folder / "x.log"
    for before, expected in (('{"event": "cut', ['{"event": "cut', "alive"]), ("whole\n", ["whole", "alive"])):
        log.write_text(before)
        child = Child.start(ChildSpec("x", (sys.executable, "-c", "print('alive')")), log, dict(os.environ))
        wait_until(lambda ended=child: ended.exit_status() is not None, "it has ended")
        assert log.read_text().splitlines() == expected


def test_a_log_is_read_in_whole_lines(tmp_path: Path) -> None:
    """A line that is still being written waits for its end, and is then told once."""
    log = tmp_path / "x.log"
    log.write_bytes(b"old\n")
    tail = LogTail(log)
    with log.open("ab") as file:
        file.write(b"one\ntw")
    assert tail.new_lines() == ["one"]
    with log.open("ab") as file:
        file.write(b"o\n")
    assert tail.new_lines() == ["two"]
    assert tail.new_lines() == []


def test_statuses_are_told_in_words() -> None:
    """A signal is named, an exit status is a number."""
    assert describe_status(3) == "exit status 3"
    assert describe_status(-9) == "killed by SIGKILL"
    assert describe_status(-250) == "killed by signal 250"
