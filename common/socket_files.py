"""Files that make a process the only owner of a place: lock files, and sockets left there by a dead owner.

Invariant: a socket file is removed only while its owner's lock is held, and only if it is a socket; a lock file is
never deleted. Called by the cache manager and by decoders at start, before anything is bound.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from common.errors import FailedPrecondition


def take_lock(path: Path, refusal: FailedPrecondition) -> int:
    """Take the lock file at `path`; the fd holds the lock until it is closed or the process ends.

    Raises `refusal` where another process holds it, and FailedPrecondition where the file cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise FailedPrecondition(f"the lock file {path} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise refusal from None
    except OSError:
        os.close(fd)
        raise
    return fd


def replace_stale_socket(path: Path) -> None:
    """Remove the socket that a dead owner left at `path`. Raises FailedPrecondition on any other kind of file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FailedPrecondition(
            f"{path.name} in the run folder is not a socket; move it away", reason="SOCKET_PATH_TAKEN"
        )
    path.unlink()
