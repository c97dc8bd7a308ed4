"""Pins, priorities, explanations, kept branches and limits of the hit rate over the admin RPC."""

from __future__ import annotations

import grpc
import pytest

from tessera.admin.v1 import admin_pb2
from tessera.common.v1 import common_pb2
from tests.cachemgr.admin_rig import (
    INVALID,
    MISSING,
    audit_lines,
    cached_tokens,
    fill,
    reader_of,
    refused,
    run,
    tenant_grant,
)
from tests.cachemgr.daemon_rig import BLOCKS, KEY, acquire_request

PROMPT = list(range(1, 9))


def outcomes(rig, method):
    return [line["outcome"] for line in audit_lines(rig) if line["method"] == method]


async def budget(rig, blocks, tenant="default"):
    await rig.admin.UpdateTenant(admin_pb2.UpdateTenantRequest(tenant=tenant, pin_blocks=blocks))


async def explain(client, tokens, tenant="default", **fields):
    return await client.ExplainPrefix(admin_pb2.ExplainPrefixRequest(tenant=tenant, token_ids=tokens, **fields))


def test_pinned_prefix_stays_until_the_pin_ends():
    """Eviction takes everything but what is pinned; after the end of the pin it takes that too."""

    async def body(rig):
        decoder = await rig.attach()
        await budget(rig, 4)
        await fill(rig, decoder, PROMPT)
        made = await rig.admin.PinPrefix(admin_pb2.PinPrefixRequest(tenant="default", token_ids=PROMPT))
        assert (made.pinned_tokens, made.pinned_blocks) == (8, 2)
        (shown,) = (await rig.admin.ListPins(admin_pb2.ListPinsRequest())).pins
        assert (shown.pin, shown.tenant, shown.num_tokens, shown.num_blocks) == (made.pin, "default", 8, 2)
        assert not shown.HasField("expires_in_seconds")
        (prefix,) = (await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())).prefixes
        assert prefix.pinned
        blocks = (await rig.admin.ListBlocks(admin_pb2.ListBlocksRequest())).blocks
        assert sorted(item.block for item in blocks if item.pinned) == sorted(prefix.blocks)
        now = await rig.snapshot()
        assert now.pinned_blocks == now.tenants[0].pinned_blocks == 2
        await rig.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(tenant="default"))
        assert await cached_tokens(rig, decoder, PROMPT) == 7
        await rig.admin.UnpinPrefix(admin_pb2.UnpinPrefixRequest(pin=made.pin))
        assert not (await rig.admin.ListPins(admin_pb2.ListPinsRequest())).pins
        await rig.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(tenant="default"))
        assert await cached_tokens(rig, decoder, PROMPT) == 0
        assert outcomes(rig, "PinPrefix") == outcomes(rig, "UnpinPrefix") == ["OK"]
        line = next(line for line in audit_lines(rig) if line["method"] == "PinPrefix")
        assert line["fields"] == {"tenant": "default", "num_token_ids": 8}
        assert line["result"] == {"pin": made.pin, "pinned_tokens": 8, "pinned_blocks": 2}

    run(body)


