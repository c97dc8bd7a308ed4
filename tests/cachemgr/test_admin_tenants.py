"""Tenants over the admin RPC: quotas, rotation and deletion, and what is left of a tenant afterwards."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tests.cachemgr.admin_rig import (
    INVALID,
    MISSING,
    audit_lines,
    cached_tokens,
    fill,
    refused,
    run,
    tenant_grant,
)
from tests.cachemgr.daemon_rig import BLOCKS, acquire_request, ids, report_request, running
from tests.cachemgr.rig import eventually_async

PROMPT = list(range(1, 9))
UNAUTHENTICATED = int(grpc.StatusCode.UNAUTHENTICATED.value[0])


async def tenant(rig, name):
    listed = await rig.admin.ListTenants(admin_pb2.ListTenantsRequest())
    return next((item for item in listed.tenants if item.tenant == name), None)


def outcomes(rig, method):
    return [line["outcome"] for line in audit_lines(rig) if line["method"] == method]


def test_quota_is_kept_shown_and_set_in_the_core():
    """What is set shows in the list, holds in the core at once, and is there again after a restart."""

    async def body():
        async with running() as rig:
            grant = await tenant_grant(rig, "acme")
            decoder = await rig.attach()
            await rig.admin.UpdateTenant(
                admin_pb2.UpdateTenantRequest(tenant="acme", floor_blocks=1, ceiling_blocks=2, weight=2.5, pin_blocks=1)
            )
            shown = await tenant(rig, "acme")
            assert (shown.floor_blocks, shown.ceiling_blocks, shown.weight, shown.pin_blocks) == (1, 2, 2.5, 1)
            await fill(rig, decoder, PROMPT, grant=grant)
            failure = (await decoder.ask(acquire=acquire_request(grant, list(range(20, 32))))).failure
            assert failure.reason == "QUOTA_EXCEEDED"
            await rig.admin.UpdateTenant(admin_pb2.UpdateTenantRequest(tenant="acme", ceiling_blocks=0))
            assert (await decoder.ask(acquire=acquire_request(grant, list(range(20, 32))))).acquire.lease_id
            usage = next(item for item in (await rig.snapshot()).tenants if item.tenant == "acme")
            assert (usage.floor_blocks, usage.ceiling_blocks, usage.weight) == (1, 0, 2.5)
            assert usage.used_blocks == usage.active_blocks + usage.cached_blocks > 0
            assert outcomes(rig, "UpdateTenant") == ["OK", "OK"]

    asyncio.run(body())


def test_quotas_hold_after_a_restart_from_the_first_attach(tmp_path_factory):
    """A later daemon gives the core every tenant's quota before the first lease."""
    folder = tmp_path_factory.mktemp("s")

    async def body():
        async with running(state_dir=folder) as rig:
            await rig.admin.UpdateTenant(admin_pb2.UpdateTenantRequest(tenant="default", ceiling_blocks=1))
        async with running(state_dir=folder) as rig:
            decoder = await rig.attach()
            failure = (await decoder.ask(acquire=acquire_request(await rig.grant(), PROMPT))).failure
            assert failure.reason == "QUOTA_EXCEEDED"
            assert await cached_tokens(rig, decoder, [1, 2, 3]) == 0  # positive control: one block is allowed

    asyncio.run(body())


def test_floor_that_the_pool_is_too_small_for_does_not_stop_a_decoder(tmp_path_factory):
    """A pool that has become smaller than the floors serves all the same."""
    folder = tmp_path_factory.mktemp("s")

    async def body():
        async with running(state_dir=folder) as rig:
            request = admin_pb2.UpdateTenantRequest(tenant="default", floor_blocks=BLOCKS * 100)
            await rig.admin.UpdateTenant(request)  # no decoder has attached: the size is not known
        async with running(state_dir=folder) as rig:
            decoder = await rig.attach()
            await fill(rig, decoder, PROMPT)
            assert await rig.is_sound()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tenant": ""}, "tenant"),
        ({"tenant": "No Name"}, "tenant"),
        ({"weight": 0.0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"floor_blocks": 2**64 - 1}, "floor_blocks"),
        ({"ceiling_blocks": 2**31}, "ceiling_blocks"),
        ({"pin_blocks": 2**40}, "pin_blocks"),
        ({"floor_blocks": 4, "ceiling_blocks": 3}, "floor_blocks"),
    ],
)
def test_bad_quotas_are_refused_by_field(fields, field):
    """Each number has its bounds; what is refused changes nothing and is in the audit log."""

    async def body(rig):
        before = await tenant(rig, "default")
        request = admin_pb2.UpdateTenantRequest(**{"tenant": "default", **fields})
        assert (await refused(rig.admin.UpdateTenant(request), INVALID)).field == field
        assert await tenant(rig, "default") == before
        assert outcomes(rig, "UpdateTenant") == ["INVALID_ARGUMENT"]

    run(body)


