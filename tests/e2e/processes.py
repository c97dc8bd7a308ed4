"""Child processes of the end-to-end rig: started in a session of their own, logged to a file, killed at the end.

Invariant: no process started here outlives the test run: it dies with the thread that started it (PDEATHSIG), and
`Process.stop` ends its whole process group. Used by `rig.py` and by tests that need a client to kill.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.02
# Sets PR_SET_PDEATHSIG (1) to SIGKILL (9), which survives the exec of the process proper.
_LAUNCHER = (
    "import ctypes,os,sys;"
    "ctypes.CDLL(None,use_errno=True).prctl(1,9,0,0,0);"
    "os.getppid()==1 and sys.exit(1);"
    "os.execv(sys.argv[1],sys.argv[1:])"
)


class Expired(AssertionError):
    """A state that was waited for did not come within its deadline."""


def patience(seconds: float) -> float:
    """A bound, stretched by `TESSERA_E2E_PATIENCE` on machines that do something else as well."""
    return seconds * float(os.environ.get("TESSERA_E2E_PATIENCE", "1"))


def poll(probe: Callable[[], T], *, within: float, what: str) -> T:
    """The first true answer of `probe`; raises Expired with `what` after `within` seconds."""
    deadline = time.monotonic() + patience(within)
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise Expired(f"not within {patience(within):.1f} s: {what}; last answer {answer!r}")
        time.sleep(POLL_SECONDS)


def clean_environment() -> dict[str, str]:
    """The environment without options that would leak into the processes under test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_")}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "GRPC_VERBOSITY": "ERROR"}


class Process:
    """One child process. `arguments` follow the interpreter: `["-m", "cachemgr", ...]`."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] = {}) -> None:
        self.name = name
        self.log = log
        self._arguments = [sys.executable, *arguments]
        self._environment = {**clean_environment(), **environment}
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running child."""
        if self._child is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._child.pid

    def start(self) -> None:
        """Start it; the log is appended to."""
        with self.log.open("ab") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-S", "-c", _LAUNCHER, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=self._environment,
                start_new_session=True,
            )

    def status(self) -> int | None:
        """Exit status, or None while it runs."""
        return None if self._child is None else self._child.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, number)

    def wait(self, within: float) -> int:
        """Exit status, within a deadline."""
        poll(lambda: self.status() is not None, within=within, what=f"{self.name} has ended\n{self.tail()}")
        status = self.status()
        if status is None:
            raise Expired(f"{self.name} runs")
        return status

    def kill(self) -> None:
        """SIGKILL to its whole group, and reap it."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(timeout=patience(30))

    def stop(self, within: float = 30.0) -> int:
        """SIGTERM, a bounded wait, then SIGKILL. Returns the exit status."""
        if self._child is None:
            return 0
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=patience(within))
        self.kill()
        return int(self._child.returncode)

    def text(self) -> str:
        """Everything it has logged."""
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""

    def tail(self, lines: int = 40) -> str:
        """The end of its log, for failures."""
        return f"--- {self.name}\n" + "\n".join(self.text().splitlines()[-lines:])


def children_of(pid: int) -> dict[int, str]:
    """Process ids and command lines of the direct children of `pid`."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid:
                found[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                )
    return found
