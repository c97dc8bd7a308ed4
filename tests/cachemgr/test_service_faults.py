"""Fault knobs, drift and garbage: what harms one message or one stream harms nothing else."""

from __future__ import annotations

import asyncio
import os
from random import Random

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.arena_wire import fetch_arena
from common.faults import Faults
from common.tokens import pack_tokens
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tests.cachemgr.daemon_rig import BLOCKS, LAYOUT, acquire_request, ids, report_request
from tests.cachemgr.rig import eventually_async
from tests.cachemgr.service_rig import CODES, PROMPT, compute, failed, run


def test_freed_blocks_become_nan_under_the_poison_knob():
    """With the knob every freed block reads as NaN through a decoder's mapping; without it bytes stay."""

    async def body(rig, expected):
        decoder, grant = await rig.attach(), await rig.grant()
        fd, _ = await asyncio.to_thread(fetch_arena, rig.paths.arena_socket, decoder.attached.arena_token)
        lease = (await decoder.ask(acquire=acquire_request(grant, PROMPT[:4], no_store=True))).acquire
        offset = ids(lease.blocks)[0] * LAYOUT.block_bytes
        os.pwrite(fd, bytes(LAYOUT.block_bytes), offset)
        await decoder.ask(report=report_request({"lease_id": lease.lease_id, "release": True}))
        values = np.frombuffer(os.pread(fd, LAYOUT.block_bytes, offset), np.float32)
        assert bool(np.isnan(values).all()) is expected
        os.close(fd)

    run(lambda rig: body(rig, True), faults=Faults(poison_on_free=True))
    run(lambda rig: body(rig, False))


def test_dropped_message_is_lost_and_the_next_is_served():
    """The knob loses the n-th message of its name and no other."""

    async def body(rig):
        decoder = await rig.attach()
        await decoder.ask(credit=cache_pb2.CreditRequest(wanted_blocks=1))
        await decoder.send(credit=cache_pb2.CreditRequest(wanted_blocks=1))
        answer = await decoder.ask(credit=cache_pb2.CreditRequest(wanted_blocks=1))
        assert answer.credit_granted.granted_blocks == 1
        assert (await rig.snapshot()).credit_blocks == 2

    run(body, faults=Faults(drop_message={"credit": 2}))


def test_delayed_message_holds_up_its_own_stream_alone():
    """While one session's operation is delayed, another's is served."""

    async def body(rig):
        slow, quick = await rig.attach(name="d0"), await rig.attach(name="d1")
        waiting = asyncio.create_task(slow.ask(report=report_request()))
        await quick.ask(credit=cache_pb2.CreditRequest(wanted_blocks=1))
        assert not waiting.done()
        assert (await waiting).WhichOneof("result") == "report"

    run(body, faults=Faults(delay_message={"report": 1.0}))


def test_failed_allocation_is_refused_once_and_changes_nothing():
    """The knob fails one allocation with RESOURCE_EXHAUSTED; the same request then works."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        failed(await decoder.ask(acquire=acquire_request(grant, PROMPT)), "RESOURCE_EXHAUSTED")
        assert (await rig.snapshot()).leases == 0
        await compute(decoder, grant, PROMPT)
        await eventually_async(rig.is_quiet)

    run(body, faults=Faults(fail_allocation=1))


def test_weak_hash_collides_and_never_hits_wrongly():
    """With one-bit names different prompts collide and are counted; none is served another's blocks."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        for number in range(4):
            assert (await compute(decoder, grant, [100 + number] * 8)).cached_tokens == 0
        now = await rig.snapshot()
        assert now.hash_collisions > 0
        assert now.hits == 0

    run(body, faults=Faults(weak_hash_bits=1), pool_blocks=64)


