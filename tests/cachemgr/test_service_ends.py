"""How things end over real sockets: streams and processes of decoders, aborts, drains, the daemon itself."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import pytest

from common.arena_wire import fetch_arena
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tests.cachemgr.daemon_rig import acquire_request, attach_request, ids, report_request
from tests.cachemgr.rig import eventually, eventually_async, read_line, spawn_python
from tests.cachemgr.service_rig import CODES, PROMPT, compute, failed, run


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_stream_of_an_unmapped_decoder_ends_with_everything_free(how):
    """Without the memory nobody can write: leases and credit are free at once, sealed blocks stay cached."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        await compute(decoder, grant, PROMPT, release=False)
        await decoder.ask(credit=cache_pb2.CreditRequest(wanted_blocks=2))
        if how == "close":
            await decoder.close()
        else:
            decoder.call.cancel()
        await eventually_async(rig.is_quiet)
        assert (await rig.snapshot()).sessions == 0
        again = await rig.attach()
        assert (await compute(again, grant, PROMPT)).cached_tokens == len(PROMPT) - 1

    run(body)


def test_living_process_keeps_its_writable_blocks_in_quarantine_until_it_attaches_anew():
    """A mapped, living decoder whose stream ends could still write: its blocks wait, and its new attach frees them."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        fd, _ = await asyncio.to_thread(fetch_arena, rig.paths.arena_socket, decoder.attached.arena_token)
        os.close(fd)
        lease = (await decoder.ask(acquire=acquire_request(grant, PROMPT))).acquire
        assert len(ids(lease.blocks)) == 3
        await decoder.close()
        await eventually_async(lambda: _counts(rig, leases=0, quarantined_blocks=3, sessions=0))
        await rig.attach(name="another")
        assert (await rig.snapshot()).quarantined_blocks == 3
        await rig.attach(name="d0")
        assert (await rig.snapshot()).quarantined_blocks == 0
        assert await rig.is_sound()

    run(body)


async def _counts(rig, **expected):
    now = await rig.snapshot()
    return all(getattr(now, name) == value for name, value in expected.items())


CHILD = """
import mmap, os, sys
sys.path.insert(0, os.getcwd())
import grpc
from common.arena_wire import fetch_arena
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc
from tests.cachemgr.daemon_rig import acquire_request, attach_request

state, grant = sys.argv[1], bytes.fromhex(sys.argv[2])
key = open(state + "/internal.key").read().strip()
channel = grpc.insecure_channel("unix:" + state + "/run/cachemgr.sock")
import queue
outgoing = queue.Queue()
call = cache_pb2_grpc.CacheServiceStub(channel).Session(
    iter(outgoing.get, None), metadata=(("authorization", "Bearer " + key),)
)
outgoing.put(cache_pb2.SessionRequest(sequence=1, attach=attach_request(name="child")))
token = next(call).attach.arena_token
fd, info = fetch_arena(state + "/run/arena.sock", token)
view = mmap.mmap(fd, info.arena_bytes)
outgoing.put(cache_pb2.SessionRequest(sequence=2, acquire=acquire_request(grant, list(range(1, 10)))))
print(next(call).acquire.lease_id, view[:32] == info.nonce, flush=True)
mode = sys.argv[3]
if mode == "drop":
    call.cancel()
    channel.close()
    print("dropped", flush=True)
