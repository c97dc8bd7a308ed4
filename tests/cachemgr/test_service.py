"""CacheService and CredentialService over real sockets: sessions, operations, refusals, the ends of processes."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path
from random import Random

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachemgr.clocks import Clocks
from cachemgr.grants import GRANT_VALIDITY_NS
from common.arena_frames import PROTOCOL_VERSION
from common.arena_wire import fetch_arena
from common.faults import Faults
from common.interceptors import error_from_rpc
from common.tokens import pack_tokens
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tessera.common.v1 import common_pb2
from tests.cachemgr.daemon_rig import (
    BLOCKS,
    KEY,
    LAYOUT,
    acquire_request,
    attach_request,
    ids,
    report_request,
    running,
)
from tests.cachemgr.rig import eventually, eventually_async, read_line, spawn_python

CODES = {name: code.value[0] for name, code in grpc.StatusCode.__members__.items()}
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]  # 9 tokens: two whole blocks of 4 and a tail


def run(body, **options):
    async def inside():
        async with running(**options) as rig:
            await body(rig)

    asyncio.run(inside())


def failed(response, code, text=""):
    assert response.WhichOneof("result") == "failure", response
    assert response.failure.code == CODES[code], response.failure
    assert text in response.failure.message
    return response.failure


async def compute(decoder, grant, tokens, *, release=True, **fields):
    """Acquire, seal everything, and release: a whole request as a decoder would do it."""
    acquired = (await decoder.ask(acquire=acquire_request(grant, tokens, **fields))).acquire
    assert acquired.lease_id
    done = await decoder.ask(
        report=report_request(
            {"lease_id": acquired.lease_id, "sealed_tokens": len(tokens), "copied": True, "release": release}
        )
    )
    assert not done.report.refusals
    return acquired


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


def test_second_prompt_is_served_from_the_first_ones_blocks():
    """What was sealed and released is found again, token by token, and never the last token."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        first = await compute(decoder, grant, PROMPT)
        assert (first.cached_tokens, len(ids(first.blocks)), first.tenant) == (0, 3, "default")
        again = await compute(decoder, grant, PROMPT, request_id="r2")
        assert again.cached_tokens == len(PROMPT) - 1
        assert ids(again.blocks)[:2] == ids(first.blocks)[:2]
        partial = await compute(decoder, grant, [*PROMPT[:6], 99, 98], request_id="r3")
        assert partial.cached_tokens == 6
        assert (partial.copy.source, partial.copy.num_tokens) == (ids(first.blocks)[1], 2)
        await eventually_async(rig.is_quiet)

    run(body)


def test_tenants_never_share_and_one_tenant_does():
    """The same prompt under another tenant's key finds nothing; under the same tenant it hits."""

    async def body(rig):
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="other"))
        other_key = (await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="other"))).key
        decoder = await rig.attach()
        mine, other = await rig.grant(), await rig.grant(other_key)
        await compute(decoder, mine, PROMPT[:4])
        assert (await compute(decoder, other, PROMPT[:4])).cached_tokens == 0
        assert (await compute(decoder, mine, PROMPT[:4])).cached_tokens == 3
        assert (await compute(decoder, other, PROMPT[:4])).cached_tokens == 3

    run(body)


def test_every_part_of_the_key_separates():
    """A prompt under another weights digest, revision or dtype finds nothing."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        await compute(decoder, grant, PROMPT[:4])
        for change in ({"weights_digest": b"v" * 32}, {"revision": "2"}, {"kv_dtype": "bfloat16"}):
            key = common_pb2.CacheKey()
            key.CopyFrom(KEY)
            key.MergeFrom(common_pb2.CacheKey(**change))
            assert (await compute(decoder, grant, PROMPT[:4], key=key, no_store=True)).cached_tokens == 0
        assert (await compute(decoder, grant, PROMPT[:4])).cached_tokens == 3

    run(body)


def test_a_key_names_no_wider_scope():
    """GROUP and PUBLIC in the key are refused, not ignored: the prefix of an acquire names a scope."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        for scope in (common_pb2.SCOPE_GROUP, common_pb2.SCOPE_PUBLIC):
            key = common_pb2.CacheKey(weights_digest=b"w", scope=scope)
            failed(await decoder.ask(acquire=acquire_request(grant, PROMPT, key=key)), "INVALID_ARGUMENT", "key.scope")

    run(body)