def test_floor_beyond_what_others_leave_is_refused_with_numbers():
    """RESOURCE_EXHAUSTED says what was asked for and what the other floors leave."""

    async def body(rig):
        await rig.attach()
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="acme"))
        await rig.admin.UpdateTenant(admin_pb2.UpdateTenantRequest(tenant="acme", floor_blocks=5))
        request = admin_pb2.UpdateTenantRequest(tenant="default", floor_blocks=BLOCKS - 4)
        error = await refused(rig.admin.UpdateTenant(request), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert error.reason == "FLOORS_EXCEED_POOL"
        assert (error.needed, error.usable) == (BLOCKS - 4, BLOCKS - 5)
        assert (await tenant(rig, "default")).floor_blocks == 0
        await rig.admin.UpdateTenant(admin_pb2.UpdateTenantRequest(tenant="default", floor_blocks=BLOCKS - 5))

    run(body)


@pytest.mark.parametrize("method", ["UpdateTenant", "DeleteTenant", "RotateTenantSecret"])
def test_unknown_and_impossible_tenants_are_refused(method):
    """NOT_FOUND for a name that nobody has, the field for one that nobody can have."""

    async def body(rig):
        call, request = getattr(rig.admin, method), getattr(admin_pb2, f"{method}Request")
        await refused(call(request(tenant="nobody")), MISSING)
        for name in ("", "A", "@public", "@group:a", "x" * 65):
            assert (await refused(call(request(tenant=name)), INVALID)).field == "tenant"
        assert outcomes(rig, method) == ["NOT_FOUND"] + ["INVALID_ARGUMENT"] * 5

    run(body)


def test_rotation_makes_the_tree_unreachable_and_lets_running_requests_end():
    """Nothing of before is found again, also not what a running request computes on; other tenants keep theirs."""

    async def body(rig):
        grant = await tenant_grant(rig, "acme")
        decoder = await rig.attach()
        await fill(rig, decoder, PROMPT, grant=grant)
        await fill(rig, decoder, PROMPT)
        running_lease = await fill(rig, decoder, list(range(50, 58)), grant=grant, release=False, request_id="runs")
        assert await cached_tokens(rig, decoder, PROMPT, grant=grant) == 7  # positive control
        done = await rig.admin.RotateTenantSecret(admin_pb2.RotateTenantSecretRequest(tenant="acme"))
        assert done.evicted_blocks == 4
        assert not (await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest(tenant="acme"))).prefixes
        ended = {"lease_id": running_lease.lease_id, "sealed_tokens": 8, "release": True}
        assert not (await decoder.ask(report=report_request(ended))).report.refusals
        for prompt in (PROMPT, list(range(50, 58))):
            assert await cached_tokens(rig, decoder, prompt, grant=grant) == 0
        assert await cached_tokens(rig, decoder, PROMPT) == 7
        await fill(rig, decoder, PROMPT, grant=grant)
        assert await cached_tokens(rig, decoder, PROMPT, grant=grant) == 7  # the new tree works
        assert await rig.is_sound()
        assert outcomes(rig, "RotateTenantSecret") == ["OK"]

    run(body)


