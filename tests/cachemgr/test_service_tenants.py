"""Whose blocks and whose leases: sharing by tenant and key, grants and what they outlive, the sockets' credentials."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import grpc
import pytest

from cachemgr.clocks import Clocks
from cachemgr.grants import GRANT_VALIDITY_NS
from common.interceptors import error_from_rpc
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tessera.common.v1 import common_pb2
from tests.cachemgr.daemon_rig import KEY, acquire_request, ids
from tests.cachemgr.rig import eventually_async
from tests.cachemgr.service_rig import PROMPT, compute, failed, run


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