def test_only_a_true_grant_of_a_living_key_leases():
    """No grant, garbage, another daemon's grant and a revoked key's grant are refused; a good one leases."""

    async def body(rig):
        decoder = await rig.attach()
        made = await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="default"))
        grant = await rig.grant(made.key)
        for bad in (b"", b"x" * 100, grant[:-1], grant[:-1] + bytes([grant[-1] ^ 1])):
            failed(await decoder.ask(acquire=acquire_request(bad, PROMPT)), "UNAUTHENTICATED")
        await compute(decoder, grant, PROMPT)
        await rig.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id=made.key_id))
        failed(await decoder.ask(acquire=acquire_request(grant, PROMPT)), "UNAUTHENTICATED", "revoked")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.grant(made.key)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert error_from_rpc(caught.value).reason == "KEY_REVOKED"
        await compute(decoder, await rig.grant(), PROMPT)

    run(body)


def test_a_request_may_wait_for_its_first_lease():
    """Twenty hours in a decoder queue, and a jump of the wall clock by years, cost a request nothing; after its
    grant's day it is refused, and so it is at once when its key was revoked while it waited."""
    late, jump = [0], [0]
    clocks = Clocks(steady_ns=lambda: time.monotonic_ns() + late[0], wall_ns=lambda: time.time_ns() + jump[0])

    async def body(rig):
        made = await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="default"))
        grant, revoked = await rig.grant(), await rig.grant(made.key)
        late[0], jump[0] = 20 * 3600 * 10**9, 5 * 365 * 86_400 * 10**9
        decoder = await rig.attach()
        await compute(decoder, grant, PROMPT)
        await rig.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id=made.key_id))
        failed(await decoder.ask(acquire=acquire_request(revoked, PROMPT)), "UNAUTHENTICATED", "revoked")
        late[0] = GRANT_VALIDITY_NS
        decoder = await rig.attach(name="d1")
        failed(await decoder.ask(acquire=acquire_request(grant, PROMPT)), "UNAUTHENTICATED", "expired")

    run(body, clocks=clocks)


def test_a_request_that_runs_outlives_its_grant_and_key():
    """A resumed acquire is leased with the grant it had at first, expired or revoked; no other acquire is."""
    late = [0]
    clocks = Clocks(steady_ns=lambda: time.monotonic_ns() + late[0])

    async def body(rig):
        decoder = await rig.attach()
        made = await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="default"))
        grant, unused = await rig.grant(made.key), await rig.grant()
        await compute(decoder, grant, PROMPT)
        late[0] = 2 * GRANT_VALIDITY_NS
        failed(await decoder.ask(acquire=acquire_request(grant, PROMPT)), "UNAUTHENTICATED", "expired")
        failed(await decoder.ask(acquire=acquire_request(unused, PROMPT, resumed=True)), "UNAUTHENTICATED", "expired")
        await compute(decoder, grant, PROMPT, resumed=True)
        await rig.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id=made.key_id))
        await compute(decoder, grant, PROMPT, resumed=True)
        other = await rig.attach()
        failed(await other.ask(acquire=acquire_request(grant, PROMPT, resumed=True)), "UNAUTHENTICATED", "expired")
        await compute(other, await rig.grant(), PROMPT)

    run(body, clocks=clocks)


@pytest.mark.parametrize("key", ["", "tsr_x", "x" * 100_000, "tsr_0123456789abcdef_" + "A" * 43, "é\U0001f600"])
def test_unknown_keys_get_no_grant(key):
    """A key that is not known is UNAUTHENTICATED, whatever its form; the right one authenticates."""

    async def body(rig):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.credentials.Authenticate(cache_pb2.AuthenticateRequest(key=key))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        answer = await rig.credentials.Authenticate(cache_pb2.AuthenticateRequest(key=rig.default_key))
        assert (answer.tenant, answer.expires_in_seconds) == ("default", 86_400.0)

    run(body)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tokens": b""}, "acquire.tokens"),
        ({"tokens": b"\1\0\0"}, "acquire.tokens"),
        ({"tokens": b"\xff\xff\xff\xff"}, "acquire.tokens"),
        ({"request_id": ""}, "acquire.request_id"),
        ({"request_id": "x" * 129}, "acquire.request_id"),
        ({"request_id": "a\nb"}, "acquire.request_id"),
        ({"priority": 101}, "acquire.priority"),
        ({"sample": 2**32 - 1}, "acquire.sample"),
        ({"key": common_pb2.CacheKey()}, "key.weights_digest"),
    ],
)
def test_malformed_acquire_is_refused_alone_by_field(fields, field):
    """Garbage in an acquire is INVALID_ARGUMENT for it, changes nothing, and the next acquire works."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        request = acquire_request(grant, PROMPT)
        for name, value in fields.items():
            request.ClearField(name)
            if isinstance(value, common_pb2.CacheKey):
                request.key.CopyFrom(value)
            else:
                setattr(request, name, value)
        failure = failed(await decoder.ask(acquire=request), "INVALID_ARGUMENT", field)
        assert failure.metadata["field"] == field
        assert (await rig.snapshot()).leases == 0
        await compute(decoder, grant, PROMPT)

    run(body)


@pytest.mark.parametrize(
    "garbage", [b"\1", b"\1\0\0\0\0", pack_tokens([-1]), pack_tokens([0]), pack_tokens([BLOCKS + 1])]
)
def test_garbage_credit_is_refused_alone(garbage):
    """A returned list that holds no credit of the session changes nothing; the same report without it works."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        acquired = await compute(decoder, grant, PROMPT, release=False)
        answer = await decoder.ask(report=report_request(returned_blocks=garbage))
        failed(answer, "INVALID_ARGUMENT")
        assert (await rig.snapshot()).leases == 1
        done = await decoder.ask(report=report_request({"lease_id": acquired.lease_id, "release": True}))
        assert not done.report.refusals
        await eventually_async(rig.is_quiet)

    run(body)


