"""The attached decoders: their sessions and streams, what is pushed to them, and how a session goes away, comes back
and ends.

Invariant: a session whose stream broke waits for its decoder for the grace time and ends then; whatever ends it, the
manager is told once, with the truth about whether its process can still write. Called by the session service (attach,
resume, disconnect, end, answers), the daemon's clock (lapse), the admin service (abort, sessions) and the hand-off (who
was given the arena). All on the daemon's one event loop.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Final

from cachemgr.aborts import Aborts
from cachemgr.arena.handoff import Handoff
from cachemgr.attach_order import AttachOrder
from cachemgr.clocks import Clocks
from cachemgr.grants import AcceptedGrants
from cachemgr.ids import SessionId
from cachemgr.links import Connection, Link
from cachemgr.manager import CacheManager
from cachemgr.pool_owner import PoolOwner
from cachemgr.processes import Processes
from common.errors import FailedPrecondition, PermissionDenied
from common.logs import get_logger
from tessera.cache.v1 import cache_pb2

Message = cache_pb2.AbortPush | cache_pb2.ReclaimPush | cache_pb2.PrefixReadyPush
LISTED_SESSIONS: Final = 1000


class Sessions:
    """All attached decoders of this daemon."""

    def __init__(self, owner: PoolOwner, handoff: Handoff, clocks: Clocks) -> None:
        self._owner = owner
        self._handoff = handoff
        self._clocks = clocks
        self._processes = Processes(self._process_ended)
        self._links: dict[SessionId, Link] = {}
        self._aborts = Aborts()
        self._order = AttachOrder()
        self._log = get_logger()

    def __len__(self) -> int:
        return len(self._links)

    def check_order(self, process_id: int, decoder_name: str, sent_ns: int) -> None:
        """Raises FailedPrecondition, and counts it as fenced, where the decoder has been heard with a later attach."""
        if self._order.is_overtaken(process_id, decoder_name, sent_ns):
            self.count_fenced()
            raise FailedPrecondition("a later attach of this decoder was heard before", reason="ATTACH_OVERTAKEN")

    def attach(self, connection: Connection, manager: CacheManager, decoder_name: str, process_id: int) -> Link:
        """Make `connection` a new session of the manager. What the same decoder of the same process had is over."""
        for session in self._processes.acknowledge(process_id, decoder_name):
            freed = manager.process_gone(session)
            self._log.info("quarantine_released", session=session, blocks=freed, cause="attached_anew")
        for other in list(self._links.values()):
            if other.process_id == process_id and other.decoder_name == decoder_name:
                other.superseded = True
                if other.connection is None:
                    self._end(other)
        session = manager.attach(decoder_name=decoder_name, process_id=process_id, now_ns=self._clocks.steady_ns())
        link = self._links[session] = Link(session, decoder_name, process_id, connection)
        connection.session = session
        self._order.heard(process_id, decoder_name, connection.attach_sent_ns)
        self._log.info("session_attached", session=session, decoder=decoder_name, process_id=process_id)
        return link

    def claim(self, session: SessionId, epoch: int, token: bytes, decoder_name: str, process_id: int) -> Link:
        """The session that a decoder says it comes back to. Raises FailedPrecondition where that is over, and
        PermissionDenied where it was another's; both are counted as fenced."""
        link = self._links.get(session) if epoch == self._owner.epoch else self._claimed_for(epoch, session)
        if link is None:
            self.count_fenced()
            raise FailedPrecondition("the session is over", reason="SESSION_OVER")
        same = (link.decoder_name, link.process_id) == (decoder_name, process_id)
        known = link.resume_token if link.origin is None or epoch == self._owner.epoch else link.origin.resume_token
        if not (hmac.compare_digest(known, token) and same):
            self.count_fenced()
            raise PermissionDenied("the session is another decoder's, or the resume token is wrong")
        return link

    def has_claimed(self, epoch: int, session: SessionId) -> bool:
        """Whether a claim for that session of an older daemon was granted, and its decoder may not have heard so."""
        return self._claimed_for(epoch, session) is not None

    def _claimed_for(self, epoch: int, session: SessionId) -> Link | None:
        for link in self._links.values():
            if link.origin is not None and (link.origin.epoch, link.origin.session) == (epoch, session):
                return link
        return None

    def reconnect(self, link: Link, connection: Connection) -> None:
        """The core has resumed the session of `link`: it goes on with another stream."""
        if link.connection is not None:
            link.connection.close()  # it is broken, and was not seen to be
        link.connection, link.reclaiming = connection, False
        connection.session = link.session
        self._order.heard(link.process_id, link.decoder_name, connection.attach_sent_ns)
        self._log.info("session_resumed", session=link.session, process_id=link.process_id)

    def disconnected(self, connection: Connection) -> None:
        """A stream broke. Its session waits for the decoder, unless nobody can come back. Harmless when repeated."""
        if not connection.close():
            return
        link = None if connection.session is None else self._links.get(connection.session)
        if link is None or link.connection is not connection:
            return
        link.connection = None
        self._withdraw(link.session)
        if self._owner.draining or link.superseded or not self._processes.can_write(link.process_id):
            self._end(link)
        else:
            self._owner.require().away(link.session, self._clocks.steady_ns())
            self.tell_ready()
            self._log.info("session_away", session=link.session)

    def end(self, connection: Connection) -> None:
        """The decoder closed its stream, or broke the protocol: the session is over. Harmless when repeated."""
        if not connection.close():
            return
        link = None if connection.session is None else self._links.get(connection.session)
        if link is not None and link.connection is connection:
            self._end(link)

    def end_lapsed(self, sessions: Iterable[SessionId]) -> None:
        """These have said nothing for too long, or did not come back in time."""
        for session in sessions:
            link = self._links.get(session)
            if link is not None:
                self._log.warning("session_lapsed", session=session, away=link.connection is None)
                self._end(link)

    def count_fenced(self) -> None:
        """An operation of a session that is over was refused."""
        if self._owner.manager is not None:
            self._owner.manager.count_fenced()

    def _withdraw(self, session: SessionId) -> None:
        self._handoff.withdraw(session)
        self._aborts.gone(session)

    def _end(self, link: Link, *, process_dead: bool = False) -> None:
        # The session's leases go, and its writable blocks too if nobody can write them any more.
        session, process_id = link.session, link.process_id
        if self._links.pop(session, None) is None:
            return
        if link.connection is not None:
            link.connection.close()
        self._withdraw(session)
        safe = process_dead or link.superseded or not self._processes.can_write(process_id)
        outcome = self._owner.require().detach(session, process_dead=safe, now_ns=self._clocks.steady_ns())
        self.tell_ready()
        if not safe:
            self._processes.quarantine(process_id, session, link.decoder_name)
        elif not self._processes.can_write(process_id) and not self._has_sessions(process_id):
            self._order.forget(process_id)
        self._log.info(
            "session_ended",
            session=session,
            leases=outcome.leases,
            freed_blocks=outcome.freed_blocks,
            quarantined_blocks=outcome.quarantined_blocks,
        )

    def _has_sessions(self, process_id: int) -> bool:
        return any(link.process_id == process_id for link in self._links.values())

    def accepted_grants(self, session: SessionId) -> AcceptedGrants:
        """The grants that the session was leased blocks for."""
        return self._links[session].accepted_grants

    def handed_over(self, session: SessionId, process_id: int, pidfd: int) -> None:
        """The process has the arena from now on. Raises ResourceExhausted where the next daemon could not know that."""
        self._processes.watch(process_id, pidfd)
        link = self._links.get(session)
        if link is not None:
            self.holds_arena(link)

    def holds_arena(self, link: Link) -> None:
        """The next daemon shall know the session as one that may come back to it."""
        self._owner.succession.holds(link.process_id, link.decoder_name, link.session, link.resume_token)

    def survivor(self, process_id: int, pidfd: int) -> None:
        """A process has the arena of the daemon before this one; `pidfd` is ours to close from now on."""
        self._processes.watch(process_id, pidfd)

    def take_back(self, link: Link, connection: Connection) -> None:
        """A session that has just been attached is not to be, after all; its stream is told why."""
        link.connection = connection.session = None
        self._end(link)

    def is_mapped(self, process_id: int) -> bool:
        """Whether the arena has been handed to that process."""
        return self._processes.can_write(process_id)

    def push(self, session: SessionId, **result: Message) -> bool:
        """Send a message that answers nothing. False where the session is away or its decoder does not read."""
        link = self._links.get(session)
        if link is None or link.connection is None:
            return False
        message = cache_pb2.SessionResponse(revision=self._owner.revision, epoch=self._owner.epoch, **result)  # type: ignore[arg-type,unused-ignore]
        sent = link.connection.offer(message)
        if not sent:
            self._log.warning("push_dropped", session=session)
        return sent

    def tell_ready(self) -> None:
        """Tell sessions which of their waits for a prefix are over since the last call."""
        if self._owner.manager is not None:
            for session, wait_id in self._owner.manager.take_ready_waits():
                self.push(session, prefix_ready=cache_pb2.PrefixReadyPush(wait_id=wait_id))

    async def abort(self, request_id: str) -> bool:
        """Ask every decoder to end a request; whether one knew it. Waits a bounded time."""
        push = cache_pb2.AbortPush(abort_id=self._aborts.next_id(), request_id=request_id)
        asked = {session for session in self._links if self.push(session, abort=push)}
        return await self._aborts.result(push.abort_id, asked)

    def abort_answered(self, session: SessionId, abort_id: int, *, found: bool) -> None:
        """A decoder's answer; one that comes late or was not asked for is ignored."""
        self._aborts.answered(session, abort_id, found=found)

    def reclaim(self, asking: SessionId, missing: int, *, from_asking: bool) -> None:
        """Ask sessions for unused credit until `missing` blocks could come back; the asking one last, if at all.

        A session is asked once until it has reported.
        """
        manager = self._owner.require()
        if manager.adopting:
            return  # what comes back could be given to nobody
        views = manager.list_sessions(limit=LISTED_SESSIONS).items
        for view in sorted(views, key=lambda item: (item.session == asking, -item.credit_blocks)):
            link = self._links.get(view.session)
            if missing <= 0 or (view.session == asking and not from_asking):
                return
            if link is None or link.connection is None or view.credit_blocks == 0:
                continue
            if not link.reclaiming:
                wanted = min(missing, view.credit_blocks)
                link.reclaiming = self.push(view.session, reclaim=cache_pb2.ReclaimPush(num_blocks=wanted))
            missing -= view.credit_blocks

    def reported(self, session: SessionId) -> None:
        """The session has reported, so it may be asked for credit again, and knows who it is."""
        link = self._links[session]
        link.reclaiming, link.origin = False, None

    def close(self) -> None:
        """End every stream; for the daemon's own end."""
        for link in list(self._links.values()):
            self._end(link)
        self._processes.close()

    def _process_ended(self, process_id: int, quarantined: list[SessionId]) -> None:
        for link in [link for link in self._links.values() if link.process_id == process_id]:
            self._end(link, process_dead=True)
        for session in quarantined:
            freed = self._owner.require().process_gone(session)
            self._log.info("quarantine_released", session=session, blocks=freed, cause="process_ended")
        self._order.forget(process_id)
        self._owner.process_dead(process_id)