def test_pins_are_refused_where_they_must_be():
    """Over the budget with numbers; what is not resident, or not there, is NOT_FOUND; wrong fields are named."""

    async def body(rig):
        pin = admin_pb2.PinPrefixRequest
        await refused(rig.admin.PinPrefix(pin(tenant="default", token_ids=PROMPT)), MISSING)  # no decoder yet
        decoder = await rig.attach()
        await refused(rig.admin.PinPrefix(pin(tenant="default", token_ids=PROMPT)), MISSING)  # nothing acquired yet
        await fill(rig, decoder, PROMPT)
        error = await refused(
            rig.admin.PinPrefix(pin(tenant="default", token_ids=PROMPT)), grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        assert (error.reason, error.needed, error.usable) == ("PIN_BUDGET_EXCEEDED", 2, 0)
        await budget(rig, 4)
        await refused(rig.admin.PinPrefix(pin(tenant="default", token_ids=[99])), MISSING)
        await refused(rig.admin.PinPrefix(pin(tenant="nobody", token_ids=PROMPT)), MISSING)
        await refused(rig.admin.UnpinPrefix(admin_pb2.UnpinPrefixRequest(pin=77)), MISSING)
        for request, field in (
            (pin(tenant="default"), "token_ids"),
            (pin(tenant="default", token_ids=[1, -5]), "token_ids[1]"),
            (pin(tenant="A", token_ids=PROMPT), "tenant"),
            (pin(tenant="default", token_ids=PROMPT, ttl_seconds=0.0), "ttl_seconds"),
            (pin(tenant="default", token_ids=PROMPT, ttl_seconds=float("nan")), "ttl_seconds"),
            (pin(tenant="default", token_ids=PROMPT, key=common_pb2.CacheKey()), "key.weights_digest"),
        ):
            assert (await refused(rig.admin.PinPrefix(request), INVALID)).field == field
        for number in (0, 2**64 - 1):
            error = await refused(rig.admin.UnpinPrefix(admin_pb2.UnpinPrefixRequest(pin=number)), INVALID)
            assert error.field == "pin"
        made = await rig.admin.PinPrefix(pin(tenant="default", token_ids=PROMPT, key=KEY, ttl_seconds=50))
        (shown,) = (await rig.admin.ListPins(admin_pb2.ListPinsRequest())).pins
        assert 40 < shown.expires_in_seconds <= 50
        assert made.pinned_blocks == 2

    run(body)


def test_priority_decides_who_goes_first():
    """What was given a higher priority outlives what is used more recently; the number shows in the list."""

    async def body(rig):
        decoder = await rig.attach()
        await fill(rig, decoder, PROMPT)
        await fill(rig, decoder, [50, 51, 52, 53])
        request = admin_pb2.SetPriorityRequest(tenant="default", token_ids=PROMPT, priority=90)
        assert (await rig.admin.SetPriority(request)).changed_tokens == 8
        prefixes = (await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())).prefixes
        assert sorted(item.priority for item in prefixes) == [50, 90]
        await rig.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(num_blocks=1))
        assert await cached_tokens(rig, decoder, [50, 51, 52, 53]) == 0
        assert await cached_tokens(rig, decoder, PROMPT) == 7
        request = admin_pb2.SetPriorityRequest(tenant="default", token_ids=PROMPT, priority=101)
        assert (await refused(rig.admin.SetPriority(request), INVALID)).field == "priority"
        request = admin_pb2.SetPriorityRequest(tenant="default", token_ids=[99], priority=1)
        await refused(rig.admin.SetPriority(request), MISSING)
        request = admin_pb2.SetPriorityRequest(tenant="default", priority=1)
        assert (await refused(rig.admin.SetPriority(request), INVALID)).field == "token_ids"
        assert outcomes(rig, "SetPriority") == ["OK", "INVALID_ARGUMENT", "NOT_FOUND", "INVALID_ARGUMENT"]

    run(body)


def test_pins_and_priorities_of_an_approved_prefix():
    """The scope is named as a request names it: what it may not name is refused, and what lies there is kept and
    changed. The control: without the scope nothing is found."""

    async def body(rig):
        decoder = await rig.attach()
        await budget(rig, 8)
        public = common_pb2.ScopePrefix(scope=common_pb2.SCOPE_PUBLIC)
        await rig.admin.ApprovePrefix(admin_pb2.ApprovePrefixRequest(name="system", token_ids=PROMPT[:4]))
        await fill(rig, decoder, PROMPT, prefix=public)

        def pin(**fields):
            return rig.admin.PinPrefix(admin_pb2.PinPrefixRequest(tenant="default", token_ids=PROMPT, **fields))

        def set_to(priority, **fields):
            asked = {"tenant": "default", "token_ids": PROMPT, "priority": priority, **fields}
            return rig.admin.SetPriority(admin_pb2.SetPriorityRequest(**asked))

        group = common_pb2.ScopePrefix(scope=common_pb2.SCOPE_GROUP, group="team")
        for call in (pin, lambda **fields: set_to(3, **fields)):
            await refused(call(), MISSING)
            await refused(call(prefix=group), grpc.StatusCode.PERMISSION_DENIED)
            assert (await refused(call(prefix=common_pb2.ScopePrefix()), INVALID)).field == "prefix.scope"
        made = await pin(prefix=public)
        assert (made.pinned_tokens, made.pinned_blocks) == (8, 2)
        assert (await set_to(3, prefix=public)).changed_tokens == 8
        prefixes = (await rig.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())).prefixes
        assert [(item.tenant, item.priority, item.pinned) for item in prefixes] == [
            ("@public", 3, True),
            ("default", 3, True),
        ]
        assert await rig.is_sound()
        await rig.admin.WithdrawPrefix(admin_pb2.WithdrawPrefixRequest(name="system"))
        assert not (await rig.admin.ListPins(admin_pb2.ListPinsRequest())).pins
        assert await rig.is_quiet()

    run(body)