@pytest.mark.parametrize(
    "fields",
    [
        {"taken_blocks": b"\1"},
        {"taken_blocks": pack_tokens([-5])},
        {"taken_blocks": pack_tokens([BLOCKS + 1])},
        {"taken_blocks": pack_tokens([2**31 - 1])},
        {"tokens": b"\1\2"},
        {"tokens": pack_tokens([-1])},
        {"sealed_tokens": 2**32 - 1},
    ],
)
def test_bad_sequence_of_a_report_loses_its_own_lease_alone(fields):
    """One garbled sequence is refused by name and its lease ends; its neighbour in the same message goes on."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        bad = await compute(decoder, grant, PROMPT[:4], release=False)
        good = await compute(decoder, grant, PROMPT[4:8], release=False, request_id="r2")
        done = await decoder.ask(
            report=report_request({"lease_id": bad.lease_id, **fields}, {"lease_id": good.lease_id, "copied": True})
        )
        assert [item.lease_id for item in done.report.refusals] == [bad.lease_id]
        assert done.report.refusals[0].failure.code == CODES["INVALID_ARGUMENT"]
        leases = await rig.admin.ListLeases(admin_pb2.ListLeasesRequest())
        assert [item.lease for item in leases.leases] == [good.lease_id]
        assert await rig.is_sound()

    run(body)


def test_counters_of_a_report_are_bounded():
    """No single report can push a counter towards its limit."""

    async def body(rig):
        decoder = await rig.attach()
        failed(await decoder.ask(report=report_request(generated_tokens=2**63)), "INVALID_ARGUMENT", "generated_tokens")
        await decoder.ask(report=report_request(generated_tokens=7, preemptions=2, queued_requests=3))
        now = await rig.snapshot()
        assert (now.generated_tokens, now.preemptions, now.queued_requests) == (7, 2, 3)

    run(body)


def test_prompt_that_never_fits_and_one_that_does_not_fit_now():
    """Both are RESOURCE_EXHAUSTED with needed and usable numbers, told apart by reason; a smaller one is served."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        never = list(range(1, (BLOCKS + 1) * 4 + 1))
        failure = failed(await decoder.ask(acquire=acquire_request(grant, never)), "RESOURCE_EXHAUSTED")
        assert (failure.reason, failure.metadata["needed"]) == ("EXCEEDS_POOL", str(BLOCKS + 1))
        held = await compute(decoder, grant, never[: (BLOCKS - 1) * 4], release=False)
        failure = failed(await decoder.ask(acquire=acquire_request(grant, [9] * 8)), "RESOURCE_EXHAUSTED")
        assert failure.reason == "POOL_FULL"
        await decoder.ask(report=report_request({"lease_id": held.lease_id, "release": True}))
        await compute(decoder, grant, [9] * 8)

    run(body)


def test_full_pool_asks_others_for_their_unused_credit_once():
    """A session that sits on credit is asked for it when another cannot be served, and not again before it reports."""

    async def body(rig):
        hoarder, needy, grant = await rig.attach(name="d0"), await rig.attach(name="d1"), await rig.grant()
        credit = (await hoarder.ask(credit=cache_pb2.CreditRequest(wanted_blocks=6))).credit
        prompt = list(range(1, 17))  # 4 blocks; 2 are free
        for _ in range(2):
            assert (
                failed(await needy.ask(acquire=acquire_request(grant, prompt)), "RESOURCE_EXHAUSTED").reason
                == "POOL_FULL"
            )
        push = await hoarder.push()
        assert (push.sequence, push.reclaim.num_blocks) == (0, 2)
        await hoarder.ask(report=report_request(returned_blocks=credit[: 2 * 4]))
        assert hoarder.pushes == []
        await compute(needy, grant, prompt)

    run(body)


