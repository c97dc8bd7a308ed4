"""Files that make the daemon the only one of its state directory: the lock, and sockets left by a dead one.

Invariant: a socket file is removed only while the lock is held, and only if it is a socket; nothing else is ever
deleted. Called at start, before anything is bound.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from common.errors import FailedPrecondition


def lock_state(path: Path) -> int:
    """Take the lock file of a state directory; the fd holds the lock until it is closed or the process ends.

    Raises FailedPrecondition where another cache manager holds it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise FailedPrecondition(
            "another cache manager runs on this state directory; stop it, or choose another --state-dir",
            reason="STATE_IN_USE",
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def replace_stale_socket(path: Path) -> None:
    """Remove the socket that a dead daemon left at `path`. Raises FailedPrecondition on any other kind of file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FailedPrecondition(
            f"{path.name} in the run folder is not a socket; move it away", reason="SOCKET_PATH_TAKEN"
        )
    path.unlink()