def test_explanations_of_each_kind():
    """Resident, diverged with what stands there, never seen, evicted, computing, another key: each by its name."""

    async def body(rig):
        assert (await explain(rig.admin, PROMPT)).miss_reason == admin_pb2.MISS_REASON_NEVER_SEEN
        decoder = await rig.attach()
        assert (await explain(rig.admin, PROMPT)).miss_reason == admin_pb2.MISS_REASON_NEVER_SEEN
        await fill(rig, decoder, PROMPT)
        found = await explain(rig.admin, PROMPT)
        assert (found.miss_reason, found.resident_tokens) == (admin_pb2.MISS_REASON_RESIDENT, 8)
        found = await explain(rig.admin, [*PROMPT[:6], 99, 98])
        assert (found.miss_reason, found.resident_tokens) == (admin_pb2.MISS_REASON_DIVERGED, 6)
        assert list(found.other_token_ids) == [7, 8]
        assert "diverges at token 6" in found.reason
        found = await explain(rig.admin, [*PROMPT, 9, 10, 11, 12])
        assert (found.miss_reason, found.resident_tokens) == (admin_pb2.MISS_REASON_NEVER_SEEN, 8)
        lease = (await decoder.ask(acquire=acquire_request(await rig.grant(), list(range(40, 52))))).acquire
        found = await explain(rig.admin, list(range(40, 52)))
        assert found.miss_reason == admin_pb2.MISS_REASON_COMPUTING
        assert lease.lease_id
        other = common_pb2.CacheKey()
        other.CopyFrom(KEY)
        other.revision = "another"
        found = await explain(rig.admin, PROMPT, key=other)
        assert (found.miss_reason, list(found.differing_key_parts)) == (
            admin_pb2.MISS_REASON_KEY_DIFFERS,
            ["revision"],
        )
        await rig.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(tenant="default"))
        found = await explain(rig.admin, PROMPT)
        assert (found.miss_reason, found.evicted_for) == (admin_pb2.MISS_REASON_EVICTED, "operator")
        assert 0 <= found.evicted_seconds_ago < 60
        assert "by an operator" in found.reason

    run(body)


def test_what_a_tenant_cached_before_the_cache_manager_began_is_not_denied():
    """Without a key, and with none seen in this life of the daemon, nothing is known; with the key all is told."""

    async def body(rig):
        decoder = await rig.attach()
        await budget(rig, 4)
        await fill(rig, decoder, PROMPT)
        rig.daemon._tenants.seen_keys.forget("default")  # as after a death of the daemon, which adopts the blocks
        answer = await explain(rig.admin, PROMPT)
        assert "Nothing is known: the tenant has acquired nothing since the cache manager began" in answer.reason
        pin = admin_pb2.PinPrefixRequest(tenant="default", token_ids=PROMPT)
        assert "key: not given" in (await refused(rig.admin.PinPrefix(pin), MISSING)).message
        assert (await explain(rig.admin, PROMPT, key=KEY)).resident_tokens == len(PROMPT)
        pin.key.CopyFrom(KEY)
        assert (await rig.admin.PinPrefix(pin)).pinned_tokens == len(PROMPT)

    run(body)


def test_explanation_names_the_scope_that_was_not_asked_for():
    """What lies in a group or in the public scope is told, by its scope alone; with the scope named it is resident."""

    async def body(rig):
        grant = await tenant_grant(rig, "acme")
        await rig.admin.CreateGroup(admin_pb2.CreateGroupRequest(group="team", tenants=["acme", "default"]))
        decoder = await rig.attach()
        span = common_pb2.ScopePrefix(scope=common_pb2.SCOPE_GROUP, group="team", num_tokens=8)
        await fill(rig, decoder, [*PROMPT, 20, 21, 22, 23], grant=grant, prefix=span)
        await cached_tokens(rig, decoder, [90])  # so that the other tenant has a key, too
        found = await explain(rig.admin, PROMPT)
        assert (found.miss_reason, found.other_scope) == (admin_pb2.MISS_REASON_OTHER_SCOPE, common_pb2.SCOPE_GROUP)
        found = await explain(rig.admin, PROMPT, prefix=span)
        assert (found.miss_reason, found.resident_tokens, found.scope_tokens) == (admin_pb2.MISS_REASON_RESIDENT, 8, 8)
        found = await explain(rig.admin, [*PROMPT[:6], 99, 98], prefix=span)
        assert found.miss_reason == admin_pb2.MISS_REASON_DIVERGED
        assert not found.other_token_ids  # they are another tenant's
        await rig.admin.UpdateGroup(admin_pb2.UpdateGroupRequest(group="team", remove_tenants=["default"]))
        found = await explain(rig.admin, PROMPT)
        assert found.miss_reason == admin_pb2.MISS_REASON_NEVER_SEEN
        await refused(explain(rig.admin, PROMPT, prefix=span), grpc.StatusCode.PERMISSION_DENIED)

    run(body)