def test_session_that_gets_no_credit_at_all_makes_others_return_theirs():
    """A decoder without room to grow is relieved by those who hold blocks unused."""

    async def body(rig):
        hoarder, needy = await rig.attach(name="d0"), await rig.attach(name="d1")
        credit = (await hoarder.ask(credit=cache_pb2.CreditRequest(wanted_blocks=BLOCKS))).credit
        answer = await needy.ask(report=report_request(wanted_blocks=3))
        assert answer.credit == b""
        assert (await hoarder.push()).reclaim.num_blocks == 3
        await hoarder.ask(report=report_request(returned_blocks=credit))
        answer = await needy.ask(report=report_request(wanted_blocks=3))
        assert len(ids(answer.credit)) == 3

    run(body)


def test_fork_shares_whole_blocks_and_copies_the_tail():
    """Branches hold the parent's whole blocks and their own copy of its tail; without room there is none of them."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        parent = await compute(decoder, grant, PROMPT[:6], release=False)
        request = cache_pb2.ForkRequest(lease_id=parent.lease_id, samples=[1, 2], num_tokens=6)
        branches = (await decoder.ask(fork=request)).fork.branches
        assert [ids(item.blocks)[0] for item in branches] == [ids(parent.blocks)[0]] * 2
        assert len({ids(parent.blocks)[1], *(ids(item.blocks)[1] for item in branches)}) == 3
        assert all(item.copy.num_tokens == 2 for item in branches)
        many = cache_pb2.ForkRequest(lease_id=parent.lease_id, samples=list(range(3, 20)), num_tokens=6)
        assert not (await decoder.ask(fork=many)).fork.branches
        assert await rig.is_sound()

    run(body)


@pytest.mark.parametrize("samples", [[], [1] * 257, [2**31]])
def test_malformed_fork_is_refused(samples):
    """A fork of no, too many or impossible samples is INVALID_ARGUMENT."""

    async def body(rig):
        decoder = await rig.attach()
        request = cache_pb2.ForkRequest(lease_id=1, samples=samples, num_tokens=1)
        failed(await decoder.ask(fork=request), "INVALID_ARGUMENT", "fork.samples")

    run(body)


def test_sessions_cannot_touch_each_others_leases():
    """A lease of another session is unknown to this one: to its reports and to its forks."""

    async def body(rig):
        owner, thief, grant = await rig.attach(name="d0"), await rig.attach(name="d1"), await rig.grant()
        lease = await compute(owner, grant, PROMPT, release=False)
        done = await thief.ask(report=report_request({"lease_id": lease.lease_id, "release": True}))
        assert [item.lease_id for item in done.report.refusals] == [lease.lease_id]
        answer = await thief.ask(fork=cache_pb2.ForkRequest(lease_id=lease.lease_id, samples=[1], num_tokens=4))
        failed(answer, "NOT_FOUND")
        assert (await rig.snapshot()).leases == 1
        done = await owner.ask(report=report_request({"lease_id": lease.lease_id, "release": True}))
        assert not done.report.refusals

    run(body)


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


@pytest.mark.parametrize("secret", [None, "", "wrong", "x" * 600])
def test_internal_services_are_refused_without_the_internal_credential(secret):
    """No, an empty, a wrong and a huge credential are UNAUTHENTICATED on every internal method; health is open."""

    async def body(rig):
        channel = await rig.channel(rig.paths.cachemgr_socket, secret)
        for method in ("/tessera.cache.v1.CacheService/Session", "/tessera.cache.v1.CredentialService/Authenticate"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method)(b"")
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        await rig.grant()

    run(body)


def test_admin_credential_opens_no_internal_service():
    """Each socket has a credential of its own."""

    async def body(rig):
        channel = await rig.channel(rig.paths.cachemgr_socket, rig.paths.admin_key.read_text().strip())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/tessera.cache.v1.CredentialService/Authenticate")(b"")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    run(body)


def test_grants_outlive_a_restart_of_the_daemon():
    """A grant of the daemon before the restart leases in the next one, whose epoch is higher."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        kept = []

        async def first(rig):
            kept.append(await rig.grant())

        async def second(rig):
            await compute(await rig.attach(), kept[0], PROMPT)
            assert (await rig.snapshot()).epoch == 2

        run(first, state_dir=Path(folder))
        run(second, state_dir=Path(folder))
