"""AdminService over its real socket: who may call, what it shows, what it refuses."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cachemgr.admin_listener import refuse_beyond_loopback
from common.errors import FailedPrecondition
from common.interceptors import error_from_rpc
from common.layout import NULL_BLOCK
from common.rpc import open_channel
from tessera.admin.v1 import admin_pb2, admin_pb2_grpc
from tessera.cache.v1 import cache_pb2
from tests.cachemgr.admin_rig import audit_lines
from tests.cachemgr.daemon_rig import BLOCKS, LAYOUT, acquire_request, attach_request, ids, report_request, running

METHODS = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods


def run(body, **options):
    async def inside():
        async with running(**options) as rig:
            await body(rig)

    asyncio.run(inside())


async def refused(call, code):
    """The typed error of a call that must fail with `code`."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value
    return error_from_rpc(caught.value)


async def reflected_methods(channel):
    """Every method of every service that reflection lists, as (full name, streams out)."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask(request):
        call = stub.ServerReflectionInfo(iter([request]))
        return await call.read()

    listed = await ask(reflection_pb2.ServerReflectionRequest(list_services=""))
    found = {}
    for service in listed.list_services_response.service:
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=service.name)
        for raw in (await ask(request)).file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            for item in file.service:
                if f"{file.package}.{item.name}" == service.name:
                    for method in item.method:
                        found[f"/{service.name}/{method.name}"] = method.server_streaming
    return found


ENDLESS = {"WatchEvents": admin_pb2.WatchEventsRequest(epoch=2**63)}
"""Streams that end by a refusal alone, and a message that is refused."""


async def call_raw(channel, method, streams):
    """Call a method with a small message, empty where it can be; the bytes of its first answer."""
    if streams:
        message = ENDLESS.get(method.rpartition("/")[2])
        # Its one message goes out with the call: where a server has ended a call already, gRPC 1.85 gives INTERNAL in
        # place of the server's status to who writes one later (grpc/grpc#36066).
        call = channel.unary_stream(method)(b"" if message is None else message.SerializeToString())
        return await call.read()
    return await channel.unary_unary(method)(b"")


@pytest.mark.parametrize("secret", [None, "", "wrong", "x" * 600, "internal", "tenant"])
def test_every_reflected_method_is_refused_without_the_admin_credential(secret):
    """Every listed method is UNAUTHENTICATED without the admin key, health apart; with the key it answers."""

    async def body(rig):
        with_key = await rig.channel(rig.paths.admin_socket, rig.paths.admin_key.read_text().strip())
        methods = await reflected_methods(with_key)
        assert {f"/tessera.admin.v1.AdminService/{item.name}" for item in METHODS} <= set(methods)
        named = {"internal": rig.paths.internal_key.read_text().strip(), "tenant": rig.default_key}
        stranger = await rig.channel(rig.paths.admin_socket, named.get(secret, secret))
        for method, streams in methods.items():
            if method.startswith("/grpc.health"):
                continue
            await refused(call_raw(stranger, method, streams), grpc.StatusCode.UNAUTHENTICATED)
            try:
                await call_raw(with_key, method, streams)
            except grpc.aio.AioRpcError as error:
                assert error.code() not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
        assert await call_raw(stranger, "/grpc.health.v1.Health/Check", False)

    run(body)


def test_two_credentials_at_once_are_refused():
    """A call that brings two authorizations is refused even if one is right."""

    async def body(rig):
        secret = rig.paths.admin_key.read_text().strip()
        channel = await rig.channel(rig.paths.admin_socket, secret)
        call = channel.unary_unary("/tessera.admin.v1.AdminService/GetSnapshot")
        await call(b"")
        await refused(call(b"", metadata=(("authorization", f"Bearer {secret}"),)), grpc.StatusCode.UNAUTHENTICATED)

    run(body)


def test_every_method_is_served():
    """No method of the contract answers UNIMPLEMENTED; one that it does not have does."""

    async def body(rig):
        channel = await rig.channel(rig.paths.admin_socket, rig.paths.admin_key.read_text().strip())
        for method in METHODS:
            name = f"/tessera.admin.v1.AdminService/{method.name}"
            try:
                await call_raw(channel, name, method.server_streaming)
            except grpc.aio.AioRpcError as error:
                assert error.code() is not grpc.StatusCode.UNIMPLEMENTED, method.name
        await refused(call_raw(channel, "/tessera.admin.v1.AdminService/None", False), grpc.StatusCode.UNIMPLEMENTED)

    run(body)


def test_before_the_first_decoder_everything_is_empty_and_sound():
    """Without a layout there are no blocks; every read works and shows nothing."""

    async def body(rig):
        now = await rig.snapshot()
        assert (now.total_blocks, now.block_tokens, now.block_bytes, now.epoch) == (0, 0, 0, 1)
        assert await rig.is_sound()
        assert not (await rig.admin.ListBlocks(admin_pb2.ListBlocksRequest())).blocks
        assert not (await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())).prefixes
        assert not (await rig.admin.ListLeases(admin_pb2.ListLeasesRequest())).leases
        assert not (await rig.admin.ListSessions(admin_pb2.ListSessionsRequest())).sessions
        assert (await rig.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(all=True))).evicted_blocks == 0
        request = admin_pb2.AbortRequestRequest(request_id="r1")
        await refused(rig.admin.AbortRequest(request), grpc.StatusCode.NOT_FOUND)

    run(body)


async def fill(rig, decoder, tokens, *, release=True, grant=None, request_id="r1"):
    """Compute a prompt; its lease."""
    request = acquire_request(grant or await rig.grant(), tokens, request_id=request_id)
    lease = (await decoder.ask(acquire=request)).acquire
    assert lease.lease_id
    done = {"lease_id": lease.lease_id, "sealed_tokens": len(tokens), "copied": True, "release": release}
    await decoder.ask(report=report_request(done))
    return lease


def test_snapshot_and_lists_agree():
    """Counts of the snapshot are those of the lists, while a lease is held and after."""

    async def body(rig):
        decoder = await rig.attach()
        await fill(rig, decoder, list(range(1, 9)))
        lease = await fill(rig, decoder, list(range(1, 15)), release=False, request_id="held")
        now = await rig.snapshot()
        assert (now.block_tokens, now.block_bytes, now.total_blocks) == (4, LAYOUT.block_bytes, BLOCKS)
        assert now.usable_blocks == now.free_blocks + now.cached_blocks
        blocks = (await rig.admin.ListBlocks(admin_pb2.ListBlocksRequest())).blocks
        assert [item.block for item in blocks] == list(range(1, BLOCKS + 1))
        assert NULL_BLOCK not in {item.block for item in blocks}
        by_state = {
            admin_pb2.BLOCK_STATE_FREE: now.free_blocks,
            admin_pb2.BLOCK_STATE_ACTIVE: now.active_blocks,
            admin_pb2.BLOCK_STATE_CACHED: now.cached_blocks,
            admin_pb2.BLOCK_STATE_QUARANTINED: now.quarantined_blocks,
        }
        for state, count in by_state.items():
            listed = await rig.admin.ListBlocks(admin_pb2.ListBlocksRequest(state=state))
            assert len(listed.blocks) == count
            assert {item.state for item in listed.blocks} <= {state}
        assert {item.tenant for item in blocks} <= {"", "default"}
        (shown,) = (await rig.admin.ListLeases(admin_pb2.ListLeasesRequest())).leases
        assert (shown.lease, shown.request_id, shown.tenant, shown.num_tokens) == (
            lease.lease_id,
            "held",
            "default",
            14,
        )
        assert list(shown.blocks) == ids(lease.blocks)
        prefixes = (await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())).prefixes
        assert sum(len(item.blocks) for item in prefixes) == now.indexed_blocks
        nodes = {item.node for item in prefixes}
        assert all(item.parent == 0 or item.parent in nodes for item in prefixes)
        (session,) = (await rig.admin.ListSessions(admin_pb2.ListSessionsRequest())).sessions
        assert (session.decoder_name, session.leases, session.mapped) == ("d0", 1, False)

    run(body)


def test_pages_join_to_the_whole():
    """Pages of any size follow each other without gap or repetition and end with an empty token."""

    async def body(rig):
        decoder = await rig.attach()
        for number in range(5):
            await fill(rig, decoder, [number + 1] * 4, request_id=f"r{number}")
            await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant=f"t{number}"))
        for number in range(3):
            await rig.attach(name=f"d{number + 1}")
            await fill(rig, decoder, [50 + number] * 3, release=False, request_id=f"held{number}")

        async def pages(method, request, field, size):
            found, token = [], ""
            for _ in range(100):
                answer = await method(request(page_size=size, page_token=token))
                items = list(getattr(answer, field))
                assert len(items) <= size
                found += items
                token = answer.next_page_token
                if not token:
                    return found
            raise AssertionError("the pages do not end")

        for method, request, field, key, count in (
            (rig.admin.ListBlocks, admin_pb2.ListBlocksRequest, "blocks", "block", BLOCKS),
            (rig.admin.ListPrefixes, admin_pb2.ListPrefixesRequest, "prefixes", "node", None),
            (rig.admin.ListLeases, admin_pb2.ListLeasesRequest, "leases", "lease", 3),
            (rig.admin.ListSessions, admin_pb2.ListSessionsRequest, "sessions", "session", 4),
            (rig.admin.ListTenants, admin_pb2.ListTenantsRequest, "tenants", "tenant", 6),
        ):
            whole = [getattr(item, key) for item in await pages(method, request, field, 1000)]
            assert count is None or len(whole) == count
            assert len(whole) >= 3
            for size in (1, 2, len(whole), len(whole) + 1):
                assert [getattr(item, key) for item in await pages(method, request, field, size)] == whole

    run(body)


@pytest.mark.parametrize("name", ["ListBlocks", "ListPrefixes", "ListLeases", "ListSessions", "ListTenants"])
def test_bad_pages_are_refused_by_field(name):
    """Sizes outside 0..1000 and tokens that are none of ours name their field; zero and empty work."""

    async def body(rig):
        await rig.attach()
        method, request = getattr(rig.admin, name), getattr(admin_pb2, f"{name}Request")
        await method(request())
        await method(request(page_size=1000))
        for size in (-1, 1001, 2**31 - 1, -(2**31)):
            error = await refused(method(request(page_size=size)), grpc.StatusCode.INVALID_ARGUMENT)
            assert error.field == "page_size"
        for token in ("-1", "1.5", "x y", "9" * 300, "\u0663", "x" * 100_000):
            error = await refused(method(request(page_token=token)), grpc.StatusCode.INVALID_ARGUMENT)
            assert error.field == "page_token"

    run(body)


def test_unknown_states_and_tenants_in_filters_are_refused():
    """A filter that cannot match anything is an error and not an empty answer."""

    async def body(rig):
        await rig.attach()
        request = admin_pb2.ListBlocksRequest(state=77)
        assert (await refused(rig.admin.ListBlocks(request), grpc.StatusCode.INVALID_ARGUMENT)).field == "state"
        request = admin_pb2.ListPrefixesRequest(tenant="nobody")
        await refused(rig.admin.ListPrefixes(request), grpc.StatusCode.NOT_FOUND)
        request = admin_pb2.ListPrefixesRequest(tenant="No Name")
        await refused(rig.admin.ListPrefixes(request), grpc.StatusCode.INVALID_ARGUMENT)
        await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest(tenant="default"))

    run(body)


def test_evicting_all_is_refused_while_blocks_are_in_use_and_drops_nothing():
    """With a lease held, evict-all is FAILED_PRECONDITION with numbers and drops nothing; afterwards it is done."""

    async def body(rig):
        decoder = await rig.attach()
        await fill(rig, decoder, list(range(1, 9)))
        lease = await fill(rig, decoder, list(range(20, 28)), release=False)
        before = await rig.snapshot()
        everything = admin_pb2.EvictBlocksRequest(all=True)
        error = await refused(rig.admin.EvictBlocks(everything), grpc.StatusCode.FAILED_PRECONDITION)
        assert error.message.startswith("1 leases hold 2 blocks")
        assert error.metadata["indexed_blocks"] == "4"
        assert (await rig.snapshot()).indexed_blocks == before.indexed_blocks == 4
        await decoder.ask(report=report_request({"lease_id": lease.lease_id, "release": True}))
        done = await rig.admin.EvictBlocks(everything)
        assert (done.evicted_blocks, done.remaining_blocks) == (4, 0)
        assert not (await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())).prefixes
        assert (await rig.snapshot()).free_blocks == BLOCKS

    run(body)


def test_evicting_by_number_and_by_tenant():
    """A number drops at most that many; a tenant drops its own and leaves others whole."""

    async def body(rig):
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="other"))
        key = (await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="other"))).key
        decoder = await rig.attach()
        await fill(rig, decoder, list(range(1, 13)))
        await fill(rig, decoder, list(range(1, 9)), grant=await rig.grant(key))
        done = await rig.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(num_blocks=1))
        assert (done.evicted_blocks, done.remaining_blocks) == (1, 4)
        done = await rig.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(tenant="other"))
        assert (done.evicted_blocks, done.remaining_blocks) == (2, 0)
        done = await rig.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(tenant="default", num_blocks=1))
        assert (done.evicted_blocks, done.remaining_blocks) == (1, 1)
        assert await rig.is_sound()

    run(body)


def test_what_remains_of_a_tenant_with_gaps_is_counted():
    """Where layers have a window, an evicted head is no remaining block, though the node that had it is there."""

    async def body(rig):
        decoder = await rig.session()
        assert (await decoder.ask(attach=attach_request(window_tokens=5))).HasField("attach")
        await fill(rig, decoder, list(range(1, 25)))
        done = await rig.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(tenant="default", num_blocks=4))
        assert (done.evicted_blocks, done.remaining_blocks) == (4, 2)
        (node,) = (await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())).prefixes
        assert (list(node.blocks).count(NULL_BLOCK), len(node.blocks)) == (4, 6)
        assert await rig.is_sound()

    run(body)


def test_ambiguous_evictions_are_refused():
    """Nothing asked, and all together with something else, are INVALID_ARGUMENT; an unknown tenant is NOT_FOUND."""

    async def body(rig):
        await rig.attach()
        for request in (
            admin_pb2.EvictBlocksRequest(),
            admin_pb2.EvictBlocksRequest(all=True, num_blocks=1),
            admin_pb2.EvictBlocksRequest(all=True, tenant="default"),
        ):
            await refused(rig.admin.EvictBlocks(request), grpc.StatusCode.INVALID_ARGUMENT)
        request = admin_pb2.EvictBlocksRequest(tenant="nobody")
        await refused(rig.admin.EvictBlocks(request), grpc.StatusCode.NOT_FOUND)
        request = admin_pb2.EvictBlocksRequest(num_blocks=2**64 - 1)
        assert (await rig.admin.EvictBlocks(request)).evicted_blocks == 0

    run(body)


def test_evictions_and_aborts_are_written_down():
    """Done, refused and not found: one line each, with what was asked and how it ended."""

    async def body(rig):
        decoder = await rig.attach()
        await fill(rig, decoder, list(range(1, 9)))
        await rig.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(tenant="default", num_blocks=1))
        await refused(rig.admin.EvictBlocks(admin_pb2.EvictBlocksRequest()), grpc.StatusCode.INVALID_ARGUMENT)
        aborting = rig.admin.AbortRequest(admin_pb2.AbortRequestRequest(request_id="r1"))
        push = await decoder.push()
        await decoder.ask(abort_result=cache_pb2.AbortResult(abort_id=push.abort.abort_id, found=True))
        await aborting
        shown = [(line["method"], line["fields"], line["outcome"], line.get("result")) for line in audit_lines(rig)]
        assert shown == [
            (
                "EvictBlocks",
                {"tenant": "default", "num_blocks": 1},
                "OK",
                {"evicted_blocks": 1, "remaining_blocks": 1},
            ),
            ("EvictBlocks", {}, "INVALID_ARGUMENT", None),
            ("AbortRequest", {"request_id": "r1"}, "OK", None),
        ]

    run(body)


@pytest.mark.parametrize("request_id", ["", "x" * 129])
def test_impossible_request_ids_are_refused(request_id):
    """An abort of no or an endless id is INVALID_ARGUMENT."""

    async def body(rig):
        request = admin_pb2.AbortRequestRequest(request_id=request_id)
        assert (await refused(rig.admin.AbortRequest(request), grpc.StatusCode.INVALID_ARGUMENT)).field == "request_id"

    run(body)


def test_life_of_a_tenant_and_its_keys():
    """Create, authenticate, list, revoke: each step shows in the next, and the secret of a key in none."""

    async def body(rig):
        create = admin_pb2.CreateTenantRequest(tenant="acme")
        assert (await rig.admin.CreateTenant(create)).tenant == "acme"
        await refused(rig.admin.CreateTenant(create), grpc.StatusCode.ALREADY_EXISTS)
        made = await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="acme", name="ci", ttl_seconds=1000))
        assert await rig.grant(made.key)
        listed = await rig.admin.ListTenants(admin_pb2.ListTenantsRequest())
        assert [item.tenant for item in listed.tenants] == ["acme", "default"]
        (key,) = listed.tenants[0].keys
        assert (key.key_id, key.name, key.revoked) == (made.key_id, "ci", False)
        assert key.expires_unix_seconds == pytest.approx(key.created_unix_seconds + 1000)
        assert key.last_used_unix_seconds >= key.created_unix_seconds > 1e9
        assert made.key.split("_", 2)[2].encode() not in listed.SerializeToString()
        for _ in range(2):  # repeating it is harmless
            await rig.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id=made.key_id))
        await refused(rig.grant(made.key), grpc.StatusCode.UNAUTHENTICATED)
        listed = await rig.admin.ListTenants(admin_pb2.ListTenantsRequest())
        assert listed.tenants[0].keys[0].revoked
        assert await rig.grant()

    run(body)


def test_bad_tenants_and_keys_are_refused():
    """Names, ttls and ids that cannot be are refused by field; unknown ones are NOT_FOUND."""

    async def body(rig):
        invalid, missing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
        for name in ("", "A", "../x", "a" * 65, "a b"):
            request = admin_pb2.CreateTenantRequest(tenant=name)
            assert (await refused(rig.admin.CreateTenant(request), invalid)).field == "tenant"
        for ttl in (0.0, -1.0, float("nan"), float("inf")):
            request = admin_pb2.CreateKeyRequest(tenant="default", ttl_seconds=ttl)
            assert (await refused(rig.admin.CreateKey(request), invalid)).field == "ttl_seconds"
        request = admin_pb2.CreateKeyRequest(tenant="default", name="x" * 65)
        assert (await refused(rig.admin.CreateKey(request), invalid)).field == "name"
        await refused(rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="nobody")), missing)
        await refused(rig.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id="0" * 16)), missing)
        await refused(rig.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id="")), invalid)

    run(body)


def test_admin_on_loopback_tcp_asks_for_the_same_credential():
    """The optional TCP listener serves the admin key and refuses others."""

    async def body(rig):
        target = f"127.0.0.1:{rig.daemon.admin_port}"
        for secret, allowed in ((rig.paths.admin_key.read_text().strip(), True), ("wrong", False)):
            async with open_channel(target, secret) as channel:
                call = admin_pb2_grpc.AdminServiceStub(channel).GetSnapshot(admin_pb2.GetSnapshotRequest())
                if allowed:
                    assert (await call).epoch == 1
                else:
                    await refused(call, grpc.StatusCode.UNAUTHENTICATED)

    run(body, admin_listen="127.0.0.1:0")


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "127.0.0.1", ":1", "127.0.0.1:x"]
)
def test_admin_listener_beyond_loopback_is_refused(listen):
    """Only a loopback HOST:PORT is taken, because the admin listener has no TLS."""
    with pytest.raises(FailedPrecondition, match="--admin-listen"):
        refuse_beyond_loopback(listen)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.1.2.3:65535", "[::1]:50052", "localhost:1"])
def test_admin_listener_on_loopback_is_taken(listen):
    """Every form of loopback is allowed."""
    refuse_beyond_loopback(listen)
