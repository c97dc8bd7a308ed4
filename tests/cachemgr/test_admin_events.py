"""WatchEvents over its real socket: no gap, resumable, ended clearly where it cannot be, redacted for readers."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from common.interceptors import error_from_rpc
from tessera.admin.v1 import admin_pb2
from tests.cachemgr.admin_rig import DENIED, cached_tokens, fill, reader_of, run
from tests.cachemgr.daemon_rig import running

PROMPT = list(range(1, 9))
OUT_OF_RANGE = grpc.StatusCode.OUT_OF_RANGE


def watch(client, **fields):
    return client.WatchEvents(admin_pb2.WatchEventsRequest(**fields))


async def take(call, count):
    """The next `count` events."""
    return [await asyncio.wait_for(call.read(), 10) for _ in range(count)]


async def until(call, kind):
    """Events up to the first of a kind, that one included."""
    seen = []
    while not seen or seen[-1].kind != kind:
        seen += await take(call, 1)
    return seen


async def ended(call, code):
    """The error that ends a stream."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            assert await asyncio.wait_for(call.read(), 10) is not grpc.aio.EOF
    assert caught.value.code() is code
    return error_from_rpc(caught.value)


def test_events_come_in_order_from_the_first_to_the_latest():
    """From 0: all that is known, then what comes, each number one above the one before."""

    async def body(rig):
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="acme"))
        decoder = await rig.attach()
        call = watch(rig.admin, after_sequence=0)
        seen = await until(call, "session_attached")
        assert [event.kind for event in seen] == ["tenant_created", "session_attached"]
        await fill(rig, decoder, PROMPT)
        seen += await until(call, "lease_ended")
        assert [event.sequence for event in seen] == list(range(1, len(seen) + 1))
        assert [event.kind for event in seen[2:]] == ["lease_granted", "blocks_published", "lease_ended"]
        assert seen[0].tenant == "acme"
        assert {event.tenant for event in seen[2:]} == {"default"}
        assert {event.epoch for event in seen} == {1}
        assert all(1e9 < event.unix_seconds < 1e11 for event in seen)
        assert seen[2].detail["num_tokens"] == "8"

    run(body)


def test_unset_sequence_begins_now_and_a_number_resumes_after_it():
    """Nothing of before is sent; a later subscriber goes on exactly where the one before stopped."""

    async def body(rig):
        for number in range(4):
            await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant=f"t{number}"))
        call = watch(rig.admin, after_sequence=1, epoch=1)
        assert [(event.sequence, event.tenant) for event in await take(call, 2)] == [(2, "t1"), (3, "t2")]
        call.cancel()
        again = watch(rig.admin, after_sequence=3)
        assert (await take(again, 1))[0].tenant == "t3"
        now = watch(rig.admin)
        await now.wait_for_connection()
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="later"))
        (event,) = await take(now, 1)
        assert (event.sequence, event.tenant) == (5, "later")

    run(body)


def test_what_is_not_known_is_out_of_range_with_what_is():
    """A number ahead, a forgotten one and another epoch are refused, with the oldest and the newest that are known."""

    async def body(rig):
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="acme"))
        error = await ended(watch(rig.admin, after_sequence=9), OUT_OF_RANGE)
        assert (error.metadata["oldest_sequence"], error.metadata["last_sequence"]) == ("1", "1")
        error = await ended(watch(rig.admin, after_sequence=0, epoch=7), OUT_OF_RANGE)
        assert error.reason == "EPOCH_OVER"
        assert error.metadata["epoch"] == "1"
        log = rig.daemon._owner.events
        for _ in range(log._max_events + 5):
            log.add("filler", 0)
        error = await ended(watch(rig.admin, after_sequence=0), OUT_OF_RANGE)
        assert int(error.metadata["oldest_sequence"]) == 7
        assert (await take(watch(rig.admin, after_sequence=6), 1))[0].sequence == 7

    run(body)


def test_reader_that_is_too_slow_is_ended_and_told_where_it_may_go_on():
    """Whoever falls behind by more than the log holds gets OUT_OF_RANGE, and everything before that without a gap."""

    async def body(rig):
        log = rig.daemon._owner.events
        log.add("filler", 0)
        call = watch(rig.admin, after_sequence=0)
        seen = await take(call, 1)
        pads = {f"field{number}": "x" * 1000 for number in range(20)}
        for _ in range(8):  # 20 kB each: far more than the stream's window takes in
            for _ in range(log._max_events // 4):
                log.add("filler", 0, detail=pads)
            for _ in range(100):
                await asyncio.sleep(0)  # the daemon sends what it can
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                seen += await take(call, 1)
        assert caught.value.code() is OUT_OF_RANGE
        assert [event.sequence for event in seen] == list(range(1, len(seen) + 1))
        oldest = int(error_from_rpc(caught.value).metadata["oldest_sequence"])
        assert oldest > len(seen)

    run(body)


def test_tokens_and_names_are_for_operators_who_ask():
    """With tokens: those of the published blocks; without: none. A reader gets neither, and is refused if it asks."""

    async def body(rig):
        decoder = await rig.attach()
        await fill(rig, decoder, PROMPT)
        shown = {}
        reader = await reader_of(rig)
        for name, client, fields in (
            ("operator", rig.admin, {"with_tokens": True}),
            ("plain", rig.admin, {}),
            ("reader", reader, {}),
        ):
            seen = await until(watch(client, after_sequence=0, **fields), "lease_ended")
            (shown[name],) = [event for event in seen if event.kind == "blocks_published"]
        (prefix,) = (await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())).prefixes
        assert list(shown["operator"].token_ids) == PROMPT
        assert shown["operator"].name == shown["plain"].name == prefix.name
        assert not shown["plain"].token_ids
        assert not shown["reader"].token_ids
        assert shown["reader"].name == ""
        assert list(shown["reader"].blocks) == list(shown["operator"].blocks) == list(prefix.blocks)
        error = await ended(watch(reader, after_sequence=0, with_tokens=True), DENIED)
        assert error.metadata["field"] == "with_tokens"

    run(body)


def test_no_event_tells_request_ids_keys_or_handles():
    """Request ids are labels of other callers; they and the text of a key are in no event."""

    async def body(rig):
        made = await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="default"))
        decoder = await rig.attach()
        await fill(rig, decoder, PROMPT, request_id="label-of-somebody")
        await cached_tokens(rig, decoder, PROMPT)
        seen = await until(watch(rig.admin, after_sequence=0, with_tokens=True), "lease_ended")
        shown = b"".join(event.SerializeToString() for event in seen)
        assert b"label-of-somebody" not in shown
        assert made.key.encode() not in shown
        assert made.key_id.encode() in shown  # positive control

    run(body)


def test_numbers_begin_anew_with_the_epoch(tmp_path_factory):
    """A restarted daemon refuses the old epoch, so that nobody takes its numbers for the old ones."""
    folder = tmp_path_factory.mktemp("s")

    async def body():
        async with running(state_dir=folder) as rig:
            await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="acme"))
            (event,) = await take(watch(rig.admin, after_sequence=0), 1)
        async with running(state_dir=folder) as rig:
            error = await ended(watch(rig.admin, after_sequence=event.sequence, epoch=event.epoch), OUT_OF_RANGE)
            assert error.metadata["epoch"] == str(event.epoch + 1)

    asyncio.run(body())
