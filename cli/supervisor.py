"""Keeps the processes of a node running, and stops them stage by stage in the reverse order.

Invariant: nothing starts before the first stage answers SERVING (it makes the credentials and sockets that the others
need; those start together and find each other); the node is ready when all of it answers SERVING; a child that dies is
started again after a delay (`cli/restarts.py`) until it has crashed too often, which ends the whole node, as does a
child that refuses to start at all; nothing it started outlives it. One thread: whoever owns the supervisor calls
`poll` and gives it the time. It never reads a request or a block.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cli.child import PORT_ALONE, Child, ChildSpec, nothing_said
from cli.errors import CommandError
from cli.log_lines import COMPILING
from cli.ports import owns_listener
from cli.probe import check_health
from cli.restarts import RestartHistory, RestartLimits

POLL_SECONDS = 0.05
PROBE_TIMEOUT_SECONDS = 1.0
PROBE_PAUSE_SECONDS = 0.2
FIRST_SILENCE_SECONDS, SILENCE_SECONDS = 5.0, 15.0
NO_WORD = "its program is being loaded"


class RefusedStart(CommandError):
    """A child ended with an error before it ever served, and would again."""


class Stopped(Exception):
    """The wait ended because the owner wants to stop."""


@dataclass(slots=True)
class _Slot:
    """One child over all its lives."""

    spec: ChildSpec
    history: RestartHistory
    child: Child | None = None
    restart_at_seconds: float | None = None
    serving: bool = False
    has_served: bool = False
    next_check_seconds: float = 0.0
    started_seconds: float = 0.0
    heard_seconds: float = 0.0
    patience_seconds: float = FIRST_SILENCE_SECONDS
    last_word: str = NO_WORD


@dataclass(slots=True)
class Supervisor:
    """Runs `stages` of children: the first alone, then all others; stopping goes through them in reverse.

    log_dir:  folder of one log file a child
    announce: called with one line for a person
    healthy:  health of a target; SERVING means ready. Passed in so that tests need no server
    owns:     whether a process id itself listens on a TCP port: another node's gateway may answer in its place
    stopping: asked between polls; true ends every wait with `Stopped`
    compiling: called when a child says that it compiles kernels, which may take minutes
    """

    stages: Sequence[Sequence[ChildSpec]]
    log_dir: Path
    announce: Callable[[str], None]
    limits: RestartLimits = field(default_factory=RestartLimits)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    healthy: Callable[[str], bool] = lambda target: is_healthy(target)
    owns: Callable[[int, int], bool] = owns_listener
    stopping: Callable[[], bool] = lambda: False
    compiling: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _slots: list[list[_Slot]] = field(init=False)

    def __post_init__(self) -> None:
        """Nothing runs yet."""
        self._slots = [[_Slot(spec, RestartHistory(self.limits)) for spec in stage] for stage in self.stages]

    def start(self, timeout_seconds: float) -> None:
        """Start the first stage, once it serves all others, and wait until everything serves.

        Raises CommandError when a child crashes too often or time is over, `Stopped` when the owner wants to stop.
        """
        deadline = self.clock() + timeout_seconds
        first = self._slots[0] if self._slots else []
        for wave in (first, [slot for stage in self._slots[1:] for slot in stage]):
            for slot in wave:
                self._start_child(slot)
            while not all(slot.serving for slot in wave):
                if self.stopping():
                    raise Stopped
                if self.clock() > deadline:
                    waiting = ", ".join(slot.spec.name for slot in wave if not slot.serving)
                    raise CommandError(f"not ready after {timeout_seconds:.0f} s: {waiting}; see {self.log_dir}")
                self.poll()
                self.sleep(POLL_SECONDS)

    def poll(self) -> None:
        """Hear errors, notice deaths and health, start again what is due. CommandError when a child is past help."""
        for slot in self._all():
            if slot.child is None:
                if slot.restart_at_seconds is not None and self.clock() >= slot.restart_at_seconds:
                    self._start_child(slot)
                continue
            status = slot.child.exit_status()
            for line in slot.child.loud_lines():
                self.announce(f"{slot.spec.name}: {line}")
                slot.heard_seconds, slot.patience_seconds = self.clock(), FIRST_SILENCE_SECONDS
                slot.last_word = line
                if line.startswith(COMPILING) and not slot.has_served:
                    self.compiling()
            if status is not None:
                self._child_died(slot, slot.child, status)
            elif not slot.serving and self.clock() >= slot.next_check_seconds:
                self._check(slot, slot.child)
                self._break_silence(slot, slot.child)

    def is_ready(self) -> bool:
        """Whether every child has answered SERVING since its last start."""
        return all(slot.serving for slot in self._all())

    def pids(self) -> dict[str, int]:
        """Name -> process id of what runs now."""
        return {slot.spec.name: slot.child.pid for slot in self._all() if slot.child is not None}

    def stop(self, grace_seconds: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """End the stages in reverse order: SIGTERM, then SIGKILL after `grace_seconds` a stage or once `hurry` says so.

        True if every child ended by itself with status 0. May be called twice.
        """
        clean = True
        for stage in reversed(self._slots):
            running = [slot for slot in stage if slot.child is not None]
            for slot in running:
                if slot.child is not None:
                    slot.child.send(signal.SIGTERM)
            deadline = self.clock() + grace_seconds
            while any(slot.child is not None and slot.child.exit_status() is None for slot in running):
                if hurry() or self.clock() > deadline:
                    break
                self.sleep(POLL_SECONDS)
            for slot in running:
                clean = self._end_child(slot) and clean
        return clean

    def _all(self) -> list[_Slot]:
        return [slot for stage in self._slots for slot in stage]

    def _start_child(self, slot: _Slot) -> None:
        slot.restart_at_seconds, slot.serving = None, False
        slot.patience_seconds, slot.last_word = FIRST_SILENCE_SECONDS, NO_WORD
        slot.started_seconds = slot.heard_seconds = self.clock()
        slot.child = Child.start(slot.spec, self.log_dir / f"{slot.spec.name}.log", self.environ)

    def _check(self, slot: _Slot, child: Child) -> None:
        answers = slot.spec.health_target is None or self.healthy(slot.spec.health_target)
        is_its_own = slot.spec.own_port is None or self.owns(child.pid, slot.spec.own_port)
        slot.serving = answers and is_its_own and child.exit_status() is None
        slot.next_check_seconds = self.clock() + PROBE_PAUSE_SECONDS
        if slot.serving:
            slot.has_served = True
            self.announce(f"{slot.spec.name} is ready (process {child.pid})")

    def _break_silence(self, slot: _Slot, child: Child) -> None:
        now = self.clock()
        awaited = next((other for other in self._all() if not other.serving), None)  # the gateway waits for the decoder
        if slot is awaited and now - slot.heard_seconds > slot.patience_seconds:
            slot.heard_seconds, slot.patience_seconds = now, SILENCE_SECONDS
            since = f"{now - slot.started_seconds:.0f} s after its start"
            self.announce(f"waiting for {slot.spec.name}, {since} ({slot.last_word}); its log: {child.log}")

    def _child_died(self, slot: _Slot, child: Child, status: int) -> None:
        slot.child, slot.serving = None, False
        delay = slot.history.next_delay(self.clock())
        self.announce(f"{slot.spec.name} (process {child.pid}) ended: {describe_status(status)}")
        for line in child.last_lines() or nothing_said(child.log):
            self.announce(f"  | {line}")
        if status > 0 and not slot.has_served:  # it refused to start, and would again
            raise RefusedStart(f"{slot.spec.name} could not start; why stands above. Its log: {child.log}")
        if delay is None:
            raise CommandError(
                f"{slot.spec.name} ended {self.limits.max_crashes + 1} times within "
                f"{self.limits.window_seconds:.0f} s; giving up. Its log: {child.log}"
            )
        self.announce(f"{slot.spec.name} starts again in {delay:.2f} s")
        slot.restart_at_seconds = self.clock() + delay

    def _end_child(self, slot: _Slot) -> bool:
        child, slot.child, slot.restart_at_seconds, slot.serving = slot.child, None, None, False
        if child is None:
            return True
        status = child.exit_status()
        if status is None:
            child.kill_group()
        while child.exit_status() is None:  # SIGKILL has been sent; the kernel reaps it soon
            self.sleep(POLL_SECONDS)
        if status == -signal.SIGTERM and not slot.has_served:
            return True  # it was still loading and had nothing to drain
        if status != 0:
            what = "was killed" if status is None else f"ended: {describe_status(status)}"
            self.announce(f"{slot.spec.name} {what}")
        return status == 0


def is_healthy(target: str) -> bool:
    """Whether a target answers SERVING; of a `tcp:` target, whether its port is open."""
    if not target.startswith(PORT_ALONE):
        return check_health(target, PROBE_TIMEOUT_SECONDS) == "SERVING"
    host, _, port = target.removeprefix(PORT_ALONE).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_SECONDS).close()
    except OSError:
        return False
    return True


def describe_status(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
