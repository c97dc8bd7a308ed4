"""Helpers of the admin service's tests: both roles' clients, filled caches, and the audit log as values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from common.errors import TesseraError
from common.interceptors import error_from_rpc
from tessera.admin.v1 import admin_pb2, admin_pb2_grpc
from tests.cachemgr.daemon_rig import Rig, SessionClient, acquire_request, report_request, running

METHODS = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods
INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
DENIED, TAKEN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.ALREADY_EXISTS


def run(body: Callable[[Rig], Awaitable[None]], **options: Any) -> None:
    """Run `body` against a daemon of its own."""

    async def inside() -> None:
        async with running(**options) as rig:
            await body(rig)

    asyncio.run(inside())


async def refused(call: Any, code: grpc.StatusCode) -> TesseraError:
    """The typed error of a call that must fail with `code`."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value
    return error_from_rpc(caught.value)


async def reader_of(rig: Rig) -> Any:
    """A client with the reader's credential."""
    secret = rig.paths.reader_key.read_text().strip()
    return admin_pb2_grpc.AdminServiceStub(await rig.channel(rig.paths.admin_socket, secret))  # type: ignore[no-untyped-call]


def audit_lines(rig: Rig) -> list[dict[str, Any]]:
    """The lines of the audit log."""
    if not rig.paths.audit_log.exists():
        return []
    return [json.loads(line) for line in rig.paths.audit_log.read_text().splitlines()]


async def tenant_grant(rig: Rig, tenant: str) -> bytes:
    """A grant of a tenant that is made for it, with a key."""
    await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant=tenant))
    key = (await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant=tenant))).key
    return await rig.grant(key)


async def fill(
    rig: Rig,
    decoder: SessionClient,
    tokens: list[int],
    *,
    release: bool = True,
    grant: bytes | None = None,
    request_id: str = "r1",
    **fields: Any,
) -> Any:
    """Compute a prompt; its lease."""
    request = acquire_request(grant or await rig.grant(), tokens, request_id=request_id, **fields)
    lease = (await decoder.ask(acquire=request)).acquire
    assert lease.lease_id
    done = {"lease_id": lease.lease_id, "sealed_tokens": len(tokens), "copied": True, "release": release}
    await decoder.ask(report=report_request(done))
    return lease


async def cached_tokens(rig: Rig, decoder: SessionClient, tokens: list[int], **fields: Any) -> int:
    """How many tokens of a prompt are found now; the lease ends at once."""
    request = acquire_request(fields.pop("grant", None) or await rig.grant(), tokens, request_id="probe", **fields)
    lease = (await decoder.ask(acquire=request)).acquire
    await decoder.ask(report=report_request({"lease_id": lease.lease_id, "release": True, "copied": False}))
    return int(lease.cached_tokens)
