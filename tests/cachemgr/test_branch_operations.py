"""Branches over the wire: rollback, make_writable and commit of running sequences; kept ones by their handles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest

from cachemgr.clocks import Clocks
from common.tokens import pack_tokens
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc
from tests.cachemgr.admin_rig import audit_lines
from tests.cachemgr.daemon_rig import Rig, SessionClient, acquire_request, ids, report_request, running
from tests.cachemgr.rig import eventually_async

B = 4
Body = Callable[[Rig], Coroutine[Any, Any, None]]


def on_daemon(body: Body, **options: Any) -> None:
    """Run a coroutine on a started daemon; at its end nothing is held."""

    async def run() -> None:
        async with running(**{"pool_blocks": 32, **options}) as rig:
            await body(rig)
            assert await rig.is_sound()

    asyncio.run(run())


def branches_of(rig: Rig) -> cache_pb2_grpc.BranchServiceStub:
    return cache_pb2_grpc.BranchServiceStub(rig.internal)


async def begin(rig: Rig, decoder: SessionClient, tokens: list[int], **fields: Any) -> cache_pb2.AcquireResponse:
    """A lease, all of it reported as computed."""
    answer = await decoder.ask(acquire=acquire_request(await rig.grant(), tokens, **fields))
    assert answer.WhichOneof("result") == "acquire", answer.failure
    return answer.acquire


async def sealed(decoder: SessionClient, lease: int, count: int, **fields: Any) -> cache_pb2.ReportResponse:
    """Say that so many tokens of a lease are computed."""
    item = {"lease_id": lease, "sealed_tokens": count, **fields}
    answer = await decoder.ask(report=report_request(item))
    assert answer.WhichOneof("result") == "report", answer.failure
    return answer.report


async def keep(rig: Rig, decoder: SessionClient, tokens: list[int], seconds: float = 60.0) -> cache_pb2.KeptBranch:
    """A conversation that is kept."""
    lease = await begin(rig, decoder, tokens)
    fields = {"copied": True} if lease.HasField("copy") else {}
    report = await sealed(decoder, lease.lease_id, len(tokens), release=True, keep_seconds=seconds, **fields)
    (kept,) = report.kept
    assert kept.lease_id == lease.lease_id and len(kept.handle) == 16 and kept.num_tokens == len(tokens)
    return kept


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code(), raised.value.details()


def test_rollback_answers_with_the_table_and_its_copy() -> None:
    """Within a published block: a fresh block, filled from the old one; the blocks after it are gone."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        tokens = list(range(10, 10 + 3 * B))
        lease = await begin(rig, decoder, tokens)
        await sealed(decoder, lease.lease_id, len(tokens))
        answer = await decoder.ask(rollback=cache_pb2.RollbackRequest(lease_id=lease.lease_id, num_tokens=B + 2))
        before, after = ids(lease.blocks), ids(answer.rollback.blocks)
        assert len(after) == 2 and after[0] == before[0] and after[1] not in before
        plan = answer.rollback.copy
        assert (plan.source, plan.target, plan.num_tokens) == (before[1], after[1], 2)
        again = await decoder.ask(rollback=cache_pb2.RollbackRequest(lease_id=lease.lease_id, num_tokens=1))
        assert again.failure.reason == "COPY_PENDING"
        await sealed(decoder, lease.lease_id, B + 2, copied=True, release=True)
        assert await rig.is_quiet()

    on_daemon(body)


