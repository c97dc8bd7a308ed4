"""Broken streams and silent sessions over the real sockets: who may come back, to what, and until when."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import grpc
import pytest

from common.arena_wire import fetch_arena
from common.tokens import pack_tokens
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tests.cachemgr.daemon_rig import Rig, SessionClient, acquire_request, attach_request, ids, report_request, running
from tests.cachemgr.rig import DEADLINE_SECONDS, eventually_async

PROMPT = list(range(1, 10))
SHORT = {"lease_seconds": 0.5, "grace_seconds": 0.5}
PATIENT = {"lease_seconds": 60.0, "grace_seconds": 60.0}


def run(body: Any, **options: Any) -> None:
    async def inside() -> None:
        async with running(**options) as rig:
            await body(rig)

    asyncio.run(inside())


async def counts(rig: Rig, **expected: int) -> bool:
    now = await rig.snapshot()
    return all(getattr(now, name) == value for name, value in expected.items())


async def is_away(rig: Rig) -> bool:
    sessions = (await rig.admin.ListSessions(admin_pb2.ListSessionsRequest())).sessions
    return [session.away for session in sessions] == [True]


class Mapped:
    """A decoder of this process that has the arena, one computed lease and some credit."""

    def __init__(self, rig: Rig, decoder: SessionClient, nonce: bytes) -> None:
        self.rig = rig
        self.decoder = decoder
        self.nonce = nonce
        self.epoch = 0

    @classmethod
    async def open(cls, rig: Rig, *, name: str = "d0") -> Mapped:
        decoder = await rig.attach(name=name)
        assert decoder.attached is not None
        fd, info = await asyncio.to_thread(fetch_arena, rig.paths.arena_socket, decoder.attached.arena_token)
        os.close(fd)
        made = cls(rig, decoder, info.nonce)
        lease = await decoder.ask(acquire=acquire_request(await rig.grant(), PROMPT))
        made.epoch, made.lease = lease.epoch, lease.acquire
        sealed = {"lease_id": made.lease.lease_id, "sealed_tokens": 8}
        made.credit = ids((await decoder.ask(report=report_request(sealed, wanted_blocks=2))).credit)
        assert len(made.credit) == 2
        return made

    async def broken(self) -> None:
        """The stream breaks, and the daemon sees it."""
        self.decoder.call.cancel()
        await eventually_async(lambda: is_away(self.rig))

    def resume(self, **changes: Any) -> cache_pb2.SessionResume:
        """What the decoder presents: one block of its credit has been taken since, and two tokens computed."""
        attached = self.decoder.attached
        assert attached is not None
        held = cache_pb2.HeldSequence(
            lease_id=self.lease.lease_id,
            tokens=pack_tokens([*PROMPT, *(20, 21, 22, 23)]),
            blocks=pack_tokens([*ids(self.lease.blocks), self.credit[0]]),
            sealed_tokens=12,
        )
        values = {
            "session_id": attached.session_id,
            "epoch": self.epoch,
            "resume_token": attached.resume_token,
            "arena_nonce": self.nonce,
            "sequences": [held],
            "credit_blocks": pack_tokens(self.credit[1:]),
        }
        return cache_pb2.SessionResume(**{**values, **changes})

    async def attach(self, resume: cache_pb2.SessionResume, **changes: Any) -> tuple[SessionClient, Any]:
        """A new stream that asks to go on, and the answer."""
        stream = await self.rig.session()
        request = attach_request(**changes)
        request.resume.CopyFrom(resume)
        return stream, await stream.ask(attach=request)


def test_a_stream_that_comes_back_in_time_finds_everything() -> None:
    """The same session, the same lease, growth taken over; and it goes on: reports, releases, nothing is left."""

    async def body(rig: Rig) -> None:
        mapped = await Mapped.open(rig)
        await mapped.broken()
        assert await counts(rig, leases=1, sessions=1, quarantined_blocks=0, credit_blocks=2)
        stream, response = await mapped.attach(mapped.resume())
        answer = response.attach
        assert (answer.resumed, list(answer.leases)) == (True, [mapped.lease.lease_id]), response
        assert answer.session_id == mapped.decoder.attached.session_id
        assert await counts(rig, leases=1, sessions=1, credit_blocks=1, indexed_blocks=3, fenced_operations=0)
        done = {"lease_id": mapped.lease.lease_id, "sealed_tokens": 13, "release": True}
        answer = await stream.ask(
            report=report_request(done, returned_blocks=pack_tokens(mapped.credit[1:])),
            applied_revision=response.revision,
        )
        assert not answer.report.refusals
        assert await rig.is_quiet()
        await stream.close()

    run(body, **PATIENT)


def test_a_stream_that_was_not_seen_to_break_is_taken_over() -> None:
    """The decoder comes back before the daemon has noticed: the new stream serves, the old one is closed."""

    async def body(rig: Rig) -> None:
        mapped = await Mapped.open(rig)
        stream, response = await mapped.attach(mapped.resume())
        assert response.attach.resumed
        assert await mapped.decoder.call.read() is grpc.aio.EOF
        assert (await stream.ask(heartbeat=cache_pb2.HeartbeatRequest())).WhichOneof("result") == "heartbeat"
        assert await counts(rig, leases=1, sessions=1)

    run(body, **PATIENT)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another token": ({"resume_token": bytes(16)}, {}),
    "no token": ({"resume_token": b""}, {}),
    "another process": ({}, {"process_id": 1}),
    "another decoder of the process": ({}, {"name": "d1"}),
    "another arena": ({"arena_nonce": bytes(32)}, {}),
    "another epoch": ({"epoch": 99}, {}),
    "an unknown session": ({"session_id": 99}, {}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_nobody_else_comes_back(what: str) -> None:
    """Refused, counted as fenced, and nothing has changed; the right decoder then comes back."""

    async def body(rig: Rig) -> None:
        mapped = await Mapped.open(rig)
        await mapped.broken()
        fields, changes = REFUSED[what]
        stream, response = await mapped.attach(mapped.resume(**fields), **changes)
        assert response.WhichOneof("result") == "failure", response
        refused = await stream.ask(heartbeat=cache_pb2.HeartbeatRequest())
        assert refused.failure.reason == "NOT_ATTACHED"
        assert await counts(rig, leases=1, sessions=1, credit_blocks=2, quarantined_blocks=0, fenced_operations=1)
        assert await is_away(rig)
        _, response = await mapped.attach(mapped.resume())
        assert response.attach.resumed

    run(body, **PATIENT)


def test_garbage_in_what_is_presented_is_refused_by_field() -> None:
    """Broken lengths and the null block are INVALID_ARGUMENT, and the session still waits for the true list."""

    async def body(rig: Rig) -> None:
        mapped = await Mapped.open(rig)
        await mapped.broken()
        good = mapped.resume()
        for field, value in (("tokens", b"abc"), ("blocks", bytes(4)), ("blocks", b"a")):
            bad = cache_pb2.SessionResume()
            bad.CopyFrom(good)
            setattr(bad.sequences[0], field, value)
            _, response = await mapped.attach(bad)
            assert field in response.failure.message
        _, response = await mapped.attach(mapped.resume(credit_blocks=pack_tokens([8, 8])))
        assert "credit_blocks" in response.failure.message
        _, response = await mapped.attach(good)
        assert response.attach.resumed

    run(body, **PATIENT)


def test_after_the_grace_time_it_is_too_late() -> None:
    """Writable blocks are quarantined, a resume is refused; attaching anew acknowledges, and everything is free."""

    async def body(rig: Rig) -> None:
        mapped = await Mapped.open(rig)
        mapped.decoder.call.cancel()
        await eventually_async(lambda: counts(rig, leases=0, sessions=0, quarantined_blocks=3))
        _, response = await mapped.attach(mapped.resume())
        assert response.failure.reason == "SESSION_OVER"
        assert await counts(rig, quarantined_blocks=3, fenced_operations=1)
        await rig.attach()
        assert await counts(rig, quarantined_blocks=0, sessions=1, cached_blocks=2)
        assert await rig.is_sound()

    run(body, **SHORT)


def test_a_session_that_says_nothing_is_over() -> None:
    """Its stream is closed and its blocks are quarantined; one that sends heartbeats keeps all it has."""

    async def body(rig: Rig) -> None:
        speaking = await rig.attach(name="speaking")
        lease = (await speaking.ask(acquire=acquire_request(await rig.grant(), [7] * 5))).acquire
        silent = await Mapped.open(rig)
        beats = 0
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not await counts(rig, sessions=1):
                assert (await speaking.ask(heartbeat=cache_pb2.HeartbeatRequest())).WhichOneof("result") == "heartbeat"
                beats += 1
                await asyncio.sleep(0.02)
        assert beats > 5
        assert await counts(rig, leases=1, quarantined_blocks=3)
        assert await silent.decoder.call.read() is grpc.aio.EOF
        done = report_request({"lease_id": lease.lease_id, "release": True})
        assert not (await speaking.ask(report=done)).report.refusals
        assert await rig.is_sound()

    run(body, **SHORT)


def test_a_decoder_that_closes_its_stream_is_not_waited_for() -> None:
    """A half-closed stream is a good-bye: no grace, the blocks that it could still write are quarantined at once."""

    async def body(rig: Rig) -> None:
        mapped = await Mapped.open(rig)
        await mapped.decoder.close()
        await eventually_async(lambda: counts(rig, leases=0, sessions=0, quarantined_blocks=3))

    run(body, **PATIENT)


def test_attaching_anew_ends_the_session_that_is_away() -> None:
    """The same decoder of the same process begins afresh: what it had is free at once, and cannot be resumed."""

    async def body(rig: Rig) -> None:
        mapped = await Mapped.open(rig)
        await mapped.broken()
        await rig.attach()
        assert await counts(rig, leases=0, sessions=1, quarantined_blocks=0, credit_blocks=0)
        _, response = await mapped.attach(mapped.resume())
        assert response.failure.reason == "SESSION_OVER"
        assert await rig.is_sound()

    run(body, **PATIENT)


def test_a_resume_that_a_later_one_overtook_is_refused() -> None:
    """What was presented on a stream that was given up comes after the decoder has come back and leased more: it is
    refused and counted as fenced, and the session goes on with its leases and its stream."""

    async def body(rig: Rig) -> None:
        mapped = await Mapped.open(rig)
        await mapped.broken()
        sent_ns = time.monotonic_ns()
        stream, response = await mapped.attach(mapped.resume())
        assert response.attach.resumed
        newer = (await stream.ask(acquire=acquire_request(await rig.grant(), [7] * 5))).acquire
        late, response = await mapped.attach(mapped.resume(), sent_ns=sent_ns)
        assert response.failure.reason == "ATTACH_OVERTAKEN", response
        assert (await late.ask(heartbeat=cache_pb2.HeartbeatRequest())).failure.reason == "NOT_ATTACHED"
        assert await counts(rig, leases=2, sessions=1, fenced_operations=1)
        done = [{"lease_id": lease, "release": True} for lease in (mapped.lease.lease_id, newer.lease_id)]
        answer = await stream.ask(
            report=report_request(*done, returned_blocks=pack_tokens(mapped.credit[1:])),
            applied_revision=(await rig.snapshot()).revision,
        )
        assert not answer.report.refusals
        assert await rig.is_quiet()

    run(body, **PATIENT)


def test_an_attach_that_a_later_one_overtook_ends_no_session() -> None:
    """A first attach that was given up comes when the decoder is attached by another: refused, and the session that
    serves is not taken for one that its decoder has let go, so that it waits when its stream breaks."""

    async def body(rig: Rig) -> None:
        sent_ns = time.monotonic_ns()
        mapped = await Mapped.open(rig)
        response = await (await rig.session()).ask(attach=attach_request(sent_ns=sent_ns))
        assert response.failure.reason == "ATTACH_OVERTAKEN", response
        assert await counts(rig, leases=1, sessions=1, fenced_operations=1)
        await mapped.broken()
        assert await counts(rig, leases=1, sessions=1, credit_blocks=2)
        other = await (await rig.session()).ask(attach=attach_request(sent_ns=sent_ns, name="d1"))
        assert other.WhichOneof("result") == "attach", "another decoder of the process has an order of its own"
        _, response = await mapped.attach(mapped.resume())
        assert response.attach.resumed

    run(body, **PATIENT)


def test_an_attach_that_a_later_one_overtook_ends_no_quarantine() -> None:
    """What a silent decoder may still write stays out of use until an attach that it sent after all others comes."""

    async def body(rig: Rig) -> None:
        sent_ns = time.monotonic_ns()
        await Mapped.open(rig)
        await eventually_async(lambda: counts(rig, sessions=0, quarantined_blocks=3))
        response = await (await rig.session()).ask(attach=attach_request(sent_ns=sent_ns))
        assert response.failure.reason == "ATTACH_OVERTAKEN", response
        assert await counts(rig, sessions=0, quarantined_blocks=3)
        await rig.attach()
        assert await counts(rig, sessions=1, quarantined_blocks=0)

    run(body, **SHORT)


def test_a_process_that_has_nothing_here_is_not_remembered() -> None:
    """Decoders that attach under ever new names and never map the arena leave nothing behind when they are gone."""

    async def body(rig: Rig) -> None:
        for number in range(3):
            client = await rig.attach(name=f"d{number}")
            assert rig.daemon._sessions._order._newest
            await client.close()
            await eventually_async(lambda: counts(rig, sessions=0))
        assert not rig.daemon._sessions._order._newest

    run(body, **PATIENT)
