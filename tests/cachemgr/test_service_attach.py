"""CacheService: a session's attach, the layout it fixes or is refused for, and the order of its operations."""

from __future__ import annotations

import asyncio
import os

import grpc
import pytest

from common.arena_frames import PROTOCOL_VERSION
from common.arena_wire import fetch_arena
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tests.cachemgr.daemon_rig import BLOCKS, LAYOUT, attach_request
from tests.cachemgr.service_rig import failed, run


def test_attach_gives_the_pool_and_a_token_for_its_memory():
    """The first attach fixes the layout; the token fetches memory of the promised size and fingerprint."""

    async def body(rig):
        decoder = await rig.attach()
        answer = decoder.attached
        assert (answer.num_blocks, answer.layout_fingerprint) == (BLOCKS, LAYOUT.fingerprint())
        fd, info = await asyncio.to_thread(fetch_arena, rig.paths.arena_socket, answer.arena_token)
        assert os.fstat(fd).st_size == info.arena_bytes == LAYOUT.arena_bytes(BLOCKS)
        assert os.pread(fd, 32, 0) == info.nonce
        os.close(fd)
        sessions = await rig.admin.ListSessions(admin_pb2.ListSessionsRequest())
        assert [(item.decoder_name, item.mapped) for item in sessions.sessions] == [("d0", True)]

    run(body)


def test_operations_out_of_order_are_refused_and_the_stream_goes_on():
    """Nothing comes before attach, attach comes once, an unset operation is refused; the stream goes on."""

    async def body(rig):
        decoder = await rig.session()
        failed(await decoder.ask(credit=cache_pb2.CreditRequest(wanted_blocks=1)), "FAILED_PRECONDITION", "attach")
        failed(await decoder.ask(), "FAILED_PRECONDITION")
        await decoder.attach()
        failed(await decoder.ask(), "INVALID_ARGUMENT", "operation")
        failed(await decoder.ask(attach=attach_request()), "FAILED_PRECONDITION", "already")
        assert (await decoder.ask(credit=cache_pb2.CreditRequest(wanted_blocks=2))).credit_granted.granted_blocks == 2

    run(body)


def test_every_answer_carries_sequence_epoch_and_revision():
    """Answers repeat the number of their operation, and the revision never shrinks."""

    async def body(rig):
        decoder = await rig.attach()
        last = 0
        for _ in range(3):
            answer = await decoder.ask(credit=cache_pb2.CreditRequest(wanted_blocks=1))
            assert answer.epoch == 1
            assert answer.revision >= last
            last = answer.revision
        assert last > 0

    run(body)


def test_sequence_that_does_not_grow_ends_that_stream_alone():
    """A repeated sequence number breaks the protocol: INVALID_ARGUMENT for the stream, nothing for its neighbour."""

    async def body(rig):
        other = await rig.attach(name="d1")
        decoder = await rig.attach()
        decoder.sequence -= 1
        await decoder.send(credit=cache_pb2.CreditRequest(wanted_blocks=1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decoder.call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await other.ask(credit=cache_pb2.CreditRequest(wanted_blocks=1))).credit_granted.granted_blocks == 1
        assert (await rig.snapshot()).sessions == 1

    run(body)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 3}, "num_layers: want 3, have 2"),
        ({"num_kv_heads": 4}, "num_kv_heads: want 4, have 1"),
        ({"head_dim": 16}, "head_dim: want 16, have 8"),
        ({"block_tokens": 8}, "block_tokens: want 8, have 4"),
        ({"dtype": "bfloat16"}, "dtype: want bfloat16, have float32"),
        ({"window_tokens": 4096}, "window_tokens: want 4096, have 0"),
        ({"dtype": "bfloat16", "quantization": "int8"}, "quantization: want int8, have none"),
    ],
)
def test_another_layout_is_refused_with_the_numbers_that_differ(changes, named):
    """A decoder of another layout is told what differs; one of the same layout attaches."""

    async def body(rig):
        await rig.attach()
        stranger = await rig.session()
        failure = failed(await stranger.ask(attach=attach_request(name="d1", **changes)), "FAILED_PRECONDITION", named)
        assert failure.reason == "LAYOUT_MISMATCH"
        assert set(failure.metadata) == set(changes)
        await rig.attach(name="d2")
        assert (await rig.snapshot()).sessions == 2

    run(body)


def test_another_protocol_version_is_refused_with_both_numbers():
    """Even the first decoder cannot attach with another protocol; the daemon then still takes the right one."""

    async def body(rig):
        stranger = await rig.session()
        request = attach_request()
        request.protocol_version = 9
        failure = failed(await stranger.ask(attach=request), "FAILED_PRECONDITION", "9")
        assert dict(failure.metadata) == {"want": "9", "have": str(PROTOCOL_VERSION)}
        for changes in ({"layout": None}, {"decoder_name": "\n"}, {"resume": cache_pb2.SessionResume()}):
            other = attach_request()
            other.protocol_version = 9
            for field, value in changes.items():
                other.ClearField(field)
                if value is not None:
                    other.MergeFrom(cache_pb2.AttachRequest(**{field: value}))
            failure = failed(await (await rig.session()).ask(attach=other), "FAILED_PRECONDITION", "9")
            assert dict(failure.metadata) == {"want": "9", "have": str(PROTOCOL_VERSION)}, f"whatever its {changes} is"
        await rig.attach()

    run(body)


@pytest.mark.parametrize(
    "changes", [{"num_layers": 0}, {"block_tokens": 5}, {"dtype": "int8"}, {"quantization": "q4"}, {"version": 7}]
)
def test_impossible_layouts_are_refused_and_fix_nothing(changes):
    """A layout that no kernel serves is INVALID_ARGUMENT, and the next attach may still choose the layout."""

    async def body(rig):
        stranger = await rig.session()
        failed(await stranger.ask(attach=attach_request(**changes)), "INVALID_ARGUMENT", "attach.layout")
        await rig.attach()

    run(body)


def test_pool_too_small_for_its_layout_is_refused_with_numbers():
    """A pool of fewer than two blocks names the block's size."""

    async def body(rig):
        stranger = await rig.session()
        failure = failed(await stranger.ask(attach=attach_request()), "FAILED_PRECONDITION")
        assert failure.metadata["num_blocks"] == "1"
        assert failure.metadata["block_bytes"] == str(LAYOUT.block_bytes)

    run(body, pool_blocks=None, pool_bytes=LAYOUT.block_bytes * 2 - 1)
