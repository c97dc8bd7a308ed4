"""The gRPC services that decoders and gateways call: `CacheService.Session` and `CredentialService`.

Invariant: a stream's operations are run one after the other, each to its end, on the one event loop, and answered in
order; a stream that breaks is told apart from one that the decoder closes. It converts nothing (`operations.py`) and
decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc

from cachemgr.arena.handoff import Handoff
from cachemgr.branch_operations import commit, make_writable, rollback
from cachemgr.claim_operation import Proofs, claim
from cachemgr.clocks import Clocks
from cachemgr.grants import GRANT_VALIDITY_NS, GrantSigner
from cachemgr.ids import SessionId
from cachemgr.links import Connection
from cachemgr.operations import Operations
from cachemgr.pool_owner import PoolOwner, draining_error
from cachemgr.report_messages import failure_of
from cachemgr.resume_operation import resume
from cachemgr.session_fields import check_decoder, layout_of
from cachemgr.sessions import Sessions
from cachemgr.tenants import Tenants
from cachemgr.window_messages import name_window_blocks
from common.errors import FailedPrecondition, InvalidArgument, TesseraError
from common.faults import Faults
from common.logs import get_logger
from common.tokens import pack_tokens
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc

CACHE_SERVICE: Final = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name
HALF_CLOSE_SECONDS: Final = 0.02
Write = Callable[[cache_pb2.SessionResponse], Awaitable[None]]
CREDENTIAL_SERVICE: Final = cache_pb2.DESCRIPTOR.services_by_name["CredentialService"].full_name


class MessageFaults:
    """The knobs that delay or drop an operation by its name; without faults it does nothing."""

    def __init__(self, faults: Faults) -> None:
        self._delays = faults.delay_message
        self._drops = dict(faults.drop_message)

    async def pass_on(self, operation: str) -> bool:
        """Wait as long as the knob says; False where the operation shall be lost."""
        if operation in self._delays:
            await asyncio.sleep(self._delays[operation])
        if operation in self._drops:
            self._drops[operation] -= 1
            return self._drops[operation] != 0
        return True


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """One stream is one session of one decoder."""

    def __init__(
        self,
        *,
        owner: PoolOwner,
        sessions: Sessions,
        handoff: Handoff,
        operations: Operations,
        faults: Faults,
        clocks: Clocks,
        proofs: Proofs,
    ) -> None:
        self._proofs = proofs
        self._clocks = clocks
        self._owner = owner
        self._sessions = sessions
        self._handoff = handoff
        self._operations = operations
        self._faults = MessageFaults(faults)

    async def Session(  # noqa: N802 - the name of the RPC
        self, request_iterator: AsyncIterator[cache_pb2.SessionRequest], context: Any
    ) -> None:
        """Serve a decoder until either side ends the stream. Pushes are sent from here, answers by who has them."""
        connection = Connection()
        # This call may be left suspended when it dies in mid-send; this callback comes in every case.
        context.add_done_callback(lambda _: self._sessions.disconnected(connection))
        reading = asyncio.create_task(self._read(connection, request_iterator, context.write))
        try:
            while (message := await connection.outbox.get()) is not None:
                async with connection.sending:
                    await context.write(message)
            async with connection.sending:  # the last answer is out
                pass
            if reading.done():
                reading.result()
            # Also where the reader was done with its answer just after the daemon's end had closed the stream.
            if self._owner.draining:
                raise draining_error()
        finally:
            reading.cancel()
            self._sessions.disconnected(connection)

    async def _answer(self, connection: Connection, write: Write, response: cache_pb2.SessionResponse) -> None:
        """Send an answer after all that was to be sent before it: at once where that is nothing, which saves two tasks'
        turns."""
        if not connection.outbox.empty():
            await connection.outbox.put(response)
            return
        async with connection.sending:
            try:
                await write(response)
            except (grpc.RpcError, grpc.aio.BaseError):
                self._sessions.disconnected(connection)  # the stream broke, which does not end the session yet

    async def _read(
        self, connection: Connection, requests: AsyncIterator[cache_pb2.SessionRequest], write: Write
    ) -> None:
        """Run operations until the decoder closes its side, or breaks the protocol."""
        try:
            async for request in requests:
                if request.sequence <= connection.last_sequence:
                    raise InvalidArgument(
                        "sequence", f"is {request.sequence} after {connection.last_sequence}; it must grow from 1"
                    )
                connection.last_sequence = request.sequence
                if connection.closed:
                    self._sessions.count_fenced()
                    return
                if not await self._faults.pass_on(request.WhichOneof("operation") or ""):
                    continue
                response = self._run(connection, request)
                response.sequence = request.sequence
                response.revision = response.revision or self._owner.revision
                response.epoch = self._owner.epoch
                await self._answer(connection, write, response)
                self._sessions.tell_ready()
                if connection.closed:
                    return
            # A broken stream looks like a closed one at first; the cancellation of this task comes a moment later.
            await asyncio.sleep(HALF_CLOSE_SECONDS)
        except (asyncio.CancelledError, InvalidArgument):
            # Whoever breaks the protocol still works with what it holds: it may come back and say what that is.
            self._sessions.disconnected(connection)
            raise
        finally:
            self._sessions.end(connection)

    def _run(self, connection: Connection, request: cache_pb2.SessionRequest) -> cache_pb2.SessionResponse:
        """Run one operation; a refusal becomes the answer and changes nothing."""
        operation = request.WhichOneof("operation")
        try:
            if operation == "attach":
                return self._attach(connection, request.attach)
            if connection.session is None:
                raise FailedPrecondition("the first operation of a stream is attach", reason="NOT_ATTACHED")
            response = self._run_attached(connection.session, operation, request)
        except TesseraError as error:
            # Debug, because a full pool refuses as often as a scheduler tries again.
            get_logger().debug(
                "operation_refused", session=connection.session, operation=operation, reason=error.reason
            )
            return cache_pb2.SessionResponse(failure=failure_of(error))
        scrub = self._owner.require().take_scrub()
        if len(scrub):
            response.scrub = pack_tokens(scrub)
        name_window_blocks(self._owner.require(), response)
        return response

    def _attach(self, connection: Connection, request: cache_pb2.AttachRequest) -> cache_pb2.SessionResponse:
        if connection.session is not None:
            raise FailedPrecondition("this stream is attached already", reason="ATTACHED")
        self._owner.check_protocol(request.protocol_version)  # first: another version may say the rest in other fields
        self._sessions.check_order(request.process_id, request.decoder_name, request.sent_ns)
        connection.attach_sent_ns = request.sent_ns
        older = request.HasField("resume") and request.resume.epoch != self._owner.epoch
        known = older and self._sessions.has_claimed(request.resume.epoch, SessionId(request.resume.session_id))
        if older and not known and self._owner.succession.orphan is not None:
            return claim(self._owner, self._sessions, self._proofs, self._handoff, connection, request)
        if request.HasField("resume"):
            check_decoder(request)
            layout = layout_of(request.layout)
            return resume(self._owner, self._sessions, self._clocks, connection, request, layout)
        self._owner.refuse_new_work()
        check_decoder(request)
        self._owner.refuse_while_adopting(request.process_id, request.decoder_name)
        layout = layout_of(request.layout)
        manager = self._owner.settle(request.protocol_version, layout)
        link = self._sessions.attach(connection, manager, request.decoder_name, request.process_id)
        return cache_pb2.SessionResponse(
            attach=cache_pb2.AttachResponse(
                session_id=link.session,
                arena_token=self._handoff.offer(link.session, request.process_id),
                num_blocks=self._owner.num_blocks,
                layout_fingerprint=layout.fingerprint(),
                resume_token=link.resume_token,
                lease_seconds=self._owner.lease_seconds,
                grace_seconds=self._owner.grace_seconds,
            )
        )

    def _run_attached(
        self, session: SessionId, operation: str | None, request: cache_pb2.SessionRequest
    ) -> cache_pb2.SessionResponse:
        manager = self._owner.require()
        manager.heartbeat(session, self._clocks.steady_ns())
        match operation:
            case "acquire":
                if not request.acquire.resumed:  # what runs may still come to its end
                    self._owner.refuse_new_leases()
                return self._operations.acquire(manager, session, request.acquire)
            case "report":
                return self._operations.report(manager, session, request.report, request.applied_revision)
            case "fork":
                return self._operations.fork(manager, session, request.fork)
            case "credit":
                return self._operations.credit(manager, session, request.credit)
            case "rollback":
                return rollback(manager, session, request.rollback, self._clocks.steady_ns())
            case "make_writable":
                return make_writable(manager, session, request.make_writable, self._clocks.steady_ns())
            case "commit":
                return commit(manager, session, request.commit, self._clocks.steady_ns())
            case "heartbeat":
                return cache_pb2.SessionResponse(heartbeat=cache_pb2.HeartbeatResponse())
            case "abort_result":
                answer = request.abort_result
                self._sessions.abort_answered(session, answer.abort_id, found=answer.found)
                return cache_pb2.SessionResponse()
            case _:
                raise InvalidArgument("operation", "is not set, or not one of this build")


class CredentialService(cache_pb2_grpc.CredentialServiceServicer):
    """Turns tenant keys into grants."""

    def __init__(self, *, tenants: Tenants, signer: GrantSigner, clocks: Clocks) -> None:
        self._tenants = tenants
        self._signer = signer
        self._clocks = clocks

    async def Authenticate(  # noqa: N802 - the name of the RPC
        self, request: cache_pb2.AuthenticateRequest, _context: Any
    ) -> cache_pb2.AuthenticateResponse:
        """The tenant of a key, and the grant that proves it."""
        identity = self._tenants.authenticate(request.key, self._clocks.wall_ns())
        mark = self._tenants.mark(identity.tenant)
        return cache_pb2.AuthenticateResponse(
            tenant=identity.tenant,
            grant=self._signer.issue(identity.tenant, identity.key_id, mark, self._clocks.steady_ns()),
            expires_in_seconds=GRANT_VALIDITY_NS / 1e9,
            weight=identity.weight,
        )
