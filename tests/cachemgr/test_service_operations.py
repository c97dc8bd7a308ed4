"""Acquire, report, fork and credit over a real socket: what they answer, and what is refused alone."""

from __future__ import annotations

import pytest

from common.tokens import pack_tokens
from tessera.admin.v1 import admin_pb2
from tessera.cache.v1 import cache_pb2
from tessera.common.v1 import common_pb2
from tests.cachemgr.daemon_rig import BLOCKS, acquire_request, ids, report_request
from tests.cachemgr.rig import eventually_async
from tests.cachemgr.service_rig import CODES, PROMPT, compute, failed, run


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tokens": b""}, "acquire.tokens"),
        ({"tokens": b"\1\0\0"}, "acquire.tokens"),
        ({"tokens": b"\xff\xff\xff\xff"}, "acquire.tokens"),
        ({"request_id": ""}, "acquire.request_id"),
        ({"request_id": "x" * 129}, "acquire.request_id"),
        ({"request_id": "a\nb"}, "acquire.request_id"),
        ({"priority": 101}, "acquire.priority"),
        ({"sample": 2**32 - 1}, "acquire.sample"),
        ({"key": common_pb2.CacheKey()}, "key.weights_digest"),
    ],
)
def test_malformed_acquire_is_refused_alone_by_field(fields, field):
    """Garbage in an acquire is INVALID_ARGUMENT for it, changes nothing, and the next acquire works."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        request = acquire_request(grant, PROMPT)
        for name, value in fields.items():
            request.ClearField(name)
            if isinstance(value, common_pb2.CacheKey):
                request.key.CopyFrom(value)
            else:
                setattr(request, name, value)
        failure = failed(await decoder.ask(acquire=request), "INVALID_ARGUMENT", field)
        assert failure.metadata["field"] == field
        assert (await rig.snapshot()).leases == 0
        await compute(decoder, grant, PROMPT)

    run(body)


@pytest.mark.parametrize(
    "garbage", [b"\1", b"\1\0\0\0\0", pack_tokens([-1]), pack_tokens([0]), pack_tokens([BLOCKS + 1])]
)
def test_garbage_credit_is_refused_alone(garbage):
    """A returned list that holds no credit of the session changes nothing; the same report without it works."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        acquired = await compute(decoder, grant, PROMPT, release=False)
        answer = await decoder.ask(report=report_request(returned_blocks=garbage))
        failed(answer, "INVALID_ARGUMENT")
        assert (await rig.snapshot()).leases == 1
        done = await decoder.ask(report=report_request({"lease_id": acquired.lease_id, "release": True}))
        assert not done.report.refusals
        await eventually_async(rig.is_quiet)

    run(body)


@pytest.mark.parametrize(
    "fields",
    [
        {"taken_blocks": b"\1"},
        {"taken_blocks": pack_tokens([-5])},
        {"taken_blocks": pack_tokens([BLOCKS + 1])},
        {"taken_blocks": pack_tokens([2**31 - 1])},
        {"tokens": b"\1\2"},
        {"tokens": pack_tokens([-1])},
        {"sealed_tokens": 2**32 - 1},
    ],
)
def test_bad_sequence_of_a_report_loses_its_own_lease_alone(fields):
    """One garbled sequence is refused by name and its lease ends; its neighbour in the same message goes on."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        bad = await compute(decoder, grant, PROMPT[:4], release=False)
        good = await compute(decoder, grant, PROMPT[4:8], release=False, request_id="r2")
        done = await decoder.ask(
            report=report_request({"lease_id": bad.lease_id, **fields}, {"lease_id": good.lease_id, "copied": True})
        )
        assert [item.lease_id for item in done.report.refusals] == [bad.lease_id]
        assert done.report.refusals[0].failure.code == CODES["INVALID_ARGUMENT"]
        leases = await rig.admin.ListLeases(admin_pb2.ListLeasesRequest())
        assert [item.lease for item in leases.leases] == [good.lease_id]
        assert await rig.is_sound()

    run(body)


def test_counters_of_a_report_are_bounded():
    """No single report can push a counter towards its limit."""

    async def body(rig):
        decoder = await rig.attach()
        failed(await decoder.ask(report=report_request(generated_tokens=2**63)), "INVALID_ARGUMENT", "generated_tokens")
        await decoder.ask(report=report_request(generated_tokens=7, preemptions=2, queued_requests=3))
        now = await rig.snapshot()
        assert (now.generated_tokens, now.preemptions, now.queued_requests) == (7, 2, 3)

    run(body)


def test_prompt_that_never_fits_and_one_that_does_not_fit_now():
    """Both are RESOURCE_EXHAUSTED with needed and usable numbers, told apart by reason; a smaller one is served."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        never = list(range(1, (BLOCKS + 1) * 4 + 1))
        failure = failed(await decoder.ask(acquire=acquire_request(grant, never)), "RESOURCE_EXHAUSTED")
        assert (failure.reason, failure.metadata["needed"]) == ("EXCEEDS_POOL", str(BLOCKS + 1))
        held = await compute(decoder, grant, never[: (BLOCKS - 1) * 4], release=False)
        failure = failed(await decoder.ask(acquire=acquire_request(grant, [9] * 8)), "RESOURCE_EXHAUSTED")
        assert failure.reason == "POOL_FULL"
        await decoder.ask(report=report_request({"lease_id": held.lease_id, "release": True}))
        await compute(decoder, grant, [9] * 8)

    run(body)