def test_deleted_tenant_ends_with_its_keys_requests_and_blocks():
    """Keys and grants end at once, running requests are aborted, blocks are dropped and free once they are let go, and
    whoever gets them next is told to zero them first."""

    async def body(rig):
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="acme"))
        key = (await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="acme"))).key
        grant = await rig.grant(key)
        decoder = await rig.attach()
        await fill(rig, decoder, PROMPT, grant=grant)
        await fill(rig, decoder, PROMPT)
        lease = await fill(rig, decoder, list(range(50, 58)), grant=grant, release=False, request_id="runs")
        deleting = rig.admin.DeleteTenant(admin_pb2.DeleteTenantRequest(tenant="acme"))
        push = await decoder.push()
        assert push.abort.request_id == "runs"
        await decoder.ask(abort_result=cache_pb2.AbortResult(abort_id=push.abort.abort_id, found=True))
        assert (await deleting).evicted_blocks == 4
        assert await tenant(rig, "acme") is None
        await refused(rig.grant(key), grpc.StatusCode.UNAUTHENTICATED)
        for fields in ({}, {"resumed": True}):
            failure = (await decoder.ask(acquire=acquire_request(grant, PROMPT, **fields))).failure
            assert failure.code == UNAUTHENTICATED
        assert {item.tenant for item in (await rig.snapshot()).tenants} == {"acme", "default"}  # it holds blocks still
        await decoder.ask(report=report_request({"lease_id": lease.lease_id, "release": True, "sealed_tokens": 8}))
        now = await rig.snapshot()
        assert {item.tenant for item in now.tenants} == {"default"}
        assert now.indexed_blocks == 2  # those of the other tenant
        assert now.free_blocks + now.cached_blocks == now.total_blocks
        wanted = await decoder.ask(acquire=acquire_request(await rig.grant(), list(range(80, 100))))
        assert set(ids(lease.blocks)) & set(ids(wanted.acquire.blocks))  # some of them were the tenant's
        assert set(ids(lease.blocks)) & set(ids(wanted.acquire.blocks)) <= set(ids(wanted.scrub))
        assert await cached_tokens(rig, decoder, PROMPT) == 7
        assert await rig.is_sound()
        assert outcomes(rig, "DeleteTenant") == ["OK"]

    run(body)


def test_tenant_made_again_begins_with_nothing():
    """The same name is another tenant: no block, no key, no quota of the one before."""

    async def body(rig):
        grant = await tenant_grant(rig, "acme")
        decoder = await rig.attach()
        await rig.admin.UpdateTenant(admin_pb2.UpdateTenantRequest(tenant="acme", floor_blocks=2, ceiling_blocks=2))
        await fill(rig, decoder, PROMPT, grant=grant)
        await rig.admin.DeleteTenant(admin_pb2.DeleteTenantRequest(tenant="acme"))
        fresh = await tenant_grant(rig, "acme")
        assert await cached_tokens(rig, decoder, PROMPT, grant=fresh) == 0
        assert (await decoder.ask(acquire=acquire_request(grant, PROMPT))).failure.code == UNAUTHENTICATED
        shown = await tenant(rig, "acme")
        assert (shown.floor_blocks, shown.ceiling_blocks, len(shown.keys)) == (0, 0, 1)
        assert (await decoder.ask(acquire=acquire_request(fresh, list(range(20, 32))))).acquire.lease_id

    run(body)


def test_default_tenant_can_be_deleted_and_stays_deleted(tmp_path_factory):
    """A later start does not make it anew from the key file that is still there."""
    folder = tmp_path_factory.mktemp("s")

    async def body():
        async with running(state_dir=folder) as rig:
            await rig.admin.DeleteTenant(admin_pb2.DeleteTenantRequest(tenant="default"))
            await refused(rig.grant(), grpc.StatusCode.UNAUTHENTICATED)
        async with running(state_dir=folder) as rig:
            await refused(rig.grant(), grpc.StatusCode.UNAUTHENTICATED)
            assert await tenant(rig, "default") is None

    asyncio.run(body())


def test_revoked_key_is_refused_at_once_by_grant_and_by_key():
    """After the answer no new authentication and no new lease is made with it; what ran may come to its end."""

    async def body(rig):
        made = await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="default"))
        grant = await rig.grant(made.key)
        decoder = await rig.attach()
        lease = await fill(rig, decoder, PROMPT, grant=grant, release=False)
        await rig.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id=made.key_id))
        await refused(rig.grant(made.key), grpc.StatusCode.UNAUTHENTICATED)
        assert (await decoder.ask(acquire=acquire_request(grant, PROMPT))).failure.code == UNAUTHENTICATED
        ended = {"lease_id": lease.lease_id, "sealed_tokens": 8, "release": True}
        assert not (await decoder.ask(report=report_request(ended))).report.refusals
        await eventually_async(rig.is_quiet)

    run(body)