def test_explanation_says_why_a_prefix_is_private():
    """A prefix that ends inside a block, a prompt whose tokens go over its border, and one that is like none; where all
    of it is shared, and where no scope was named, there is nothing to say."""

    async def body(rig):
        text = list(range(200, 222))  # five blocks and a half
        for name, count in (("part", 22), ("whole", 20)):
            await rig.admin.ApprovePrefix(admin_pb2.ApprovePrefixRequest(name=name, token_ids=text[:count]))
        decoder = await rig.attach()
        public = common_pb2.ScopePrefix(scope=common_pb2.SCOPE_PUBLIC)
        await cached_tokens(rig, decoder, [*text, 5], prefix=public)
        for prompt, told in (
            ([*text, 5], "2 of the prefix's 22 are private"),
            ([*text[:19], 77, 5], "of the 22 tokens approved as part the prompt has 16, and not all"),
            ([77, *text], "no approved prefix begins the prompt"),
            (text[:20], ""),
        ):
            found = await explain(rig.admin, prompt, prefix=public)
            assert told in found.private_reason
            assert bool(told) == bool(found.private_reason)
        assert not (await explain(rig.admin, [77, *text])).private_reason

    run(body)


def test_reader_is_told_why_but_not_which_tokens():
    """The same explanation without tokens; bad fields are named for both; looking changes no recency."""

    async def body(rig):
        reader = await reader_of(rig)
        decoder = await rig.attach()
        await fill(rig, decoder, PROMPT)
        await fill(rig, decoder, [50, 51, 52, 53])
        asked = [*PROMPT[:6], 99, 98]
        told, shown = await explain(rig.admin, asked), await explain(reader, asked)
        assert (shown.miss_reason, shown.resident_tokens) == (told.miss_reason, told.resident_tokens)
        assert told.other_token_ids and not shown.other_token_ids
        await rig.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(num_blocks=1))
        assert await cached_tokens(rig, decoder, [50, 51, 52, 53]) == 3  # the prompt that was explained went first
        for client in (reader, rig.admin):
            await refused(explain(client, PROMPT, tenant="nobody"), MISSING)
            for tokens, field in (([], "token_ids"), ([-1], "token_ids[0]"), ([2**31], "token_ids[0]")):
                assert (await refused(explain(client, tokens), INVALID)).field == field
            assert (await refused(explain(client, PROMPT, tenant="A b"), INVALID)).field == "tenant"
        assert [line["method"] for line in audit_lines(rig)] == ["EvictBlocks"]

    run(body)


def test_limits_of_the_hit_rate():
    """Zero before anything was admitted; then what was had, and what the best and an endless pool would have had."""

    async def body(rig):
        request = admin_pb2.GetHitRateLimitsRequest()
        assert (await rig.admin.GetHitRateLimits(request)).admissions == 0
        decoder = await rig.attach()
        for number in range(4):
            await fill(rig, decoder, [number * 100 + token for token in range(20)])
        for number in range(4):
            await fill(rig, decoder, [number * 100 + token for token in range(20)])
        limits = await rig.admin.GetHitRateLimits(request)
        assert limits.admissions == 8
        assert limits.hit_rate <= limits.best_hit_rate <= limits.infinite_hit_rate == pytest.approx(0.5)
        assert limits.best_hit_rate > limits.hit_rate  # 20 blocks take turns in a pool of fewer
        now = await rig.snapshot()
        assert now.total_blocks == BLOCKS < 20
        assert limits.hit_rate == pytest.approx(now.hit_tokens / now.prompt_tokens)

    run(body)
