"""The processes that hold the arena, as the index journal keeps them for the daemon after this one.

Invariant: a process is in the table before the arena's fd is handed to it, and until it is known to be dead; it is
named by its id and the time it started, so that a number that is used again is nobody of ours. Called by the session
registry and at the daemon's start. It frees no block.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cachemgr.journal_table import Table

_ENTRY: Final = struct.Struct("<QQQ16sQ16sQ")
TOKEN_DIGEST_BYTES: Final = 16
_START_FIELD: Final = 22  # of /proc/<pid>/stat, see proc(5); clock ticks since the machine started


@dataclass(frozen=True, slots=True)
class HolderProcess:
    """A decoder that was given the arena: its process, and its newest session with the digest of its resume token; the
    session before that too, since the answer that named the newest may never have arrived."""

    process_id: int
    start_time: int
    decoder_name: str
    session: int
    token_digest: bytes
    earlier_session: int = 0
    earlier_digest: bytes = bytes(TOKEN_DIGEST_BYTES)

    def is_session(self, session: int, token: bytes) -> bool:
        """Whether a resume token proves one of its sessions."""
        digest = token_digest(token)
        return any(
            own == session and hmac.compare_digest(known, digest)
            for own, known in (
                (self.session, self.token_digest),
                (self.earlier_session, self.earlier_digest),
            )
        )

    def lives(self) -> bool:
        """Whether this very process is there, as far as the kernel shows it to us."""
        return start_time_of(self.process_id) == self.start_time


class HolderTable:
    """The table in a journal; one slot for each decoder of each process."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._slots: dict[tuple[int, int, str], int] = {}
        for slot, data in table.used():
            holder = _unpack(data)
            self._slots[_key(holder)] = slot

    def holders(self) -> list[HolderProcess]:
        """All of them."""
        return [_unpack(data) for _, data in self._table.used()]

    def put(self, holder: HolderProcess) -> bool:
        """Enters or renews a decoder. False where the table is full: nobody may be given the arena then."""
        slot = self._slots.get(_key(holder))
        known = None if slot is None else self._table.read(slot)
        if known is not None and _unpack(known).token_digest != holder.token_digest:
            older = _unpack(known)
            holder = replace(holder, earlier_session=older.session, earlier_digest=older.token_digest)
        if slot is None:
            free = self._table.free_slots(1)
            if not free:
                return False
            slot = self._slots[_key(holder)] = free[-1]
        name = holder.decoder_name.encode()
        self._table.write(
            slot,
            _ENTRY.pack(
                holder.process_id,
                holder.start_time,
                holder.session,
                holder.token_digest,
                holder.earlier_session,
                holder.earlier_digest,
                len(name),
            )
            + name,
        )
        return True

    def remove(self, process_id: int) -> None:
        """That process is dead."""
        for key in [key for key in self._slots if key[0] == process_id]:
            self._table.erase(self._slots.pop(key))


def token_digest(token: bytes) -> bytes:
    """What is kept of a resume token."""
    return hashlib.blake2b(token, digest_size=TOKEN_DIGEST_BYTES, person=b"tessera-resume").digest()


def start_time_of(process_id: int) -> int:
    """When a process started, in ticks since the machine did; 0 where there is none, or only its remains."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text("ascii", "replace")
    except OSError:
        return 0
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return 0 if fields[0] in "ZX" else int(fields[_START_FIELD - 3])


def _key(holder: HolderProcess) -> tuple[int, int, str]:
    return holder.process_id, holder.start_time, holder.decoder_name


def _unpack(data: bytes) -> HolderProcess:
    process_id, start_time, session, digest, earlier, earlier_digest, length = _ENTRY.unpack_from(data)
    name = data[_ENTRY.size : _ENTRY.size + length].decode()
    return HolderProcess(process_id, start_time, name, session, digest, earlier, earlier_digest)