def test_commit_then_make_writable_over_the_stream() -> None:
    """The tail is cached for others while the sequence goes on, in a block of its own."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        tokens = list(range(10, 10 + B + 2))
        lease = await begin(rig, decoder, tokens)
        refused = await decoder.ask(commit=cache_pb2.CommitRequest(lease_id=lease.lease_id, num_tokens=B + 2))
        assert refused.failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], "nothing is computed yet"
        await sealed(decoder, lease.lease_id, B + 2)
        answer = await decoder.ask(commit=cache_pb2.CommitRequest(lease_id=lease.lease_id, num_tokens=B + 2))
        assert answer.WhichOneof("result") == "commit" and not answer.commit.replacements
        other = await begin(rig, decoder, [*tokens, 99])
        assert other.cached_tokens == B + 2
        answer = await decoder.ask(make_writable=cache_pb2.MakeWritableRequest(lease_id=lease.lease_id))
        table, plan = ids(answer.make_writable.blocks), answer.make_writable.copy
        assert plan.source == ids(lease.blocks)[1] and plan.target == table[1] and plan.num_tokens == 2
        report = await sealed(decoder, lease.lease_id, B + 3, tokens=pack_tokens([7]), copied=True, release=True)
        assert not report.refusals
        await sealed(decoder, other.lease_id, B + 3, copied=True, release=True)
        plain = await begin(rig, decoder, [60, 61])
        answer = await decoder.ask(make_writable=cache_pb2.MakeWritableRequest(lease_id=plain.lease_id))
        assert not answer.make_writable.HasField("copy"), "it has one holder already"
        await sealed(decoder, plain.lease_id, 2, release=True)
        assert await rig.is_quiet()

    on_daemon(body)


def test_a_kept_conversation_goes_on_in_another_decoder() -> None:
    """By its handle: base tokens come back, its blocks are shared, the tail is a copy; the first decoder is gone."""

    async def body(rig: Rig) -> None:
        first = await rig.attach(name="d0")
        tokens = list(range(10, 10 + 2 * B + 3))
        kept = await keep(rig, first, tokens)
        await first.close()
        second = await rig.attach(name="d1")
        lease = await begin(rig, second, [90, 91], base_handle=kept.handle)
        assert ids(lease.base_tokens) == tokens
        assert lease.cached_tokens == len(tokens) and lease.copy.num_tokens == 3
        await sealed(second, lease.lease_id, len(tokens) + 2, copied=True, release=True)
        lease = await begin(rig, second, [], base_handle=kept.handle, base_tokens=5)
        assert ids(lease.base_tokens) == tokens[:5] and lease.cached_tokens == 4
        await sealed(second, lease.lease_id, 5, release=True)
        await branches_of(rig).DropBranch(cache_pb2.DropBranchRequest(grant=await rig.grant(), handle=kept.handle))
        assert await rig.is_quiet()

    on_daemon(body)


def test_branches_by_handle_fork_cut_and_drop() -> None:
    """Each handle goes its own way; what is over is NOT_FOUND."""

    async def body(rig: Rig) -> None:
        decoder, stub, grant = await rig.attach(), branches_of(rig), await rig.grant()
        tokens = list(range(10, 10 + 2 * B + 3))
        kept = await keep(rig, decoder, tokens)
        forked = await stub.ForkBranch(
            cache_pb2.ForkBranchRequest(grant=grant, handle=kept.handle, count=3, ttl_seconds=60)
        )
        assert forked.num_tokens == len(tokens) and len({kept.handle, *forked.handles}) == 4
        one, two, three = forked.handles
        await stub.RollbackBranch(cache_pb2.RollbackBranchRequest(grant=grant, handle=one, num_tokens=B + 1))
        await stub.DropBranch(cache_pb2.DropBranchRequest(grant=grant, handle=two))
        cut = await begin(rig, decoder, [7], base_handle=one)
        assert ids(cut.base_tokens) == tokens[: B + 1]
        whole = await begin(rig, decoder, [7], base_handle=three)
        assert ids(whole.base_tokens) == tokens
        gone = await decoder.ask(acquire=acquire_request(grant, [7], base_handle=two))
        assert gone.failure.reason == "BRANCH_NOT_FOUND"
        for lease in (cut, whole):
            await sealed(decoder, lease.lease_id, 0, release=True)
        for handle in (kept.handle, one, three):
            await stub.DropBranch(cache_pb2.DropBranchRequest(grant=grant, handle=handle))
        assert await rig.is_quiet()

    on_daemon(body)


def test_an_operator_ends_a_kept_branch_by_its_number() -> None:
    """Its handle is NOT_FOUND then and its blocks are held by nobody, but cached; another branch stays. No other number
    ends anything, and the audit log and the events have it."""

    async def body(rig: Rig) -> None:
        drop = admin_pb2.DropBranchRequest
        assert (await code_of(rig.admin.DropBranch(drop(branch=1))))[0] is grpc.StatusCode.NOT_FOUND  # no decoder yet
        decoder = await rig.attach()
        first = await keep(rig, decoder, list(range(10, 10 + 2 * B + 1)))
        second = await keep(rig, decoder, list(range(50, 50 + B)))
        listed = (await rig.admin.ListBranches(admin_pb2.ListBranchesRequest())).branches
        assert [branch.num_tokens for branch in listed] == [2 * B + 1, B]
        held = (await rig.admin.GetSnapshot(admin_pb2.GetSnapshotRequest())).cached_blocks
        for number, code in ((0, "INVALID_ARGUMENT"), (2**63, "INVALID_ARGUMENT"), (999, "NOT_FOUND")):
            assert (await code_of(rig.admin.DropBranch(drop(branch=number))))[0].name == code
        await rig.admin.DropBranch(drop(branch=listed[0].branch))
        assert [b.branch for b in (await rig.admin.ListBranches(admin_pb2.ListBranchesRequest())).branches] == [
            listed[1].branch
        ]
        after = await rig.admin.GetSnapshot(admin_pb2.GetSnapshotRequest())
        assert (
            after.cached_blocks >= held + 2 and (await rig.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest())).ok
        )
        gone = await decoder.ask(acquire=acquire_request(await rig.grant(), [7], base_handle=first.handle))
        assert gone.failure.reason == "BRANCH_NOT_FOUND"
        lease = await begin(rig, decoder, [7], base_handle=second.handle)
        assert ids(lease.base_tokens) == list(range(50, 50 + B)), "positive control: the other goes on"
        assert (await code_of(rig.admin.DropBranch(drop(branch=listed[0].branch))))[0] is grpc.StatusCode.NOT_FOUND
        lines = [line for line in audit_lines(rig) if line["method"] == "DropBranch"]
        assert [line["outcome"] for line in lines].count("OK") == 1 and len(lines) == 6
        assert {"branch": listed[0].branch} in [line["fields"] for line in lines]

    on_daemon(body)


def test_a_handle_is_of_use_to_its_tenant_alone() -> None:
    """Another tenant, a made-up handle, one of another length: NOT_FOUND in the same words. Control: the owner."""

    async def body(rig: Rig) -> None:
        decoder, stub = await rig.attach(), branches_of(rig)
        kept = await keep(rig, decoder, list(range(10, 10 + B + 1)))
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="other"))
        key = await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="other", name="k"))
        other, own = await rig.grant(key.key), await rig.grant()
        words = set()
        for grant, handle in ((other, kept.handle), (own, bytes(16)), (own, b"short"), (other, b"")):
            for call in (
                stub.DropBranch(cache_pb2.DropBranchRequest(grant=grant, handle=handle)),
                stub.RollbackBranch(cache_pb2.RollbackBranchRequest(grant=grant, handle=handle, num_tokens=1)),
                stub.ForkBranch(cache_pb2.ForkBranchRequest(grant=grant, handle=handle, count=1, ttl_seconds=1)),
            ):
                words.add(await code_of(call))
            if handle:
                answer = await decoder.ask(acquire=acquire_request(grant, [1], base_handle=handle))
                words.add((grpc.StatusCode.NOT_FOUND, answer.failure.message))
                assert answer.failure.code == grpc.StatusCode.NOT_FOUND.value[0]
        assert len(words) == 1 and next(iter(words))[0] is grpc.StatusCode.NOT_FOUND
        code, _ = await code_of(stub.DropBranch(cache_pb2.DropBranchRequest(grant=b"x" * 80, handle=kept.handle)))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        await stub.DropBranch(cache_pb2.DropBranchRequest(grant=own, handle=kept.handle))
        assert await rig.is_quiet()

    on_daemon(body)


def test_a_revoked_key_is_of_no_use_any_more() -> None:
    """The grant that it was given before is refused at once. Positive control: before, it works."""

    async def body(rig: Rig) -> None:
        decoder, stub = await rig.attach(), branches_of(rig)
        kept = await keep(rig, decoder, list(range(10, 10 + B + 1)))
        key = await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="default", name="k"))
        grant = await rig.grant(key.key)
        fork = cache_pb2.ForkBranchRequest(grant=grant, handle=kept.handle, count=1, ttl_seconds=60)
        await stub.ForkBranch(fork)
        await rig.admin.RevokeKey(admin_pb2.RevokeKeyRequest(key_id=key.key_id))
        assert (await code_of(stub.ForkBranch(fork)))[0] is grpc.StatusCode.UNAUTHENTICATED

    on_daemon(body)


def test_the_operator_says_how_many_a_tenant_may_keep() -> None:
    """`max_kept`: one more is refused with numbers, at its end and, where it says so, before its beginning."""

    async def body(rig: Rig) -> None:
        decoder, stub, grant = await rig.attach(), branches_of(rig), await rig.grant()
        first = await keep(rig, decoder, list(range(10, 10 + B)))
        await keep(rig, decoder, list(range(50, 50 + B)))
        refused = await decoder.ask(acquire=acquire_request(grant, [7, 8], will_keep=True))
        assert refused.failure.reason == "TOO_MANY_KEPT"
        assert (refused.failure.metadata["needed"], refused.failure.metadata["usable"]) == ("3", "2")
        lease = await begin(rig, decoder, [7, 8])
        report = await sealed(decoder, lease.lease_id, 2, release=True, keep_seconds=60.0)
        assert [refusal.failure.reason for refusal in report.refusals] == ["TOO_MANY_KEPT"]
        assert not (await rig.snapshot()).leases
        await stub.DropBranch(cache_pb2.DropBranchRequest(grant=grant, handle=first.handle))
        await keep(rig, decoder, [7, 8])

    on_daemon(body, max_kept=2)


def test_another_model_cannot_continue_it() -> None:
    """The cache key is part of what a conversation is."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        kept = await keep(rig, decoder, list(range(10, 10 + B + 1)))
        request = acquire_request(await rig.grant(), [1], base_handle=kept.handle)
        request.key.weights_digest = b"v" * 32
        assert (await decoder.ask(acquire=request)).failure.reason == "BRANCH_NOT_FOUND"
        request.key.weights_digest = b"w" * 32
        answer = await decoder.ask(acquire=request)
        assert answer.WhichOneof("result") == "acquire", "positive control"
        await sealed(decoder, answer.acquire.lease_id, 0, release=True)

    on_daemon(body)