def test_drift_is_an_alarm_and_refuses_new_work_until_it_is_gone():
    """Books that do not add up stop new prompts and health, not the process; once they do again, work is taken."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        health = health_pb2_grpc.HealthStub(rig.internal)

        async def reason():
            answer = await decoder.ask(acquire=acquire_request(grant, [77] * 200))  # never fits, so it never leases
            status = (await health.Check(health_pb2.HealthCheckRequest())).status
            return answer.failure.reason, status == health_pb2.HealthCheckResponse.SERVING

        assert await reason() == ("EXCEEDS_POOL", True)
        pool = rig.daemon._owner.manager._state.pool
        pool.references[3] += 1
        await eventually_async(lambda: _equals(reason(), ("INTEGRITY", False)))
        pool.references[3] -= 1
        await eventually_async(lambda: _equals(reason(), ("EXCEEDS_POOL", True)))
        await compute(decoder, grant, PROMPT)

    run(body)


async def _equals(coroutine, expected):
    return await coroutine == expected


@pytest.mark.parametrize("socket_name", ["cachemgr_socket", "admin_socket", "arena_socket"])
def test_garbage_on_any_socket_leaves_the_daemon_serving(socket_name):
    """Random bytes, HTTP, half a preface and megabytes of noise on a socket harm nobody."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        blobs = [b"", b"\0", os.urandom(64), b"GET / HTTP/1.1\r\n\r\n", preface[:10], preface + b"\xff" * 4096]
        for blob in [*blobs, os.urandom(2 << 20)]:
            _, writer = await asyncio.open_unix_connection(getattr(rig.paths, socket_name))
            try:
                writer.write(blob)
                await asyncio.wait_for(writer.drain(), 10)
            except ConnectionError:
                pass
            writer.close()
        await compute(decoder, grant, PROMPT)
        await eventually_async(rig.is_quiet)

    run(body)


def test_garbage_messages_on_a_session_end_that_call_alone():
    """Bytes that are no SessionRequest end their own stream; a neighbour's goes on."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        raw = rig.internal.stream_stream("/tessera.cache.v1.CacheService/Session")()
        await raw.write(b"\xff" * 1000)
        with pytest.raises(grpc.aio.AioRpcError):
            await raw.read()
        await compute(decoder, grant, PROMPT)

    run(body)


def random_operation(random, grants, leases, credit):
    """An operation of random fields, half of them sensible."""
    pick = random.choice

    def packed(most):
        ints = pack_tokens(random.choices(range(-1, most), k=3))
        return pick([b"", random.randbytes(random.randrange(9)), ints])

    def number():
        return pick([0, 1, 3, 4, 7, 2**31 - 1, 2**32 - 1])

    match random.randrange(6):
        case 0 | 1:
            tokens = random.choices(range(1, 4), k=random.randrange(1, 20))
            fields = {"sample": number(), "priority": number(), "no_store": pick([False, True])}
            request = acquire_request(pick(grants), tokens, **(fields if random.random() < 0.3 else {}))
            if random.random() < 0.2:
                request.tokens = packed(5)
            return {"acquire": request}
        case 2 | 3:
            sequences = [
                {
                    "lease_id": pick([*leases, 0, 10**9]),
                    "taken_blocks": packed(BLOCKS + 2) if random.random() < 0.3 else b"",
                    "tokens": packed(5) if random.random() < 0.3 else pack_tokens(random.choices(range(1, 4), k=2)),
                    "sealed_tokens": number(),
                    "copied": pick([False, True]),
                    "release": pick([False, True]),
                }
                for _ in range(random.randrange(4))
            ]
            returned = packed(BLOCKS + 2) if random.random() < 0.2 else pack_tokens(credit)
            return {"report": report_request(*sequences, returned_blocks=returned, wanted_blocks=number() % 3)}
        case 4:
            return {"fork": cache_pb2.ForkRequest(lease_id=pick([*leases, 0]), samples=[1, 2], num_tokens=number())}
        case _:
            return {"credit": cache_pb2.CreditRequest(wanted_blocks=number())}


@pytest.mark.parametrize("seed", range(4))
def test_every_random_operation_is_answered_and_the_pool_stays_sound(seed):
    """Hundreds of random, half broken operations of two sessions: each is answered, nothing breaks, all comes back."""

    async def body(rig):
        random = Random(seed)
        decoders = [await rig.attach(name=f"d{number}") for number in range(2)]
        grants, leases, granted = [await rig.grant(), b"", b"x" * 80], [1], 0
        grants += [grants[0]] * 6
        credits_held = [[], []]
        for step in range(160):
            which = random.randrange(2)
            if step % 16 == 15:  # a decoder restarts
                await decoders[which].close()
                decoders[which], credits_held[which] = await rig.attach(name=f"d{which}"), []
            answer = await decoders[which].ask(**random_operation(random, grants, leases, credits_held[which]))
            result = answer.WhichOneof("result")
            if result == "report":
                credits_held[which] = []
            credits_held[which] += ids(answer.credit)
            assert result is not None
            if result == "failure":
                assert answer.failure.code not in (CODES["INTERNAL"], CODES["UNKNOWN"])
            elif result == "acquire":
                granted += 1
                leases.append(answer.acquire.lease_id)
            violations = (await rig.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest())).violations
            assert not violations, (seed, violations)
        assert granted > 5
        for decoder in decoders:
            await decoder.close()
        await eventually_async(rig.is_quiet)

    run(body)
