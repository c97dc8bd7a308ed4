"""Scopes over the wire: who may name which, what is refused and how, and waiting by push."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from cachemgr.ids import TenantId
from cachemgr.keys import CacheKey, Scope
from cachemgr.scopes import PUBLIC_OWNER, group_owner, resolve_prefix
from common.errors import InvalidArgument, PermissionDenied
from common.tokens import pack_tokens
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2, cache_pb2_grpc
from tessera.common.v1 import common_pb2
from tests.cachemgr.daemon_rig import KEY as WIRE_KEY
from tests.cachemgr.daemon_rig import Rig, SessionClient, acquire_request, report_request, running

KEY = CacheKey(b"w" * 32, "", b"", b"", b"", b"", "float32", "none", 1)
GROUP, PUBLIC = common_pb2.SCOPE_GROUP, common_pb2.SCOPE_PUBLIC
SYSTEM = list(range(50, 58))  # two blocks
PROMPT = [*SYSTEM, 5, 6, 7]


def prefix(scope: Any, num_tokens: int = 0, group: str = "") -> common_pb2.ScopePrefix:
    """A prefix as a request says it."""
    return common_pb2.ScopePrefix(scope=scope, group=group, num_tokens=num_tokens)


class Rules:
    """Two tenants, one group, and two approved prefixes, one of which begins the other."""

    approved = (pack_tokens(SYSTEM[:4]), pack_tokens(SYSTEM))

    def scope_secret(self, scope: Scope, group: str = "") -> bytes:
        return f"{scope.name}-{group}".encode().ljust(32, b".")

    def group_id(self, group: str) -> str:
        return "1" if group == "team" else ""

    def is_member(self, group: str, tenant: TenantId) -> bool:
        return (group, tenant) == ("team", "a")

    def approved_lengths(self) -> tuple[int, ...]:
        return (4, 8)

    def is_approved(self, tokens: bytes) -> bool:
        return tokens in self.approved


def resolve(message: common_pb2.ScopePrefix, tenant: str = "a", tokens: list[int] = PROMPT) -> Any:
    """What becomes of a prefix."""
    return resolve_prefix(Rules(), TenantId(tenant), KEY, message, pack_tokens(tokens), "acquire.prefix")


def test_a_group_covers_what_is_said_or_all_of_the_prompt() -> None:
    """0 is the whole prompt; the root depends on the group, the key and nothing of the tenant."""
    assert resolve(prefix(GROUP, 0, "team")).num_tokens == len(PROMPT)
    span = resolve(prefix(GROUP, 5, "team"))
    assert (span.owner, span.num_tokens, len(span.root)) == (group_owner(Rules(), "team"), 5, 32)
    assert span.root == resolve(prefix(GROUP, 9, "team")).root != resolve(prefix(PUBLIC, 8)).root


@pytest.mark.parametrize(("group", "tenant"), [("team", "b"), ("none", "a"), ("", "a"), ("x" * 5000, "a")])
def test_no_member_and_no_group_are_one_answer(group: str, tenant: str) -> None:
    """Nobody can find out which groups there are."""
    with pytest.raises(PermissionDenied) as caught:
        resolve(prefix(GROUP, 4, group), tenant)
    assert (caught.value.message, caught.value.reason) == ("there is no such group of this tenant", "SCOPE_DENIED")


def test_the_public_scope_covers_the_longest_approved_prefix() -> None:
    """0 is the longest approved one that the prompt begins with; without one nothing is public: no error."""
    assert (resolve(prefix(PUBLIC)).num_tokens, resolve(prefix(PUBLIC)).owner) == (8, PUBLIC_OWNER)
    assert resolve(prefix(PUBLIC), tokens=SYSTEM[:6]).num_tokens == 4
    assert resolve(prefix(PUBLIC), tokens=SYSTEM).num_tokens == 8
    assert resolve(prefix(PUBLIC), tokens=[1, 2, 3, 4, 5]) is None
    assert resolve(prefix(PUBLIC), tokens=SYSTEM[:3]) is None


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 7, 9, 11])
def test_a_public_prefix_that_is_not_approved_is_refused(num_tokens: int) -> None:
    """Exactly the approved prefixes may be named; the error has the number and no token."""
    with pytest.raises(PermissionDenied) as caught:
        resolve(prefix(PUBLIC, num_tokens))
    assert caught.value.reason == "PREFIX_NOT_APPROVED"
    assert str(num_tokens) in caught.value.message
    assert resolve(prefix(PUBLIC, 8)).num_tokens == 8  # the control


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (prefix(GROUP, 12, "team"), "acquire.prefix.num_tokens"),
        (prefix(PUBLIC, 2**32 - 1), "acquire.prefix.num_tokens"),
        (prefix(PUBLIC, 4, "team"), "acquire.prefix.group"),
        (prefix(common_pb2.SCOPE_PRIVATE, 4), "acquire.prefix.scope"),
        (prefix(common_pb2.SCOPE_UNSPECIFIED), "acquire.prefix.scope"),
        (prefix(9, 4), "acquire.prefix.scope"),
    ],
)
def test_a_malformed_prefix_is_refused_by_its_field(message: common_pb2.ScopePrefix, field: str) -> None:
    """Wrong scopes, names where none is allowed, and more tokens than the prompt has."""
    with pytest.raises(InvalidArgument) as caught:
        resolve(message)
    assert caught.value.field == field


# ---- over the wire


def run(body: Any, **options: Any) -> None:
    async def inside() -> None:
        async with running(**{"pool_blocks": 64, **options}) as rig:
            await body(rig)

    asyncio.run(inside())


async def tenants(rig: Rig, *names: str) -> list[bytes]:
    """New tenants; a grant of each."""
    grants = []
    for name in names:
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant=name))
        key = (await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant=name))).key
        grants.append(await rig.grant(key))
    return grants


async def serve(decoder: SessionClient, grant: bytes, tokens: list[int], **fields: Any) -> int:
    """A whole request; its cached tokens."""
    acquired = await lease(decoder, grant, tokens, **fields)
    done = {"lease_id": acquired.lease_id, "sealed_tokens": len(tokens), "copied": True, "release": True}
    assert not (await decoder.ask(report=report_request(done))).report.refusals
    return int(acquired.cached_tokens)


async def lease(decoder: SessionClient, grant: bytes, tokens: list[int], **fields: Any) -> cache_pb2.AcquireResponse:
    """A granted lease."""
    answer = await decoder.ask(acquire=acquire_request(grant, tokens, **fields))
    assert answer.acquire.lease_id, answer
    return answer.acquire


async def refusal(decoder: SessionClient, grant: bytes, tokens: list[int], **fields: Any) -> cache_pb2.Failure:
    """The failure of an acquire."""
    answer = await decoder.ask(acquire=acquire_request(grant, tokens, **fields))
    assert answer.WhichOneof("result") == "failure", answer
    return answer.failure


def test_an_approved_prefix_is_shared_and_the_tails_are_not() -> None:
    """Before the approval it is refused; after it two tenants share it, and a withdrawal ends that."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        first, second = await tenants(rig, "a", "b")
        public = {"prefix": prefix(PUBLIC, len(SYSTEM))}
        denied = await refusal(decoder, first, PROMPT, **public)
        assert (denied.code, denied.reason) == (grpc.StatusCode.PERMISSION_DENIED.value[0], "PREFIX_NOT_APPROVED")
        await rig.admin.ApprovePrefix(admin_pb2.ApprovePrefixRequest(name="system", token_ids=SYSTEM))
        assert await serve(decoder, first, PROMPT, **public) == 0
        assert await serve(decoder, second, PROMPT, **public) == len(SYSTEM)
        assert await serve(decoder, first, PROMPT, **public) == len(PROMPT) - 1
        assert await serve(decoder, second, PROMPT, prefix=prefix(PUBLIC)) == len(PROMPT) - 1
        assert await serve(decoder, second, PROMPT) == 0  # private: nothing of the scope
        await rig.admin.WithdrawPrefix(admin_pb2.WithdrawPrefixRequest(name="system"))
        assert (await refusal(decoder, first, PROMPT, **public)).reason == "PREFIX_NOT_APPROVED"
        assert await rig.is_quiet()

    run(body)


