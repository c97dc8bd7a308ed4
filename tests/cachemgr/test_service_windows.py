"""Layer groups over a real socket: each answer names the window blocks of its blocks, and operators see counts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from common.arena_wire import fetch_arena
from common.faults import Faults
from common.layout import KvLayout
from common.tokens import pack_tokens
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tests.cachemgr.daemon_rig import Rig, SessionClient, acquire_request, attach_request, ids, report_request, running
from tests.cachemgr.rig import eventually_async

GROUPS: dict[str, Any] = {"num_layers": 3, "window_tokens": 6, "window_layers": (0, 2)}
LAYOUT = KvLayout.of(3, 1, 8, 4, "float32", 6, (0, 2))
POOL = 30
WINDOWS = LAYOUT.num_window_blocks(POOL)
PROMPT = list(range(1, 18))  # four whole blocks and a token


def run(body: Callable[[Rig], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def inside() -> None:
        async with running(**{"pool_blocks": POOL, **options}) as rig:
            await body(rig)

    asyncio.run(inside())


async def grouped(rig: Rig, name: str = "d0") -> SessionClient:
    """A decoder whose layers 0 and 2 have a window of 6 tokens."""
    client = SessionClient(rig.internal)
    response = await client.ask(attach=attach_request(name=name, **GROUPS))
    assert response.WhichOneof("result") == "attach", response.failure
    assert response.attach.layout_fingerprint == LAYOUT.fingerprint()
    client.attached = response.attach
    return client


def pairs(response: cache_pb2.SessionResponse) -> dict[int, int]:
    """Block -> its window block, as an answer says it."""
    numbers = ids(response.window_blocks)
    return dict(zip(numbers[::2], numbers[1::2], strict=True))


async def served(rig: Rig, client: SessionClient, tokens: list[int], **fields: Any) -> list[int]:
    """A whole request; the blocks that it had."""
    grant = fields.pop("grant", None) or await rig.grant()
    lease = (await client.ask(acquire=acquire_request(grant, tokens, **fields))).acquire
    done = {"lease_id": lease.lease_id, "sealed_tokens": len(tokens), "copied": True, "release": True}
    assert not (await client.ask(report=report_request(done))).report.refusals
    return ids(lease.blocks)


def test_a_table_comes_with_a_window_block_for_each_of_its_blocks() -> None:
    """Distinct ones of the pool; credit comes with its own, and nothing else has any of them."""

    async def body(rig: Rig) -> None:
        client = await grouped(rig)
        answer = await client.ask(acquire=acquire_request(await rig.grant(), PROMPT))
        table = pairs(answer)
        assert sorted(table) == sorted(ids(answer.acquire.blocks)) and len(table) == 5
        credit = await client.ask(credit=cache_pb2.CreditRequest(wanted_blocks=2))
        lent = pairs(credit)
        assert sorted(lent) == sorted(ids(credit.credit)) and len(lent) == 2
        both = [*table.values(), *lent.values()]
        assert len(set(both)) == 7 and set(both) <= set(range(1, WINDOWS + 1))
        report = await client.ask(report=report_request(wanted_blocks=1))
        assert len(pairs(report)) == 1 and set(pairs(report)).isdisjoint({*table, *lent})
        assert await rig.is_sound()

    run(body)


def test_a_pool_of_bytes_holds_both_kinds_of_blocks_in_them() -> None:
    """As many blocks as lie in so many bytes with their window blocks; without groups there would be more."""
    size = 40 * LAYOUT.block_bytes

    async def body(rig: Rig) -> None:
        client = await grouped(rig)
        assert client.attached is not None
        count = client.attached.num_blocks
        null_blocks = LAYOUT.block_bytes + LAYOUT.window_group.block_bytes
        assert count == LAYOUT.blocks_in(size) < 40
        assert size - LAYOUT.bytes_per_block - 4096 < LAYOUT.arena_bytes(count) - null_blocks <= size + 4096
        now = await rig.snapshot()
        assert (now.total_blocks, now.windows.total_blocks) == (count, LAYOUT.num_window_blocks(count))

    run(body, pool_blocks=None, pool_bytes=size)


def test_without_groups_no_answer_names_any() -> None:
    """Positive control, and no counters of them either."""

    async def body(rig: Rig) -> None:
        client = await rig.attach()
        answer = await client.ask(acquire=acquire_request(await rig.grant(), PROMPT))
        assert len(ids(answer.acquire.blocks)) == 5 and answer.window_blocks == b""
        assert not (await rig.snapshot()).HasField("windows")
        listed = (await rig.admin.ListBlocks(admin_pb2.ListBlocksRequest())).blocks
        assert not any(block.window_block for block in listed)

    run(body)


def test_a_copy_names_the_window_block_of_its_source() -> None:
    """The decoder copies both: the source was not in its table, and the target is new."""

    async def body(rig: Rig) -> None:
        client = await grouped(rig)
        before = await served(rig, client, PROMPT[:10])
        answer = await client.ask(acquire=acquire_request(await rig.grant(), [*PROMPT[:10], 99]))
        plan = answer.acquire.copy
        assert (answer.acquire.cached_tokens, plan.source) == (10, before[2])
        assert {plan.source, plan.target} <= set(pairs(answer))
        assert pairs(answer)[plan.source] != pairs(answer)[plan.target]

    run(body)


def test_branches_come_with_theirs() -> None:
    """The blocks that they share and the copies of the tail."""

    async def body(rig: Rig) -> None:
        client = await grouped(rig)
        first = await client.ask(acquire=acquire_request(await rig.grant(), PROMPT[:10]))
        lease = first.acquire.lease_id
        await client.ask(report=report_request({"lease_id": lease, "sealed_tokens": 10}))
        answer = await client.ask(fork=cache_pb2.ForkRequest(lease_id=lease, samples=[1, 2], num_tokens=10))
        named = pairs(answer)
        for branch in answer.fork.branches:
            assert {*ids(branch.blocks), branch.copy.source, branch.copy.target} <= set(named)
        shared = ids(first.acquire.blocks)[0]
        assert named[shared] == pairs(first)[shared]

    run(body)


def test_a_rolled_back_table_and_one_made_writable_come_with_theirs() -> None:
    """The copy's target is new; what a commit replaces is named too."""

    async def body(rig: Rig) -> None:
        client = await grouped(rig)
        first = await client.ask(acquire=acquire_request(await rig.grant(), PROMPT[:10]))
        lease = first.acquire.lease_id
        await client.ask(report=report_request({"lease_id": lease, "sealed_tokens": 10}))
        committed = await client.ask(commit=cache_pb2.CommitRequest(lease_id=lease, num_tokens=10))
        assert committed.WhichOneof("result") == "commit" and committed.window_blocks == b""
        answer = await client.ask(make_writable=cache_pb2.MakeWritableRequest(lease_id=lease))
        plan, table = answer.make_writable.copy, ids(answer.make_writable.blocks)
        assert plan.target == table[2] and {*table, plan.source} == set(pairs(answer))
        await client.ask(report=report_request({"lease_id": lease, "copied": True}))
        answer = await client.ask(rollback=cache_pb2.RollbackRequest(lease_id=lease, num_tokens=9))
        assert set(ids(answer.rollback.blocks)) <= set(pairs(answer))
        assert await rig.is_sound()

    run(body)


