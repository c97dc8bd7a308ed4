"""What is sent on a decoder's stream: answers, and pushes between them, one at a time and in order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from cachemgr.links import Connection
from cachemgr.service import CacheService, MessageFaults
from common.errors import Unavailable
from common.faults import Faults
from tessera.cache.v1 import cache_pb2

ROUNDS = 20
TURNS = 3  # of the loop, that a message takes to be sent


class Context:
    """Of a call: what was sent, and whether two messages were ever on their way at once."""

    def __init__(self, on_send=lambda message: None):
        self.sent, self.on_send, self._sending = [], on_send, False

    def add_done_callback(self, callback):
        pass

    async def write(self, message):
        assert not self._sending
        self._sending = True
        self.on_send(message)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self._sending = False
        self.sent.append(message.sequence or -message.prefix_ready.wait_id)


class StubSessions:
    """Closes streams as `Sessions` does, and keeps what it was told; `pushed` messages go out after each answer."""

    def __init__(self):
        self.told, self.connection, self.pushes = [], None, 0
        self.said = []  # answers, and pushes below zero, in the order in which they came

    def disconnected(self, connection):
        if connection.close():
            self.told.append("broken")

    def end(self, connection):
        if connection.close():
            self.told.append("ended")

    def push(self):
        self.pushes += 1
        self.said.append(-self.pushes)
        push = cache_pb2.PrefixReadyPush(wait_id=self.pushes)
        self.connection.offer(cache_pb2.SessionResponse(prefix_ready=push))

    def tell_ready(self):
        self.push()


def service_of(sessions: StubSessions) -> CacheService:
    """A service whose operations do nothing."""

    class Service(CacheService):
        def _run(self, connection: Connection, request):
            sessions.connection = connection
            sessions.said.append(request.sequence)
            return cache_pb2.SessionResponse()

    owner = SimpleNamespace(draining=False, revision=1, epoch=1)
    service = Service(
        owner=owner, sessions=sessions, handoff=None, operations=None, faults=Faults(), clocks=None, proofs=None
    )
    assert isinstance(service._faults, MessageFaults)
    return service


async def requests(pause=0):
    for number in range(1, ROUNDS + 1):
        for _ in range(pause * (number % 4)):
            await asyncio.sleep(0)
        yield cache_pb2.SessionRequest(sequence=number)


def test_answers_and_pushes_go_out_in_the_order_in_which_they_came():
    """Also where pushes come while an answer is on its way, and right after it; no two messages are ever on their way
    at once, and nothing is lost."""
    for pause in range(4):
        sessions = StubSessions()
        context = Context(lambda message, sessions=sessions: message.sequence and sessions.push())
        asyncio.run(service_of(sessions).Session(requests(pause), context))
        assert context.sent == sessions.said[: len(context.sent)], pause
        assert set(range(1, ROUNDS + 1)) <= set(context.sent), pause
        assert len(context.sent) > ROUNDS + ROUNDS // 2, pause  # most pushes too; the last come after the end
        assert sessions.told == ["ended"]


def test_an_answer_that_cannot_be_sent_breaks_the_stream_and_ends_no_session():
    """The decoder may come back after it; one that closes its stream ends the session (positive control above)."""

    def fail(message):
        raise grpc.aio.UsageError("the call is over")

    sessions = StubSessions()
    asyncio.run(service_of(sessions).Session(requests(), Context(fail)))
    assert sessions.told == ["broken"]


@pytest.mark.parametrize("draining", [True, False])
def test_a_stream_that_a_daemon_closes_at_its_end_is_unavailable(draining):
    """The daemon ends while an answer is being written: the decoder gets that answer, and hears that it must come back.

    Control: where no daemon ends, a stream that was closed in the middle of an answer ends well.
    """
    sessions = StubSessions()
    sessions.tell_ready = lambda: None
    service = service_of(sessions)

    def close(message):
        service._owner.draining = draining
        sessions.connection.close()

    context = Context(close)

    async def one():
        yield cache_pb2.SessionRequest(sequence=1)
        await asyncio.sleep(3600)

    async def session():
        await service.Session(one(), context)

    if draining:
        with pytest.raises(Unavailable):
            asyncio.run(session())
    else:
        asyncio.run(session())
    assert context.sent == [1]
