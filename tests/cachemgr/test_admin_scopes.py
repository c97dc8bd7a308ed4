"""Groups and approved prefixes over the admin RPC: made, listed, changed, ended; refused where they must be."""

from __future__ import annotations

import pytest

from tessera.admin.v1 import admin_pb2
from tessera.common.v1 import common_pb2
from tests.cachemgr.admin_rig import (
    INVALID,
    MISSING,
    TAKEN,
    audit_lines,
    cached_tokens,
    fill,
    refused,
    run,
    tenant_grant,
)
from tests.cachemgr.daemon_rig import acquire_request

PROMPT = list(range(1, 13))


def outcomes(rig, method):
    return [line["outcome"] for line in audit_lines(rig) if line["method"] == method]


async def groups(rig):
    return (await rig.admin.ListGroups(admin_pb2.ListGroupsRequest())).groups


def prefix(scope, num_tokens, group=""):
    return common_pb2.ScopePrefix(scope=scope, num_tokens=num_tokens, group=group)


def test_life_of_a_group():
    """Created with members, changed, listed, shown at the tenant, deleted; each step is written down."""

    async def body(rig):
        for name in ("acme", "blue"):
            await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant=name))
        create = admin_pb2.CreateGroupRequest(group="team", tenants=["acme", "default"])
        await rig.admin.CreateGroup(create)
        await refused(rig.admin.CreateGroup(create), TAKEN)
        (shown,) = await groups(rig)
        assert (shown.group, list(shown.tenants)) == ("team", ["acme", "default"])
        assert shown.created_unix_seconds > 1e9
        await rig.admin.UpdateGroup(
            admin_pb2.UpdateGroupRequest(group="team", add_tenants=["blue"], remove_tenants=["acme"])
        )
        (shown,) = await groups(rig)
        assert list(shown.tenants) == ["blue", "default"]
        listed = (await rig.admin.ListTenants(admin_pb2.ListTenantsRequest())).tenants
        shown = {item.tenant: list(item.groups) for item in listed}
        assert shown == {"acme": [], "blue": ["team"], "default": ["team"]}
        await rig.admin.DeleteGroup(admin_pb2.DeleteGroupRequest(group="team"))
        assert not await groups(rig)
        assert outcomes(rig, "CreateGroup") == ["OK", "ALREADY_EXISTS"]
        assert outcomes(rig, "UpdateGroup") == outcomes(rig, "DeleteGroup") == ["OK"]

    run(body)


def test_groups_page_by_name():
    """Pages of any size join to the whole; bad sizes and tokens name their field."""

    async def body(rig):
        for number in range(5):
            await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group=f"g{number}"))
            request = admin_pb2.ApprovePrefixRequest(name=f"p{number}", token_ids=[number])
            await rig.admin.ApprovePrefix(request)
        for method, request, field, key in (
            (rig.admin.ListGroups, admin_pb2.ListGroupsRequest, "groups", "group"),
            (rig.admin.ListApprovedPrefixes, admin_pb2.ListApprovedPrefixesRequest, "prefixes", "name"),
        ):
            whole = [getattr(item, key) for item in getattr(await method(request()), field)]
            assert len(whole) == 5
            for size in (1, 2, 5, 6):
                found, token = [], ""
                for _ in range(6):
                    answer = await method(request(page_size=size, page_token=token))
                    found += [getattr(item, key) for item in getattr(answer, field)]
                    token = answer.next_page_token
                    if not token:
                        break
                assert found == whole
            for bad, name in ((request(page_size=1001), "page_size"), (request(page_token="A b"), "page_token")):
                assert (await refused(method(bad), INVALID)).field == name

    run(body)


def test_bad_groups_are_refused():
    """Names and members that cannot be name their field; unknown groups and members are NOT_FOUND; nothing changes."""

    async def body(rig):
        for name in ("", "A", "a b", "x" * 65):
            error = await refused(rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group=name)), INVALID)
            assert error.field == "group"
        request = admin_pb2.CreateGroupRequest(group="team", tenants=["No Name"])
        assert (await refused(rig.admin.CreateGroup(request), INVALID)).field == "tenants"
        await refused(rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["nobody"])), MISSING)
        assert not await groups(rig)
        await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team"))
        update = admin_pb2.UpdateGroupRequest
        for request, field in (
            (update(group="team"), "add_tenants"),
            (update(group="team", add_tenants=["A"]), "add_tenants"),
            (update(group="team", remove_tenants=["A"]), "remove_tenants"),
            (update(group="team", add_tenants=["default"], remove_tenants=["default"]), "remove_tenants"),
            (update(group="A", add_tenants=["default"]), "group"),
        ):
            assert (await refused(rig.admin.UpdateGroup(request), INVALID)).field == field
        await refused(rig.admin.UpdateGroup(update(group="none", add_tenants=["default"])), MISSING)
        await refused(rig.admin.UpdateGroup(update(group="team", add_tenants=["nobody"])), MISSING)
        await rig.admin.UpdateGroup(update(group="team", remove_tenants=["default"]))  # not a member: harmless
        await refused(rig.admin.DeleteGroup(admin_pb2.DeleteGroupRequest(group="none")), MISSING)
        assert (await refused(rig.admin.DeleteGroup(admin_pb2.DeleteGroupRequest(group="")), INVALID)).field == "group"

    run(body)