def test_a_group_is_its_members_alone() -> None:
    """Members share; others, and those who were removed, get one and the same refusal, and never a hit."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        first, second, stranger = await tenants(rig, "a", "b", "c")
        await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["a", "b"]))
        team = {"prefix": prefix(GROUP, 8, "team")}
        assert await serve(decoder, first, PROMPT, **team) == 0
        assert await serve(decoder, second, PROMPT, **team) == 8
        denied = await refusal(decoder, stranger, PROMPT, **team)
        unknown = await refusal(decoder, stranger, PROMPT, prefix=prefix(GROUP, 8, "nobody"))
        assert denied == unknown
        assert denied.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        await rig.admin.UpdateGroup(admin_pb2.UpdateGroupRequest(group="team", remove_tenants=["b"]))
        assert await refusal(decoder, second, PROMPT, **team) == denied
        # What was admitted before goes on, privately.
        again = await lease(decoder, second, PROMPT, resumed=True, **team)
        assert again.cached_tokens == 0
        assert await serve(decoder, first, PROMPT, **team) == len(PROMPT) - 1
        await rig.admin.DeleteGroup(admin_pb2.DeleteGroupRequest(group="team"))
        await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["a"]))
        assert await serve(decoder, first, PROMPT, **team) == 0  # another group of the same name

    run(body)


def test_a_request_goes_on_in_its_scope_when_it_resumes() -> None:
    """A preempted request finds its prefix and its own tail again, generated tokens included; none is shared."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        first, second = await tenants(rig, "a", "b")
        await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["a", "b"]))
        said = [*PROMPT, 1, 2, 3, 4, 5, 6, 7]
        team = {"prefix": prefix(GROUP, len(PROMPT), "team")}
        assert await serve(decoder, first, PROMPT, **team) == 0
        assert await serve(decoder, first, said, resumed=True, **team) == len(PROMPT)
        assert await serve(decoder, first, said, resumed=True, **team) == len(said) - 1
        assert await serve(decoder, second, said, **team) == 8
        assert await serve(decoder, second, said, prefix=prefix(GROUP, len(said), "team")) == 8

    run(body)