sys.stdin.readline()
"""


def test_killed_decoder_frees_its_leases():
    """kill -9 of a real decoder process with a mapping and a lease leaves nothing held or quarantined."""

    async def body(rig):
        await rig.attach(name="survivor")
        with spawn_python(CHILD, str(rig.paths.state_dir), (await rig.grant()).hex(), "hold") as child:
            assert (await read_line(child)).endswith("True")
            await eventually_async(lambda: _counts(rig, leases=1, sessions=2, active_blocks=3))
            child.kill()
            await eventually_async(rig.is_quiet)
            assert (await rig.snapshot()).sessions == 1

    run(body)


def test_quarantine_ends_with_the_process_and_not_before():
    """A decoder that only lost its stream, and does not come back, holds its writable blocks in quarantine; its death
    frees them."""

    async def body(rig):
        await rig.attach(name="survivor")
        with spawn_python(CHILD, str(rig.paths.state_dir), (await rig.grant()).hex(), "drop") as child:
            await read_line(child)
            assert await read_line(child) == "dropped"
            await eventually_async(lambda: _counts(rig, leases=0, quarantined_blocks=3))
            os.kill(child.pid, signal.SIGSTOP)
            assert (await rig.snapshot()).quarantined_blocks == 3
            child.kill()
            await eventually_async(rig.is_quiet)

    run(body, lease_seconds=0.5, grace_seconds=0.5)


def test_killed_decoders_leave_no_fd_behind():
    """The daemon's open files are as many after the deaths of many decoders as before."""

    async def body(rig):
        await rig.attach(name="survivor")
        grant = (await rig.grant()).hex()

        async def one_life():
            with spawn_python(CHILD, str(rig.paths.state_dir), grant, "hold") as child:
                await read_line(child)
                child.kill()
                await eventually_async(lambda: _counts(rig, sessions=1, leases=0, quarantined_blocks=0))

        await one_life()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(4):
            await one_life()
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)

    run(body, lease_seconds=600.0)  # the survivor says nothing while the children start


def test_abort_reaches_the_decoder_that_has_the_request():
    """Every decoder is asked; one that knew the request makes the call succeed, none makes it NOT_FOUND."""

    async def body(rig):
        decoders = [await rig.attach(name=f"d{number}") for number in range(2)]

        async def answer(found):
            for decoder, has_it in zip(decoders, found, strict=True):
                push = await decoder.push()
                assert push.abort.request_id == "r1"
                await decoder.ask(abort_result=cache_pb2.AbortResult(abort_id=push.abort.abort_id, found=has_it))

        call = rig.admin.AbortRequest(admin_pb2.AbortRequestRequest(request_id="r1"))
        await answer([False, True])
        await call
        call = rig.admin.AbortRequest(admin_pb2.AbortRequestRequest(request_id="r1"))
        await answer([False, False])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await decoders[0].ask(abort_result=cache_pb2.AbortResult(abort_id=999, found=True))  # nobody asked

    run(body)


def test_abort_does_not_wait_for_a_decoder_that_goes():
    """A decoder that leaves while it is asked counts as one that does not know the request."""

    async def body(rig):
        decoder = await rig.attach()
        call = rig.admin.AbortRequest(admin_pb2.AbortRequestRequest(request_id="r1"))
        await decoder.push()
        decoder.call.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    run(body)


def test_draining_takes_no_new_work_and_lets_running_work_end():
    """While draining new attaches and prompts are UNAVAILABLE, reports work, and the drain ends with the last lease."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        lease = await compute(decoder, grant, PROMPT, release=False)
        draining = asyncio.create_task(rig.daemon.drain(30))
        await eventually_async(lambda: _refused_acquire(decoder, grant))
        stranger = await rig.session()
        failed(await stranger.ask(attach=attach_request(name="d1")), "UNAVAILABLE")
        assert not draining.done()
        await decoder.ask(report=report_request({"lease_id": lease.lease_id, "release": True}))
        await asyncio.wait_for(draining, 10)

    run(body)


async def _refused_acquire(decoder, grant):
    answer = await decoder.ask(acquire=acquire_request(grant, [77] * 200))  # never fits, so it never leases
    return answer.failure.code == CODES["UNAVAILABLE"]


def test_streams_end_with_unavailable_when_the_daemon_goes():
    """A decoder that is still attached at the end is told UNAVAILABLE, which it may retry."""

    async def body(rig):
        decoder = await rig.attach()
        stopping = asyncio.create_task(rig.daemon.stop())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decoder.call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await stopping

    run(body)
