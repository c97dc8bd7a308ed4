"""The attached decoders: their streams, what is pushed to them, and how a session ends.

Invariant: a session lives exactly as long as its stream; when it ends, whichever way, the manager is told once, with
the truth about whether its process can still write. Called by the session service (attach, end, answers), the admin
service (abort, sessions) and the hand-off (who was given the arena). All on the daemon's one event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from cachemgr.arena.handoff import Handoff
from cachemgr.clocks import Clocks
from cachemgr.grants import AcceptedGrants
from cachemgr.ids import SessionId
from cachemgr.manager import CacheManager
from cachemgr.pool_owner import PoolOwner
from cachemgr.processes import Processes
from common.logs import get_logger
from tessera.cache.v1 import cache_pb2

OUTBOX_MESSAGES: Final = 256
ABORT_SECONDS: Final = 2.0
LISTED_SESSIONS: Final = 1000


@dataclass(eq=False, slots=True)
class Connection:
    """One decoder's stream. `outbox` ends with None: the stream closes then."""

    outbox: asyncio.Queue[cache_pb2.SessionResponse | None] = field(
        default_factory=lambda: asyncio.Queue(OUTBOX_MESSAGES)
    )
    session: SessionId | None = None
    decoder_name: str = ""
    process_id: int = 0
    last_sequence: int = 0
    superseded: bool = False
    reclaiming: bool = False
    closed: bool = False
    accepted_grants: AcceptedGrants = field(default_factory=AcceptedGrants)


@dataclass(eq=False, slots=True)
class _Abort:
    result: asyncio.Future[bool]
    waiting: set[SessionId]


class Sessions:
    """All attached decoders of this daemon."""

    def __init__(self, owner: PoolOwner, handoff: Handoff, clocks: Clocks) -> None:
        self._owner = owner
        self._handoff = handoff
        self._clocks = clocks
        self._processes = Processes(self._process_ended)
        self._connections: dict[SessionId, Connection] = {}
        self._aborts: dict[int, _Abort] = {}
        self._last_abort = 0
        self._log = get_logger()

    def __len__(self) -> int:
        return len(self._connections)

    def attach(self, connection: Connection, manager: CacheManager, decoder_name: str, process_id: int) -> SessionId:
        """Make `connection` a session of the manager."""
        for session in self._processes.acknowledge(process_id, decoder_name):
            freed = manager.process_gone(session)
            self._log.info("quarantine_released", session=session, blocks=freed, cause="attached_anew")
        for other in self._connections.values():
            if other.process_id == process_id and other.decoder_name == decoder_name:
                other.superseded = True
        session = manager.attach(decoder_name=decoder_name, process_id=process_id, now_ns=self._clocks.steady_ns())
        connection.session, connection.decoder_name, connection.process_id = session, decoder_name, process_id
        self._connections[session] = connection
        self._log.info("session_attached", session=session, decoder=decoder_name, process_id=process_id)
        return session

    def end(self, connection: Connection, *, process_dead: bool = False) -> None:
        """End a stream's session: its leases go, and its writable blocks too if nobody can write them any more."""
        if connection.closed:
            return
        connection.closed = True
        self._close_outbox(connection)
        session, process_id = connection.session, connection.process_id
        if session is None or self._connections.pop(session, None) is None:
            return
        self._handoff.withdraw(session)
        for abort in self._aborts.values():
            _answered(abort, session, found=False)
        safe = process_dead or connection.superseded or not self._processes.can_write(process_id)
        outcome = self._owner.require().detach(session, process_dead=safe, now_ns=self._clocks.steady_ns())
        if not safe:
            self._processes.quarantine(process_id, session, connection.decoder_name)
        self._log.info(
            "session_ended",
            session=session,
            leases=outcome.leases,
            freed_blocks=outcome.freed_blocks,
            quarantined_blocks=outcome.quarantined_blocks,
        )

    def accepted_grants(self, session: SessionId) -> AcceptedGrants:
        """The grants that the session was leased blocks for."""
        return self._connections[session].accepted_grants

    def handed_over(self, session: SessionId, process_id: int, pidfd: int) -> None:
        """The process has the arena from now on."""
        self._processes.watch(process_id, pidfd)

    def is_mapped(self, process_id: int) -> bool:
        """Whether the arena has been handed to that process."""
        return self._processes.can_write(process_id)

    def push(self, connection: Connection, **result: cache_pb2.AbortPush | cache_pb2.ReclaimPush) -> bool:
        """Send a message that answers nothing. False where the stream is closed or its decoder does not read."""
        message = cache_pb2.SessionResponse(revision=self._owner.revision, epoch=self._owner.epoch, **result)  # type: ignore[arg-type,unused-ignore]
        try:
            connection.outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._log.warning("push_dropped", session=connection.session)
            return False
        return not connection.closed

    async def abort(self, request_id: str) -> bool:
        """Ask every decoder to end a request; whether one knew it. Waits at most ABORT_SECONDS."""
        self._last_abort += 1
        abort_id = self._last_abort
        push = cache_pb2.AbortPush(abort_id=abort_id, request_id=request_id)
        asked = {session for session, link in self._connections.items() if self.push(link, abort=push)}
        if not asked:
            return False
        abort = self._aborts[abort_id] = _Abort(asyncio.get_running_loop().create_future(), asked)
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                return await abort.result
        except TimeoutError:
            return False
        finally:
            del self._aborts[abort_id]

    def abort_answered(self, session: SessionId, abort_id: int, *, found: bool) -> None:
        """A decoder's answer; one that comes late or was not asked for is ignored."""
        abort = self._aborts.get(abort_id)
        if abort is not None:
            _answered(abort, session, found=found)

    def reclaim(self, asking: SessionId, missing: int, *, from_asking: bool) -> None:
        """Ask sessions for unused credit until `missing` blocks could come back; the asking one last, if at all.

        A session is asked once until it has reported.
        """
        views = self._owner.require().list_sessions(limit=LISTED_SESSIONS).items
        for view in sorted(views, key=lambda item: (item.session == asking, -item.credit_blocks)):
            connection = self._connections.get(view.session)
            if missing <= 0 or (view.session == asking and not from_asking):
                return
            if connection is None or view.credit_blocks == 0:
                continue
            if not connection.reclaiming:
                wanted = min(missing, view.credit_blocks)
                connection.reclaiming = self.push(connection, reclaim=cache_pb2.ReclaimPush(num_blocks=wanted))
            missing -= view.credit_blocks

    def reported(self, session: SessionId) -> None:
        """The session has reported, so it may be asked for credit again."""
        self._connections[session].reclaiming = False

    def close(self) -> None:
        """End every stream; for the daemon's own end."""
        for connection in list(self._connections.values()):
            self.end(connection)
        self._processes.close()

    def _process_ended(self, process_id: int, quarantined: list[SessionId]) -> None:
        for connection in [link for link in self._connections.values() if link.process_id == process_id]:
            self.end(connection, process_dead=True)
        manager = self._owner.require()
        for session in quarantined:
            freed = manager.process_gone(session)
            self._log.info("quarantine_released", session=session, blocks=freed, cause="process_ended")

    @staticmethod
    def _close_outbox(connection: Connection) -> None:
        if connection.outbox.full():
            connection.outbox.get_nowait()  # nobody reads it; the end must still be seen
        connection.outbox.put_nowait(None)


def _answered(abort: _Abort, session: SessionId, *, found: bool) -> None:
    if session not in abort.waiting or abort.result.done():
        return
    abort.waiting.discard(session)
    if found or not abort.waiting:
        abort.result.set_result(found)
