"""Unix sockets whose file is put back when somebody deletes it.

A socket is bound at a hidden name (`.decoder-0.sock.keep`) and gets its public one as a second hard link to the same
inode, so that either name restores the other, connections included. Invariant: this process removes or replaces a file
at the public name only while it holds the owner's lock, and removes it at the end only if it is its own socket. Used by
the cache manager and by decoders; it serves nothing itself. Where both names are gone nothing can restore them: the
owner is told once and decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Final

from common.errors import FailedPrecondition
from common.logs import get_logger
from common.socket_files import replace_stale_socket

LOOK_SECONDS: Final = 0.5
_Identity = tuple[int, int]


def kept_path(path: Path) -> Path:
    """The hidden name beside a socket's public one; the longer of the two."""
    return path.with_name(f".{path.name}.keep")


class SocketState(Enum):
    """What a look found, and did."""

    WHOLE = "whole"
    RESTORED = "restored"
    STUCK = "stuck"
    LOST = "lost"


class KeptSocket:
    """One socket with two names. `clear` before binding at `kept`, `publish` after, `look` now and then, `remove`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept = kept_path(path)
        self._identity: _Identity | None = None

    def clear(self) -> None:
        """Remove what a dead owner left. Raises FailedPrecondition where a name is taken by something else."""
        for name in (self.path, self.kept):
            replace_stale_socket(name)

    def publish(self) -> None:
        """The socket is bound and listens at `kept`: make it private (0600) and give it its public name.

        A file system without hard links leaves it the public name alone: a deleted file is lost there. Raises
        FailedPrecondition where the folder allows neither.
        """
        try:
            self.kept.chmod(0o600)
            self._identity = _identity(self.kept)
            try:
                self._link(self.kept, self.path)
            except OSError as error:
                get_logger().warning("socket_not_kept", socket=self.path.name, why=error.strerror)
                self.kept.rename(self.path)
        except OSError as error:
            raise FailedPrecondition(f"{self.path.name} cannot be put into the run folder: {error.strerror}") from error

    def look(self) -> SocketState:
        """Restore whichever name is gone (or is another file) from the other. Never raises OSError."""
        if self._identity is None:
            return SocketState.LOST
        public, kept = (_identity(name) == self._identity for name in (self.path, self.kept))
        if public and kept:
            return SocketState.WHOLE
        if not public and not kept:
            return SocketState.LOST
        source, target = (self.path, self.kept) if public else (self.kept, self.path)
        try:
            self._link(source, target)
        except OSError:  # a full disk, say: the next look tries again
            return SocketState.STUCK
        return SocketState.WHOLE if public else SocketState.RESTORED

    def remove(self) -> None:
        """Remove both names where they are still this socket's. Harmless when repeated; call before it is closed."""
        for name in (self.path, self.kept):
            if self._identity is not None and _identity(name) == self._identity:
                with contextlib.suppress(OSError):
                    name.unlink()
        self._identity = None

    def _link(self, source: Path, target: Path) -> None:
        # By way of a third name, as a link never replaces what is there.
        fresh = self.kept.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        os.link(source, fresh, follow_symlinks=False)
        fresh.replace(target)


async def watch_sockets(sockets: Sequence[KeptSocket], lost: Callable[[], object] = lambda: None) -> None:
    """Look at `sockets` for ever, twice a second; `lost` is called at the first one that cannot be restored."""
    log = get_logger()
    gone: set[Path] = set()
    while True:
        for one in sockets:
            state = one.look()
            if state is SocketState.RESTORED:
                log.warning("socket_restored", socket=one.path.name)
            elif state is SocketState.LOST and one.path not in gone:
                gone.add(one.path)
                log.error("socket_lost", socket=one.path.name, remedy="its files were deleted: restart this process")
                lost()
        await asyncio.sleep(LOOK_SECONDS)


def _identity(path: Path) -> _Identity | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
