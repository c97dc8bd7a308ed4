"""What a daemon leaves to the next one, and how far this one is with what the one before it left.

Invariants: every process that is given the arena is in the journal first; while an old arena may have live writers that
were not heard (`orphan`), nothing is allocated from it; the wait for them is bounded, and ends at once when everybody
has been heard or is dead. Called by the pool owner, the session registry and the daemon's clock, on the event loop. It
frees no block and maps nothing.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cachemgr.journal import IndexJournal
from cachemgr.journal_file import boot_id, create_journal, discard_journal, open_journal
from cachemgr.journal_format import JournalIdentity
from cachemgr.journal_processes import HolderProcess, HolderTable, start_time_of, token_digest
from common.errors import FailedPrecondition, ResourceExhausted, Unavailable
from common.layout import KvLayout
from common.logs import get_logger

RETRY_SECONDS: Final = 0.1

Decoder = tuple[int, str]  # process id, decoder name


@dataclass(slots=True, eq=False)
class Orphan:
    """An arena whose daemon has died, and the decoders that had it.

    waiting:  those that live and were not heard yet
    adopted:  its memory is here, and its index is rebuilt
    layout:   as the first decoder that came back has it; its fingerprint is the journal's
    """

    journal: IndexJournal
    deadline_ns: int
    holders: dict[Decoder, HolderProcess]
    waiting: set[Decoder] = field(default_factory=set)
    adopted: bool = False
    layout: KvLayout | None = None


class Succession:
    """The journal of this daemon, and the orphan while there is one. `path` is the journal's."""

    def __init__(self, path: Path, *, epoch: int, wait_seconds: float) -> None:
        self._path = path
        self._epoch = epoch
        self._wait_ns = int(wait_seconds * 1e9)
        self._holders: HolderTable | None = None
        self._late: set[Decoder] = set()
        self._log = get_logger()
        self.orphan: Orphan | None = None

    def find(self, now_ns: int) -> list[tuple[int, int]]:
        """Looks for what the daemon before this one left: (process id, pidfd) of each process that still has its arena;
        the pidfds are the caller's. None of them: then there is nothing to adopt."""
        journal = open_journal(self._path, boot_id())
        if journal is None:
            discard_journal(self._path)
            return []
        holders = {
            (holder.process_id, holder.decoder_name): holder for holder in HolderTable(journal.processes).holders()
        }
        pidfds = _open_living(holders)
        alive = {decoder for decoder in holders if decoder[0] in pidfds}
        if not alive:
            self._log.info("journal_discarded", cause="no process has its arena any more")
            discard_journal(self._path)
            return []
        self.orphan = Orphan(journal, now_ns + self._wait_ns, holders, waiting=set(alive))
        self._log.info("arena_orphaned", decoders=len(alive), blocks=journal.identity.num_blocks)
        return list(pidfds.items())

    def create(self, identity: JournalIdentity) -> IndexJournal | None:
        """A journal for a fresh arena, in place of any older one; None where there is no room for it."""
        self.orphan = None
        try:
            journal = create_journal(self._path, identity, self._epoch)
        except FailedPrecondition as error:
            self._log.warning("journal_unavailable", message=error.message, effect="the cache dies with this daemon")
            discard_journal(self._path)
            return None
        self._holders = HolderTable(journal.processes)
        return journal

    def forgo(self) -> None:
        """This daemon's memory ends with it: no journal, in place of any older one."""
        self.orphan = None
        discard_journal(self._path)

    def adopt(self, orphan: Orphan) -> None:
        """The orphan's memory is here: its journal is this daemon's from now on."""
        orphan.adopted = True
        orphan.journal.set_epoch(self._epoch)
        self._holders = HolderTable(orphan.journal.processes)

    def refuse_others(self) -> None:
        """Raises Unavailable while decoders of the orphan may still come back."""
        if self.orphan is not None:
            raise Unavailable(
                "the cache manager has restarted and waits for the decoders that held its memory",
                reason="ADOPTING",
                retry_after_seconds=RETRY_SECONDS,
            )

    def heard(self, process_id: int, decoder_name: str) -> None:
        """A decoder of the old arena has claimed what it holds, or holds nothing."""
        self._late.discard((process_id, decoder_name))
        if self.orphan is not None:
            self.orphan.waiting.discard((process_id, decoder_name))

    def dead(self, process_id: int) -> None:
        """A process has ended."""
        if self._holders is not None:
            self._holders.remove(process_id)
        self._late = {decoder for decoder in self._late if decoder[0] != process_id}
        if self.orphan is not None:
            self.orphan.waiting = {decoder for decoder in self.orphan.waiting if decoder[0] != process_id}

    def is_over(self, now_ns: int) -> bool:
        """Whether nobody is waited for any more."""
        return self.orphan is not None and (not self.orphan.waiting or now_ns >= self.orphan.deadline_ns)

    def conclude(self) -> set[int]:
        """The orphan is a normal arena now, or given up. The sessions that may write it and were not heard."""
        orphan, self.orphan = self.orphan, None
        if orphan is not None and orphan.adopted:
            self._late = set(orphan.waiting)
        late = [] if orphan is None else [orphan.holders[decoder] for decoder in self._late]
        return {session for holder in late for session in (holder.session, holder.earlier_session) if session}

    def close(self) -> None:
        """The daemon ends. Where nobody has its arena, the next one has nothing to adopt."""
        if self._holders is not None and not self._holders.holders():
            discard_journal(self._path)

    @property
    def has_late(self) -> bool:
        """Whether there are such decoders still."""
        return bool(self._late)

    def holds(self, process_id: int, decoder_name: str, session: int, resume_token: bytes) -> None:
        """A decoder is about to have the arena, or has a new session. Raises ResourceExhausted where it cannot be
        remembered."""
        if self._holders is None:
            return
        digest = token_digest(resume_token)
        holder = HolderProcess(process_id, start_time_of(process_id), decoder_name, session, digest)
        if not self._holders.put(holder):
            raise ResourceExhausted("too many processes have the arena", subject="processes", needed=1, usable=0)


def _open_living(holders: dict[Decoder, HolderProcess]) -> dict[int, int]:
    """Process id -> pidfd of those that live, each surely the process that was meant."""
    found: dict[int, int] = {}
    for holder in holders.values():
        if holder.process_id in found:
            continue
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(holder.process_id)
            if holder.lives():
                found[holder.process_id] = pidfd
            else:
                os.close(pidfd)
    return found
