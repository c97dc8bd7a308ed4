"""Whether a `tessera up` runs on a state directory: a lock that the kernel takes away with the process.

Invariant: at most one supervisor holds the lock of a state directory. Nothing in the folder but this lock says that a
node runs there: files that one left behind say nothing. `up` holds it; clients look, and hold it shared while they do.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from cli.errors import CommandError
from common.paths import StatePaths, default_state_dir

SUPERVISOR_LOCK: Final = "supervisor.lock"
LOOK_SECONDS: Final = 0.5
"""How long a start waits for clients that look; one holds the lock for microseconds."""
POLL_SECONDS: Final = 0.02


@contextmanager
def sole_supervisor(paths: StatePaths) -> Iterator[None]:
    """Hold the lock of a state directory. Raises CommandError if another supervisor holds it or it cannot be made."""
    try:
        descriptor = os.open(paths.state_dir / SUPERVISOR_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CommandError(
            f"--state-dir {paths.state_dir} cannot be used: {error.strerror}; choose a folder that is yours to write"
        ) from None
    try:
        deadline = time.monotonic() + LOOK_SECONDS
        while not _take(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise _taken(paths)
            time.sleep(POLL_SECONDS)
        paths.endpoint_file.unlink(missing_ok=True)  # of one that was killed
        yield
    finally:
        os.close(descriptor)


def refuse_second(paths: StatePaths) -> None:
    """Raises CommandError, before anything is made, if another supervisor holds the lock of a state directory."""
    if is_supervised(paths):
        raise _taken(paths)


def is_supervised(paths: StatePaths) -> bool:
    """Whether a `tessera up` runs on the state directory; False where there is none. Raises CommandError where it is
    closed to this user."""
    try:
        descriptor = os.open(paths.state_dir / SUPERVISOR_LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError as error:
        raise CommandError(f"--state-dir {paths.state_dir} is closed to this user: {error.strerror}") from None
    except OSError:
        return False
    try:
        return not _take(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def describe_absence(paths: StatePaths, environ: Mapping[str, str]) -> str:
    """A sentence for who calls the node of a state directory on which none runs: that, and how to start one."""
    flag = "" if paths.state_dir == default_state_dir(environ) else f" --state-dir {paths.state_dir}"
    return f"no node runs on {paths.state_dir}; start one with `tessera up{flag}`"


def _taken(paths: StatePaths) -> CommandError:
    return CommandError(f"another `tessera up` runs on {paths.state_dir}; stop it, or choose another --state-dir")


def _take(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