def test_a_replacement_comes_with_the_window_block_of_the_listed_block() -> None:
    """Two decoders compute the same: the second one switches to the blocks of the first, and their window blocks."""

    async def body(rig: Rig) -> None:
        clients, grant = [await grouped(rig, name) for name in ("d0", "d1")], await rig.grant()
        answers = [await client.ask(acquire=acquire_request(grant, PROMPT)) for client in clients]
        reports = []
        for client, answer in zip(clients, answers, strict=True):
            sealed = {"lease_id": answer.acquire.lease_id, "sealed_tokens": 16}
            reports.append(await client.ask(report=report_request(sealed)))
        swap = reports[1].report.replacements[0]
        assert ids(swap.blocks) == ids(answers[0].acquire.blocks)[:4]
        named = pairs(reports[1])
        assert named == {block: pairs(answers[0])[block] for block in ids(swap.blocks)}

    run(body)


def test_what_another_tenant_left_in_window_blocks_is_to_be_zeroed() -> None:
    """Each window block of the first tenant that the second one gets is named once; its own again never are."""

    async def body(rig: Rig) -> None:
        await rig.admin.CreateTenant(admin_pb2.CreateTenantRequest(tenant="other"))
        key = (await rig.admin.CreateKey(admin_pb2.CreateKeyRequest(tenant="other"))).key
        client, other = await grouped(rig), await rig.grant(key)
        first = await client.ask(acquire=acquire_request(await rig.grant(), PROMPT, no_store=True))
        assert first.window_scrub == b""
        done = {"lease_id": first.acquire.lease_id, "sealed_tokens": 17, "release": True}
        await client.ask(report=report_request(done))
        second = await client.ask(acquire=acquire_request(other, PROMPT, no_store=True))
        mine, theirs = set(pairs(first).values()), set(pairs(second).values())
        assert set(ids(second.window_scrub)) == mine & theirs and mine & theirs
        done = {"lease_id": second.acquire.lease_id, "sealed_tokens": 17, "release": True}
        await client.ask(report=report_request(done))
        third = await client.ask(acquire=acquire_request(other, PROMPT, no_store=True))
        assert set(pairs(third).values()) == theirs and third.window_scrub == b""

    run(body)


