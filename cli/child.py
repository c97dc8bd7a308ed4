"""One child process of the supervisor: started on a leash, its output in a log file of its own, its errors heard.

Invariant: a child never outlives its supervisor (`cli/leash.py`), sits in a process group of its own (so that Ctrl-C on
the terminal reaches the supervisor alone), and writes straight to its file, so that it never waits for the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cli import leash
from cli.log_lines import last_words, loud_line

LITTLE_BYTES = 1 << 20  # left on a disk, with which a process may fail to write what it needs
MAX_LOG_BYTES = 16 * 1024 * 1024
MAX_TAIL_BYTES = 64 * 1024
MAX_TOLD = 100
PORT_ALONE = "tcp:"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run: `command[0]` is an absolute path.

    `health_target` is where `grpc.health.v1` tells its state; behind `tcp:` it is a port that only has to be open.
    `own_port` is the TCP port that this very process has to listen on before an answer from there counts as its own.
    """

    name: str
    command: tuple[str, ...]
    health_target: str | None = None
    own_port: int | None = None


class LogTail:
    """Reads what a child adds to its log; only whole lines come out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._partial = b""

    @property
    def offset(self) -> int:
        """Bytes of the log that have been read, or were there before."""
        return self._offset

    def new_lines(self) -> list[str]:
        """Lines added since the last call, at most the last 64 KiB of them."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size - self._offset > MAX_TAIL_BYTES:
                    self._offset, self._partial = size - MAX_TAIL_BYTES, b""
                file.seek(self._offset)
                data = self._partial + file.read(size - self._offset)
        except FileNotFoundError:
            return []
        self._offset = size
        *lines, self._partial = data.split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]


class Child:
    """A running child. Make one with `start`."""

    def __init__(self, spec: ChildSpec, process: subprocess.Popen[bytes], log: Path, tail: LogTail) -> None:
        self.spec = spec
        self.log = log
        self._told: deque[str] = deque(maxlen=MAX_TOLD)
        self._born = tail.offset
        self._process = process
        self._tail = tail

    @classmethod
    def start(cls, spec: ChildSpec, log: Path, environ: Mapping[str, str]) -> Child:
        """Start `spec`. Call it from the main thread: the kernel's leash is tied to the thread that forks."""
        if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
            log.replace(log.with_suffix(log.suffix + ".1"))
        descriptor = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _end_line(descriptor)
            tail = LogTail(log)
            wrapper = (sys.executable, "-I", "-S", str(Path(leash.__file__).resolve()), str(os.getpid()))
            process = subprocess.Popen(
                [*wrapper, *spec.command],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env=dict(environ),
                process_group=0,
            )
        finally:
            os.close(descriptor)
        return cls(spec, process, log, tail)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def exit_status(self) -> int | None:
        """None while it runs; otherwise its exit status, or minus the signal that ended it."""
        return self._process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal; harmless if it has ended."""
        self._process.send_signal(number)

    def kill_group(self) -> None:
        """Kill the child and whatever it started in its group."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def loud_lines(self) -> list[str]:
        """New lines of its log that are for the terminal."""
        shown = [line for line in map(loud_line, self._tail.new_lines()) if line is not None]
        self._told.extend(shown)
        return shown

    def last_lines(self, count: int = 15) -> list[str]:
        """What it said last in this life that explains an unexpected end: errors and plain text not told before."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._born, size - MAX_TAIL_BYTES))
            lines = last_words(file.read().decode("utf-8", "replace").splitlines(), count)
        return [line for line in lines if line not in self._told]


def _end_line(log: int) -> None:
    """The life before may have ended within a line, on a full disk, say: the next one begins on a line of its own."""
    size = os.fstat(log).st_size
    if size and os.pread(log, 1, size - 1) != b"\n":
        with contextlib.suppress(OSError):
            os.write(log, b"\n")


def nothing_said(log: Path) -> list[str]:
    """What there is to tell of a process whose log does not say why it ended."""
    free = shutil.disk_usage(log.parent).free
    return [f"it said nothing; the disk of {log.parent} has {free} bytes left"] if free < LITTLE_BYTES else []