@pytest.mark.parametrize("field", [field.name for field in common_pb2.CacheKey.DESCRIPTOR.fields])
def test_every_part_of_the_key_arrives(field: str) -> None:
    """Each field of the wire's key, changed alone, makes a resident prompt a miss; the scope is said elsewhere."""
    other = common_pb2.CacheKey()
    other.CopyFrom(WIRE_KEY)
    number = common_pb2.CacheKey.DESCRIPTOR.fields_by_name[field]
    if field == "multimodal_digests":
        other.multimodal_digests.append(b"m" * 32)
    elif field not in ("scope", "scope_name"):
        setattr(
            other,
            field,
            {number.CPPTYPE_STRING: "x"}.get(number.cpp_type, 7) if number.type != number.TYPE_BYTES else b"x",
        )

    async def body(rig: Rig) -> None:
        decoder, grant = await rig.attach(), await rig.grant()
        assert await serve(decoder, grant, PROMPT) == 0
        if field == "scope":
            other.scope = GROUP
            assert "acquire.key.scope" in (await refusal(decoder, grant, PROMPT, key=other)).message
        elif field == "scope_name":
            other.scope_name = "team"
            assert "key.scope_name" in (await refusal(decoder, grant, PROMPT, key=other)).message
        else:
            assert await serve(decoder, grant, PROMPT, key=other) == 0
        assert await serve(decoder, grant, PROMPT) == len(PROMPT) - 1

    run(body)


def test_a_wait_is_answered_by_a_push() -> None:
    """Two decoders: the second is told to wait, and told when the first has sealed what they share."""

    async def body(rig: Rig) -> None:
        first, second, grant = await rig.attach(), await rig.attach(name="d1"), await rig.grant()
        held = await lease(first, grant, PROMPT)
        answer = await second.ask(acquire=acquire_request(grant, PROMPT, request_id="r2", may_wait=True))
        waiting = answer.acquire.waiting
        assert (answer.acquire.lease_id, waiting.resident_tokens, waiting.coming_tokens) == (0, 0, 8)
        await first.ask(report=report_request({"lease_id": held.lease_id, "sealed_tokens": 8}))
        push = await second.push()
        assert push.prefix_ready.wait_id == waiting.wait_id
        again = await second.ask(acquire=acquire_request(grant, PROMPT, request_id="r2", may_wait=True))
        assert again.acquire.cached_tokens == 8
        assert (await rig.snapshot()).waits == 1

    run(body)


@pytest.mark.parametrize("end", ["release", "close", "cut"])
def test_a_wait_ends_with_its_producer(end: str) -> None:
    """A lease that ends, a decoder that closes its stream and one whose stream breaks all end the wait at once."""

    async def body(rig: Rig) -> None:
        first, second, grant = await rig.attach(), await rig.attach(name="d1"), await rig.grant()
        held = await lease(first, grant, PROMPT)
        answer = await second.ask(acquire=acquire_request(grant, PROMPT, request_id="r2", may_wait=True))
        if end == "release":
            await first.ask(report=report_request({"lease_id": held.lease_id, "release": True}))
        elif end == "close":
            await first.close()
        else:
            first.call.cancel()
        push = await asyncio.wait_for(second.push(), 10)
        assert push.prefix_ready.wait_id == answer.acquire.waiting.wait_id

    run(body)


