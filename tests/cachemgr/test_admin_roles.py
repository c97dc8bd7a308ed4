"""Two roles: readers see, operators change; both credentials are private files; who tried what is written down."""

from __future__ import annotations

import stat

import grpc
import pytest

from cachemgr.roles import changes
from common.rpc import open_channel
from tessera.admin.v1 import admin_pb2
from tests.cachemgr.admin_rig import DENIED, METHODS, audit_lines, fill, reader_of, refused, run

CHANGING = [item.name for item in METHODS if changes(f"/tessera.admin.v1.AdminService/{item.name}")]
READING = [item.name for item in METHODS if item.name not in CHANGING]


def test_every_method_is_one_or_the_other():
    """The methods that only look are these; whatever is new is an operator's until somebody decides otherwise."""
    assert set(READING) == {
        "GetSnapshot",
        "CheckIntegrity",
        "ListBlocks",
        "ListPrefixes",
        "ListLeases",
        "ListSessions",
        "ExplainPrefix",
        "ListPins",
        "ListTenants",
        "WatchEvents",
        "ListGroups",
        "ListApprovedPrefixes",
        "ListBranches",
        "GetHitRateLimits",
    }
    assert not changes("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    assert changes("/tessera.admin.v1.AdminService/NewAndUnknown")


def test_both_credentials_are_private_and_differ():
    """Made at the first start, 0600, not the same."""

    async def body(rig):
        for path in (rig.paths.admin_key, rig.paths.reader_key):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert rig.paths.admin_key.read_text() != rig.paths.reader_key.read_text()

    run(body)


def test_reader_changes_nothing_and_is_told_which_credential_it_takes():
    """Each changing method is PERMISSION_DENIED before its request is looked at, and each try is in the audit log."""

    async def body(rig):
        reader = await reader_of(rig)
        before = await rig.admin.ListTenants(admin_pb2.ListTenantsRequest())
        for name in CHANGING:
            request = getattr(admin_pb2, f"{name}Request")
            error = await refused(getattr(reader, name)(request()), DENIED)
            assert (error.reason, error.metadata["method"]) == ("OPERATOR_NEEDED", name)
        assert [(line["who"], line["method"], line["outcome"]) for line in audit_lines(rig)] == [
            ("reader", name, "PERMISSION_DENIED") for name in CHANGING
        ]
        assert await rig.admin.ListTenants(admin_pb2.ListTenantsRequest()) == before
        error = await refused(reader.CreateTenant(admin_pb2.CreateTenantRequest(tenant="acme")), DENIED)
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="acme"))  # positive control

    run(body)


def test_reader_sees_what_operators_see():
    """Counters and lists are the same for both, and looking is in no audit log."""

    async def body(rig):
        reader = await reader_of(rig)
        decoder = await rig.attach()
        await fill(rig, decoder, list(range(1, 9)))
        for name in READING:
            if name in ("WatchEvents", "ExplainPrefix", "ListSessions"):
                continue
            request = getattr(admin_pb2, f"{name}Request")()
            assert await getattr(reader, name)(request) == await getattr(rig.admin, name)(request), name
        assert len((await reader.ListSessions(admin_pb2.ListSessionsRequest())).sessions) == 1
        assert audit_lines(rig) == []

    run(body)


@pytest.mark.parametrize("secret", [None, "wrong"])
def test_stranger_is_refused_and_only_some_of_it_is_written(secret):
    """Without a known credential nothing is done; the log tells of such calls, but cannot be flooded by them."""

    async def body(rig):
        async with open_channel(f"unix:{rig.paths.admin_socket}", secret) as channel:
            call = channel.unary_unary("/tessera.admin.v1.AdminService/CreateTenant")
            for _ in range(60):
                await refused(call(b""), grpc.StatusCode.UNAUTHENTICATED)
        lines = audit_lines(rig)
        assert {(line["who"], line["method"], line["outcome"]) for line in lines} == {
            ("unknown", "CreateTenant", "UNAUTHENTICATED")
        }
        assert 10 <= len(lines) < 60

    run(body)