def test_time_ends_kept_conversations() -> None:
    """Before its time a branch holds its blocks and can be gone on with; within a tick after it the branch is gone, and
    its blocks are evictable."""
    late = [0]
    clocks = Clocks(steady_ns=lambda: time.monotonic_ns() + late[0])

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        kept = await keep(rig, decoder, list(range(10, 10 + B + 1)), seconds=500.0)
        late[0] = 400 * 10**9
        shot = await rig.snapshot()
        assert (shot.kept_branches, shot.active_blocks) == (1, 2)
        again = await begin(rig, decoder, [1], base_handle=kept.handle)
        assert again.cached_tokens == B + 1
        await sealed(decoder, again.lease_id, 0, release=True)
        assert not await rig.is_quiet()
        late[0] = 501 * 10**9
        await eventually_async(rig.is_quiet)

    on_daemon(body, clocks=clocks, lease_seconds=1000.0)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_malformed_time_to_keep_costs_the_sequence_alone(seconds: float) -> None:
    """Its lease is over and nothing is kept; another sequence of the report is done."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        bad, good = [await begin(rig, decoder, list(range(n, n + B))) for n in (10, 50)]
        answer = await decoder.ask(
            report=report_request(
                {"lease_id": bad.lease_id, "sealed_tokens": B, "release": True, "keep_seconds": seconds},
                {"lease_id": good.lease_id, "sealed_tokens": B, "release": True, "keep_seconds": 1e9},
            )
        )
        assert [refusal.lease_id for refusal in answer.report.refusals] == [bad.lease_id]
        assert [kept.lease_id for kept in answer.report.kept] == [good.lease_id]

    on_daemon(body)


def test_fields_of_branch_calls_are_checked_by_name() -> None:
    """Counts and times outside what is allowed."""

    async def body(rig: Rig) -> None:
        decoder, stub, grant = await rig.attach(), branches_of(rig), await rig.grant()
        kept = await keep(rig, decoder, list(range(10, 10 + B)))
        fork = {"grant": grant, "handle": kept.handle, "count": 1, "ttl_seconds": 1.0}
        for field, value in (("count", 0), ("count", 17), ("ttl_seconds", 0.0), ("ttl_seconds", float("nan"))):
            call = stub.ForkBranch(cache_pb2.ForkBranchRequest(**{**fork, field: value}))
            code, words = await code_of(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT and field in words
        for count in (0, B + 1):
            request = cache_pb2.RollbackBranchRequest(grant=grant, handle=kept.handle, num_tokens=count)
            code, words = await code_of(stub.RollbackBranch(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "num_tokens" in words
        await stub.ForkBranch(cache_pb2.ForkBranchRequest(**fork))

    on_daemon(body)


def test_the_internal_credential_is_needed() -> None:
    """BranchService is no service for clients."""

    async def body(rig: Rig) -> None:
        grant = await rig.grant()
        channel = await rig.channel(rig.paths.cachemgr_socket, "wrong")
        stub = cache_pb2_grpc.BranchServiceStub(channel)
        code, _ = await code_of(stub.DropBranch(cache_pb2.DropBranchRequest(grant=grant, handle=bytes(16))))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        code, _ = await code_of(branches_of(rig).DropBranch(cache_pb2.DropBranchRequest(grant=grant, handle=bytes(16))))
        assert code is grpc.StatusCode.NOT_FOUND, "positive control: with the right one it is looked up"

    on_daemon(body)