def test_nobody_is_told_to_wait_for_another_tenant() -> None:
    """The same prompt of another tenant is leased at once; of the same tenant it waits."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        first, second = await tenants(rig, "a", "b")
        await lease(decoder, first, PROMPT)
        assert (await lease(decoder, second, PROMPT, may_wait=True)).cached_tokens == 0
        answer = await decoder.ask(acquire=acquire_request(first, PROMPT, may_wait=True))
        assert answer.acquire.waiting.wait_id

    run(body)


def test_a_kept_conversation_goes_on_in_its_group_while_its_tenant_is_a_member() -> None:
    """The continuation names no scope and finds prefix and tail; who was removed reaches neither, whatever it says of
    itself, and may do nothing with the conversation but drop it."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        first, second = await tenants(rig, "a", "b")
        await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["a", "b"]))
        team = {"prefix": prefix(GROUP, len(SYSTEM), "team")}
        held = await lease(decoder, first, PROMPT, **team)
        done = {"lease_id": held.lease_id, "sealed_tokens": len(PROMPT), "release": True, "keep_seconds": 60.0}
        handle = (await decoder.ask(report=report_request(done))).report.kept[0].handle
        branches = cache_pb2_grpc.BranchServiceStub(rig.internal)  # type: ignore[no-untyped-call]
        fork = cache_pb2.ForkBranchRequest(grant=first, handle=handle, count=1, ttl_seconds=60)
        cut = cache_pb2.RollbackBranchRequest(grant=first, handle=handle, num_tokens=len(PROMPT))
        assert await serve(decoder, second, PROMPT, **team) == len(SYSTEM)
        running = await lease(decoder, first, [1, 2, 3], base_handle=handle)
        again = await lease(decoder, first, [1, 2, 3], base_handle=handle, resumed=True)
        assert running.cached_tokens == again.cached_tokens == len(PROMPT)
        await branches.ForkBranch(fork)
        await branches.RollbackBranch(cut)
        await rig.admin.UpdateGroup(admin_pb2.UpdateGroupRequest(group="team", remove_tenants=["a"]))
        for resumed in (False, True):
            denied = await refusal(decoder, first, [1, 2, 3], base_handle=handle, resumed=resumed)
            assert (denied.code, denied.reason) == (grpc.StatusCode.PERMISSION_DENIED.value[0], "SCOPE_DENIED")
        for call, request in ((branches.ForkBranch, fork), (branches.RollbackBranch, cut)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await refusal(decoder, second, [1, 2, 3], base_handle=handle)).reason == "BRANCH_NOT_FOUND"
        ended = {"lease_id": running.lease_id, "sealed_tokens": len(PROMPT) + 3, "copied": True, "release": True}
        assert not (await decoder.ask(report=report_request(ended))).report.refusals  # what ran came to its end
        await branches.DropBranch(cache_pb2.DropBranchRequest(grant=first, handle=handle))

    run(body)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (prefix(GROUP, 0, "team"), prefix(GROUP, 8, "team")),
        (prefix(GROUP, 7, "team"), prefix(GROUP, 4, "team")),
        (prefix(PUBLIC, 9), prefix(PUBLIC, 9)),  # two blocks and a token: two blocks alone are not approved
        (prefix(PUBLIC), prefix(PUBLIC, 9)),
        (prefix(GROUP, 3, "team"), None),
        (None, None),
    ],
)
def test_a_continued_conversation_is_told_in_which_scope_it_goes_on(
    said: common_pb2.ScopePrefix | None, told: common_pb2.ScopePrefix | None
) -> None:
    """What asks again with it and without the handle, as after a preemption, finds its prefix and its own tail. The
    controls: without it there is nothing of a wider scope, and a tenant's own conversation needs none."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        (grant,) = await tenants(rig, "a")
        await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["a"]))
        await rig.admin.ApprovePrefix(admin_pb2.ApprovePrefixRequest(name="system", token_ids=PROMPT[:9]))
        held = await lease(decoder, grant, PROMPT, prefix=said)
        assert not held.HasField("base_prefix")
        done = {"lease_id": held.lease_id, "sealed_tokens": len(PROMPT), "release": True, "keep_seconds": 60.0}
        handle = (await decoder.ask(report=report_request(done))).report.kept[0].handle
        running = await lease(decoder, grant, [1, 2, 3], base_handle=handle)
        assert (running.base_prefix if running.HasField("base_prefix") else None) == told
        whole = [*PROMPT, 1, 2, 3]
        ended = {"lease_id": running.lease_id, "sealed_tokens": len(whole), "copied": True, "release": True}
        await decoder.ask(report=report_request(ended))
        assert await serve(decoder, grant, whole, prefix=told, resumed=True) == len(whole) - 1
        if told is not None:
            assert await serve(decoder, grant, whole, resumed=True) == 0

    run(body)


@pytest.mark.parametrize(("kind", "cut"), [("group", 6), ("public", 6), ("public", 8), ("public", 9)])
def test_of_a_prefix_that_was_cut_no_more_is_told_than_is_left(kind: str, cut: int) -> None:
    """Of a group's the blocks that are left; of an approved one nothing, unless all of it is left: the control."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        (grant,) = await tenants(rig, "a")
        await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["a"]))
        await rig.admin.ApprovePrefix(admin_pb2.ApprovePrefixRequest(name="system", token_ids=PROMPT[:9]))
        said = prefix(PUBLIC, 9) if kind == "public" else prefix(GROUP, 8, "team")
        held = await lease(decoder, grant, PROMPT, prefix=said)
        done = {"lease_id": held.lease_id, "sealed_tokens": len(PROMPT), "release": True, "keep_seconds": 60.0}
        handle = (await decoder.ask(report=report_request(done))).report.kept[0].handle
        running = await lease(decoder, grant, [90, 91], base_handle=handle, base_tokens=cut)
        told = running.base_prefix if running.HasField("base_prefix") else None
        assert told == (prefix(GROUP, 4, "team") if kind == "group" else prefix(PUBLIC, 9) if cut == 9 else None)

    run(body)