def test_members_share_a_group_and_a_deleted_group_shares_nothing():
    """A member finds what another member computed; who was removed is refused; deletion drops blocks and tails."""

    async def body(rig):
        grants = {name: await tenant_grant(rig, name) for name in ("acme", "blue", "cyan")}
        await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["acme", "blue"]))
        decoder = await rig.attach()
        wide = {"prefix": prefix(common_pb2.SCOPE_GROUP, 8, "team")}
        await fill(rig, decoder, PROMPT, grant=grants["acme"], **wide)
        assert await cached_tokens(rig, decoder, PROMPT, grant=grants["blue"], **wide) == 8
        failure = (await decoder.ask(acquire=acquire_request(grants["cyan"], PROMPT, **wide))).failure
        assert failure.reason == "SCOPE_DENIED"
        await rig.admin.UpdateGroup(admin_pb2.UpdateGroupRequest(group="team", remove_tenants=["blue"]))
        failure = (await decoder.ask(acquire=acquire_request(grants["blue"], PROMPT, **wide))).failure
        assert failure.reason == "SCOPE_DENIED"
        done = await rig.admin.DeleteGroup(admin_pb2.DeleteGroupRequest(group="team"))
        assert done.evicted_blocks >= 2
        assert (await rig.snapshot()).indexed_blocks == 0
        await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["acme"]))
        assert await cached_tokens(rig, decoder, PROMPT, grant=grants["acme"], **wide) == 0
        assert await rig.is_sound()

    run(body)


def test_approved_prefix_is_shared_until_it_is_withdrawn():
    """Exactly the approved tokens are public; after the withdrawal they are refused, and their blocks are gone."""

    async def body(rig):
        grants = {name: await tenant_grant(rig, name) for name in ("acme", "blue")}
        decoder = await rig.attach()
        wide = {"prefix": prefix(common_pb2.SCOPE_PUBLIC, 8)}
        failure = (await decoder.ask(acquire=acquire_request(grants["acme"], PROMPT, **wide))).failure
        assert failure.reason == "PREFIX_NOT_APPROVED"
        approve = admin_pb2.ApprovePrefixRequest(name="system", token_ids=PROMPT[:8])
        for _ in range(2):  # repeating it is harmless
            assert (await rig.admin.ApprovePrefix(approve)).num_tokens == 8
        await fill(rig, decoder, PROMPT, grant=grants["acme"], **wide)
        assert await cached_tokens(rig, decoder, PROMPT, grant=grants["blue"], **wide) == 8
        (shown,) = (await rig.admin.ListApprovedPrefixes(admin_pb2.ListApprovedPrefixesRequest())).prefixes
        assert (shown.name, shown.num_tokens) == ("system", 8)
        done = await rig.admin.WithdrawPrefix(admin_pb2.WithdrawPrefixRequest(name="system"))
        assert done.evicted_blocks >= 2
        for grant in grants.values():
            failure = (await decoder.ask(acquire=acquire_request(grant, PROMPT, **wide))).failure
            assert failure.reason == "PREFIX_NOT_APPROVED"
        assert (await rig.snapshot()).indexed_blocks == 0
        assert await rig.is_sound()
        lines = [line for line in audit_lines(rig) if line["method"] == "ApprovePrefix"]
        assert [line["fields"] for line in lines] == [{"name": "system", "num_token_ids": 8}] * 2

    run(body)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "No Name"}, "name"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids[1]"),
        ({"token_ids": [2**31]}, "token_ids[0]"),
    ],
)
def test_bad_approvals_are_refused_by_field(fields, field):
    """Names and tokens that cannot be; the same name for other tokens is taken; an unknown one is NOT_FOUND."""

    async def body(rig):
        request = admin_pb2.ApprovePrefixRequest(**{"name": "system", "token_ids": [1, 2], **fields})
        assert (await refused(rig.admin.ApprovePrefix(request), INVALID)).field == field
        assert not (await rig.admin.ListApprovedPrefixes(admin_pb2.ListApprovedPrefixesRequest())).prefixes
        await rig.admin.ApprovePrefix(admin_pb2.ApprovePrefixRequest(name="system", token_ids=[1, 2]))
        await refused(rig.admin.ApprovePrefix(admin_pb2.ApprovePrefixRequest(name="system", token_ids=[1])), TAKEN)
        await refused(rig.admin.WithdrawPrefix(admin_pb2.WithdrawPrefixRequest(name="none")), MISSING)
        request = admin_pb2.WithdrawPrefixRequest(name="")
        assert (await refused(rig.admin.WithdrawPrefix(request), INVALID)).field == "name"
        assert outcomes(rig, "WithdrawPrefix") == ["NOT_FOUND", "INVALID_ARGUMENT"]

    run(body)