@pytest.mark.parametrize("poisoned", [True, False])
def test_freed_window_blocks_become_nan_under_the_poison_knob(poisoned: bool) -> None:
    """With the knob every freed window block reads as NaN through a decoder's mapping; without it bytes stay."""

    async def body(rig: Rig) -> None:
        client = await grouped(rig)
        assert client.attached is not None
        fd, info = await asyncio.to_thread(fetch_arena, rig.paths.arena_socket, client.attached.arena_token)
        assert info.sizes == LAYOUT.sizes(POOL) and os.fstat(fd).st_size == LAYOUT.arena_bytes(POOL)
        answer = await client.ask(acquire=acquire_request(await rig.grant(), PROMPT[:4], no_store=True))
        size = LAYOUT.window_group.block_bytes
        offset = LAYOUT.window_offset(POOL) + pairs(answer)[ids(answer.acquire.blocks)[0]] * size
        os.pwrite(fd, bytes(size), offset)
        await client.ask(report=report_request({"lease_id": answer.acquire.lease_id, "release": True}))
        values = np.frombuffer(os.pread(fd, size, offset), np.float32)
        assert bool(np.isnan(values).all()) is poisoned
        os.close(fd)

    run(body, faults=Faults(poison_on_free=poisoned))


def test_operators_see_how_many_window_blocks_are_free_needed_and_taken() -> None:
    """Prompts fill the pool: what nobody needs any more is taken, and each listed block says what it has."""

    async def body(rig: Rig) -> None:
        client = await grouped(rig)
        now = (await rig.snapshot()).windows
        assert (now.total_blocks, now.free_blocks, now.needed_blocks, now.reclaimed_blocks) == (WINDOWS, WINDOWS, 0, 0)
        assert now.block_bytes == LAYOUT.window_group.block_bytes
        for number in range(5):
            await served(rig, client, [number, *PROMPT[:15]])
        answer = await client.ask(acquire=acquire_request(await rig.grant(), [77, *PROMPT[:11]]))
        now = (await rig.snapshot()).windows
        assert now.needed_blocks == 3 and now.reclaimed_blocks > 0
        assert (now.shortened_hits, now.shortened_tokens) == (0, 0)
        await served(rig, client, [0, *PROMPT[:11], 99])
        now = (await rig.snapshot()).windows
        assert (now.shortened_hits, now.shortened_tokens) == (1, 12)
        listed = (await rig.admin.ListBlocks(admin_pb2.ListBlocksRequest())).blocks
        attached = {block.block: block.window_block for block in listed if block.window_block}
        assert len(attached) == len(set(attached.values())) == now.total_blocks - now.free_blocks
        assert pairs(answer).items() <= attached.items()
        assert await rig.is_sound()

    run(body)


def test_a_session_that_goes_on_hears_the_window_blocks_of_all_that_it_holds() -> None:
    """Of its tables, copies and credit: its mirror may lack what an answer said that it never heard."""

    async def body(rig: Rig) -> None:
        client, grant = await grouped(rig), await rig.grant()
        assert client.attached is not None
        fd, info = await asyncio.to_thread(fetch_arena, rig.paths.arena_socket, client.attached.arena_token)
        os.close(fd)
        answer = await client.ask(acquire=acquire_request(grant, PROMPT))
        credit = await client.ask(credit=cache_pb2.CreditRequest(wanted_blocks=2))
        client.call.cancel()

        async def is_away() -> bool:
            sessions = (await rig.admin.ListSessions(admin_pb2.ListSessionsRequest())).sessions
            return [session.away for session in sessions] == [True]

        await eventually_async(is_away)
        held = cache_pb2.HeldSequence(
            lease_id=answer.acquire.lease_id, tokens=pack_tokens(PROMPT), blocks=answer.acquire.blocks, sealed_tokens=8
        )
        resume = cache_pb2.SessionResume(
            session_id=client.attached.session_id,
            epoch=answer.epoch,
            resume_token=client.attached.resume_token,
            arena_nonce=info.nonce,
            sequences=[held],
            credit_blocks=credit.credit,
        )
        request = attach_request(**GROUPS)
        request.resume.CopyFrom(resume)
        again = await (await rig.session()).ask(attach=request)
        assert again.attach.resumed and pairs(again) == {**pairs(answer), **pairs(credit)}

    run(body, lease_seconds=60.0, grace_seconds=60.0)


def test_what_is_lent_to_one_sequence_comes_with_a_window_block() -> None:
    """Where floors leave no credit, a lease that lacks a block is answered with one of its tenant's, and its window
    block; whoever stands still for nobody is answered with neither."""

    async def body(rig: Rig) -> None:
        client = await grouped(rig)
        granted = await client.ask(acquire=acquire_request(await rig.grant(), PROMPT))
        lease, floor = granted.acquire, {"floor_blocks": POOL}
        await rig.admin.UpdateTenant(admin_pb2.UpdateTenantRequest(tenant=lease.tenant, **floor))
        for number in range(100, 800, 100):
            await served(rig, client, list(range(number, number + 16)))
        assert not (await rig.snapshot()).free_blocks
        answer = await client.ask(report=report_request(wanted_blocks=1))
        assert not answer.report.growths and not answer.credit
        lacking = np.array([lease.lease_id, lease.lease_id], "<u8").tobytes()
        answer = await client.ask(report=report_request(wanted_blocks=1, lacking_leases=lacking))
        (growth,) = answer.report.growths
        assert growth.lease_id == lease.lease_id and len(ids(growth.blocks)) == 2
        assert sorted(pairs(answer)) == sorted(ids(growth.blocks))

    run(body)