def test_full_pool_asks_others_for_their_unused_credit_once():
    """A session that sits on credit is asked for it when another cannot be served, and not again before it reports."""

    async def body(rig):
        hoarder, needy, grant = await rig.attach(name="d0"), await rig.attach(name="d1"), await rig.grant()
        credit = (await hoarder.ask(credit=cache_pb2.CreditRequest(wanted_blocks=6))).credit
        prompt = list(range(1, 17))  # 4 blocks; 2 are free
        for _ in range(2):
            assert (
                failed(await needy.ask(acquire=acquire_request(grant, prompt)), "RESOURCE_EXHAUSTED").reason
                == "POOL_FULL"
            )
        push = await hoarder.push()
        assert (push.sequence, push.reclaim.num_blocks) == (0, 2)
        await hoarder.ask(report=report_request(returned_blocks=credit[: 2 * 4]))
        assert hoarder.pushes == []
        await compute(needy, grant, prompt)

    run(body)


def test_session_that_gets_no_credit_at_all_makes_others_return_theirs():
    """A decoder without room to grow is relieved by those who hold blocks unused."""

    async def body(rig):
        hoarder, needy = await rig.attach(name="d0"), await rig.attach(name="d1")
        credit = (await hoarder.ask(credit=cache_pb2.CreditRequest(wanted_blocks=BLOCKS))).credit
        answer = await needy.ask(report=report_request(wanted_blocks=3))
        assert answer.credit == b""
        assert (await hoarder.push()).reclaim.num_blocks == 3
        await hoarder.ask(report=report_request(returned_blocks=credit))
        answer = await needy.ask(report=report_request(wanted_blocks=3))
        assert len(ids(answer.credit)) == 3

    run(body)


def test_fork_shares_whole_blocks_and_copies_the_tail():
    """Branches hold the parent's whole blocks and their own copy of its tail; without room there is none of them."""

    async def body(rig):
        decoder, grant = await rig.attach(), await rig.grant()
        parent = await compute(decoder, grant, PROMPT[:6], release=False)
        request = cache_pb2.ForkRequest(lease_id=parent.lease_id, samples=[1, 2], num_tokens=6)
        branches = (await decoder.ask(fork=request)).fork.branches
        assert [ids(item.blocks)[0] for item in branches] == [ids(parent.blocks)[0]] * 2
        assert len({ids(parent.blocks)[1], *(ids(item.blocks)[1] for item in branches)}) == 3
        assert all(item.copy.num_tokens == 2 for item in branches)
        many = cache_pb2.ForkRequest(lease_id=parent.lease_id, samples=list(range(3, 20)), num_tokens=6)
        assert not (await decoder.ask(fork=many)).fork.branches
        assert await rig.is_sound()

    run(body)


@pytest.mark.parametrize("samples", [[], [1] * 257, [2**31]])
def test_malformed_fork_is_refused(samples):
    """A fork of no, too many or impossible samples is INVALID_ARGUMENT."""

    async def body(rig):
        decoder = await rig.attach()
        request = cache_pb2.ForkRequest(lease_id=1, samples=samples, num_tokens=1)
        failed(await decoder.ask(fork=request), "INVALID_ARGUMENT", "fork.samples")

    run(body)


def test_sessions_cannot_touch_each_others_leases():
    """A lease of another session is unknown to this one: to its reports and to its forks."""

    async def body(rig):
        owner, thief, grant = await rig.attach(name="d0"), await rig.attach(name="d1"), await rig.grant()
        lease = await compute(owner, grant, PROMPT, release=False)
        done = await thief.ask(report=report_request({"lease_id": lease.lease_id, "release": True}))
        assert [item.lease_id for item in done.report.refusals] == [lease.lease_id]
        answer = await thief.ask(fork=cache_pb2.ForkRequest(lease_id=lease.lease_id, samples=[1], num_tokens=4))
        failed(answer, "NOT_FOUND")
        assert (await rig.snapshot()).leases == 1
        done = await owner.ask(report=report_request({"lease_id": lease.lease_id, "release": True}))
        assert not done.report.refusals

    run(body)