@pytest.mark.parametrize("scope", [prefix(PUBLIC, len(SYSTEM)), prefix(PUBLIC), prefix(GROUP, len(SYSTEM), "team")])
def test_no_scope_is_named_with_a_kept_conversation(scope: common_pb2.ScopePrefix) -> None:
    """The new tokens may be an approved prefix or a group's; the first ones are the branch's. Refused, nothing listed;
    the control: the same tokens without the handle are let in."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        (grant,) = await tenants(rig, "a")
        await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["a"]))
        await rig.admin.ApprovePrefix(admin_pb2.ApprovePrefixRequest(name="system", token_ids=SYSTEM))
        held = await lease(decoder, grant, list(range(90, 102)))
        done = {"lease_id": held.lease_id, "sealed_tokens": 12, "release": True, "keep_seconds": 60.0}
        handle = (await decoder.ask(report=report_request(done))).report.kept[0].handle
        for resumed in (False, True):
            denied = await refusal(decoder, grant, PROMPT, prefix=scope, base_handle=handle, resumed=resumed)
            assert (denied.code, denied.metadata["field"]) == (
                grpc.StatusCode.INVALID_ARGUMENT.value[0],
                "acquire.prefix",
            )
        listed = (await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())).prefixes
        assert {item.tenant for item in listed} == {"a"}
        await serve(decoder, grant, PROMPT, prefix=scope)
        listed = (await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())).prefixes
        assert len({item.tenant for item in listed}) == 2

    run(body)


@pytest.mark.parametrize("end", ["withdraw", "delete group", "rotate", "nothing"])
def test_what_ended_while_a_sequence_ran_leaves_no_conversation(end: str) -> None:
    """The sequence comes to its end, without a handle: nothing is held, and nothing of the scope is listed again. Where
    nothing ended there is a handle."""

    async def body(rig: Rig) -> None:
        decoder = await rig.attach()
        (grant,) = await tenants(rig, "a")
        await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["a"]))
        await rig.admin.ApprovePrefix(admin_pb2.ApprovePrefixRequest(name="system", token_ids=SYSTEM))
        scope = {
            "withdraw": {"prefix": prefix(PUBLIC, len(SYSTEM))},
            "delete group": {"prefix": prefix(GROUP, len(SYSTEM), "team")},
        }.get(end, {})
        held = await lease(decoder, grant, PROMPT, **scope)
        if end == "withdraw":
            await rig.admin.WithdrawPrefix(admin_pb2.WithdrawPrefixRequest(name="system"))
        elif end == "delete group":
            await rig.admin.DeleteGroup(admin_pb2.DeleteGroupRequest(group="team"))
        elif end == "rotate":
            await rig.admin.RotateTenantSecret(admin_pb2.RotateTenantSecretRequest(tenant="a"))
        done = {"lease_id": held.lease_id, "sealed_tokens": len(PROMPT), "release": True, "keep_seconds": 60.0}
        answer = (await decoder.ask(report=report_request(done))).report
        assert [item.lease_id for item in answer.kept] == [held.lease_id] and not answer.refusals
        has_ended = end != "nothing"
        assert bool(answer.kept[0].handle) != has_ended
        assert (await rig.snapshot()).kept_branches == (not has_ended)
        assert await rig.is_quiet() == has_ended
        listed = (await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())).prefixes
        assert bool(listed) != has_ended

    run(body)
