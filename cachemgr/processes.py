"""Which decoder processes can write the arena, and when they are known to be dead.

Invariant: a process counts as one that can write from the moment the arena is handed to it until its pidfd says that it
has ended; only then, or when the same decoder of the same process attaches anew, is what it could have written let go.
Called by the session registry on the daemon's event loop. It frees nothing itself.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from dataclasses import dataclass, field

from cachemgr.ids import SessionId


@dataclass(slots=True)
class _Watched:
    pidfd: int
    quarantined: dict[SessionId, str] = field(default_factory=dict)  # session -> decoder name


class Processes:
    """The processes that hold a mapping; `on_ended(process_id, quarantined sessions)` is called once for each."""

    def __init__(self, on_ended: Callable[[int, list[SessionId]], None]) -> None:
        self._on_ended = on_ended
        self._watched: dict[int, _Watched] = {}

    def watch(self, process_id: int, pidfd: int) -> None:
        """Watch the process behind `pidfd`, which is ours to close from now on."""
        if self.can_write(process_id):
            os.close(pidfd)
            return
        self._watched[process_id] = _Watched(pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._ended, process_id)

    def can_write(self, process_id: int) -> bool:
        """Whether the process holds a mapping and lives; a death that the loop has not seen yet is handled here."""
        found = self._watched.get(process_id)
        if found is None:
            return False
        poll = select.poll()
        poll.register(found.pidfd, select.POLLIN)
        if poll.poll(0):
            self._ended(process_id)
            return False
        return True

    def quarantine(self, process_id: int, session: SessionId, decoder_name: str) -> None:
        """Remember that an ended session's blocks wait for this process."""
        found = self._watched.get(process_id)
        if found is not None:
            found.quarantined[session] = decoder_name

    def acknowledge(self, process_id: int, decoder_name: str) -> list[SessionId]:
        """Ended sessions of this very decoder, which attaches anew and so writes under none of them any more."""
        found = self._watched.get(process_id)
        if found is None:
            return []
        sessions = [session for session, name in found.quarantined.items() if name == decoder_name]
        for session in sessions:
            del found.quarantined[session]
        return sessions

    def close(self) -> None:
        """Stop watching. Harmless when repeated."""
        for watched in self._watched.values():
            _release(watched.pidfd)
        self._watched.clear()

    def _ended(self, process_id: int) -> None:
        watched = self._watched.pop(process_id, None)
        if watched is None:
            return
        _release(watched.pidfd)
        self._on_ended(process_id, list(watched.quarantined))


def _release(pidfd: int) -> None:
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)
