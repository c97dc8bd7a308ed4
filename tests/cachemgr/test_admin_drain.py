"""DrainPool: nothing new begins, what runs comes to its end, and it can be taken back."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachemgr.roles import ADMIN_SERVICE
from cachemgr.service import CACHE_SERVICE
from tessera.admin.v1 import admin_pb2
from tests.cachemgr.admin_rig import INVALID, audit_lines, cached_tokens, fill, refused, run
from tests.cachemgr.daemon_rig import acquire_request, report_request
from tests.cachemgr.rig import eventually_async

PROMPT = list(range(1, 9))


def drain(rig, **fields):
    return rig.admin.DrainPool(admin_pb2.DrainPoolRequest(**fields))


def test_drain_refuses_new_leases_and_waits_for_the_running_ones():
    """New leases are UNAVAILABLE, resumed ones go on; it is drained when the last lease is gone; resume ends it."""

    async def body(rig):
        decoder = await rig.attach()
        grant = await rig.grant()
        lease = await fill(rig, decoder, PROMPT, release=False, grant=grant)
        done = await drain(rig, timeout_seconds=0.05)
        assert (done.drained, done.leases) == (False, 1)
        failure = (await decoder.ask(acquire=acquire_request(grant, PROMPT))).failure
        assert (failure.reason, failure.code) == ("DRAINING", 14)
        resumed = (await decoder.ask(acquire=acquire_request(grant, [1, 2], resumed=True))).acquire
        assert resumed.lease_id
        waiting = drain(rig, timeout_seconds=60)
        ended = [{"lease_id": item.lease_id, "release": True} for item in (lease, resumed)]
        await decoder.ask(report=report_request(*ended))
        done = await waiting
        assert (done.drained, done.leases) == (True, 0)
        other = await rig.attach(name="d1")  # a decoder may come back meanwhile
        assert (await other.ask(acquire=acquire_request(grant, PROMPT))).failure.reason == "DRAINING"
        assert (await drain(rig, resume=True)).drained
        assert await cached_tokens(rig, decoder, PROMPT) == 7
        assert [line["outcome"] for line in audit_lines(rig) if line["method"] == "DrainPool"] == ["OK"] * 3
        assert await rig.is_sound()

    run(body)


def test_health_says_that_the_pool_is_drained(monkeypatch):
    """NOT_SERVING on both sockets while it is drained, for the server and each service; SERVING again after it."""
    monkeypatch.setattr("cachemgr.daemon.TICK_SECONDS", 0.02)

    async def body(rig):
        admin = await rig.channel(rig.paths.admin_socket, None)
        services = [(rig.internal, name) for name in ("", CACHE_SERVICE)] + [
            (admin, name) for name in ("", ADMIN_SERVICE)
        ]

        async def say(status):
            found = set()
            for channel, name in services:
                request = health_pb2.HealthCheckRequest(service=name)
                found.add((await health_pb2_grpc.HealthStub(channel).Check(request)).status)
            return found == {status}

        serving = health_pb2.HealthCheckResponse.SERVING
        assert await say(serving)
        await drain(rig, timeout_seconds=5)
        await eventually_async(lambda: say(health_pb2.HealthCheckResponse.NOT_SERVING))
        await drain(rig, resume=True)
        await eventually_async(lambda: say(serving))

    run(body)


def test_drain_that_is_taken_back_ends_the_wait_of_another():
    """Whoever still waits is answered at once when somebody resumes."""

    async def body(rig):
        decoder = await rig.attach()
        await fill(rig, decoder, PROMPT, release=False)
        waiting = drain(rig, timeout_seconds=600)
        grant = await rig.grant()
        while (await decoder.ask(acquire=acquire_request(grant, [1]))).WhichOneof("result") != "failure":
            pass  # until the drain has begun
        await drain(rig, resume=True)
        assert not (await waiting).drained

    run(body)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
def test_impossible_waits_are_refused_and_drain_nothing(seconds):
    """The field is named, and the pool goes on."""

    async def body(rig):
        decoder = await rig.attach()
        assert (await refused(drain(rig, timeout_seconds=seconds), INVALID)).field == "timeout_seconds"
        assert await cached_tokens(rig, decoder, PROMPT) == 0

    run(body)


def test_empty_node_is_drained_at_once():
    """Without a decoder there is nothing to wait for."""

    async def body(rig):
        assert (await drain(rig)).drained

    run(body)
