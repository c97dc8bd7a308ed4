"""Withdrawal of one approved prefix: what can be reached through it alone goes, whatever else is approved stays."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from cachemgr.ids import TenantId
from cachemgr.nodes import common_tokens
from cachemgr.tenant_store import TenantStore
from cachemgr.tenants import Tenants
from tessera.admin.v1 import admin_pb2
from tessera.common.v1 import common_pb2
from tests.cachemgr.core_rig import Rig, pack
from tests.cachemgr.daemon_rig import report_request, running
from tests.cachemgr.kept_rig import KeptRig
from tests.cachemgr.test_scope_service import lease, refusal, serve, tenants

B = 4
PUBLIC = "@public"
SHORT = list(range(2 * B))
LONG = list(range(4 * B))  # begins with SHORT
OTHER = list(range(100, 100 + 3 * B))


class Approved:
    """What may be named after a withdrawal, in tokens."""

    def __init__(self, *prefixes: list[int]) -> None:
        self.prefixes = [pack(prefix) for prefix in prefixes]

    def covers(self, tokens: bytes) -> bool:
        return any(prefix.startswith(tokens) for prefix in self.prefixes)

    def ends(self, tokens: bytes) -> bool:
        return tokens in self.prefixes


def ask(rig: Rig, prefix: list[int], tenant: str, *, tail: int = B) -> int:
    """A request below a prefix; its cached tokens."""
    tokens = [*prefix, *range(900, 900 + tail + 1)]
    cached = rig.serve(tokens, tenant=tenant, scope=PUBLIC, num_tokens=len(prefix))
    rig.check()
    return cached


@pytest.mark.parametrize(
    ("stays", "gone", "unlisted"),
    [
        ([OTHER], SHORT, 2 + 1),  # nothing in common: its blocks and the whole one and the rest of its tail
        ([SHORT], LONG, 2 + 1),  # what is longer than the one that stays
        ([LONG], SHORT, 1),  # its blocks begin the longer one; its tails hang where nobody may name
        ([OTHER, LONG], SHORT, 1),
    ],
)
def test_only_what_nobody_may_name_any_more_goes(stays: list[list[int]], gone: list[int], unlisted: int) -> None:
    """The others are hits as long as before, with their tails; of the one that went, what it shares with them."""
    rig = Rig(num_blocks=64)
    for prefix in (*stays, gone):
        ask(rig, prefix, "a")
    before = [ask(rig, prefix, "a") for prefix in stays]
    assert before == [len(prefix) + B for prefix in stays]  # prefix and tail
    assert ask(rig, gone, "a") == len(gone) + B  # the control: it was there
    assert rig.manager.prune(TenantId(PUBLIC), Approved(*stays, gone)) == 0
    dropped = rig.manager.prune(TenantId(PUBLIC), Approved(*stays))
    rig.check()
    assert dropped == unlisted + 1  # and the tail's last block, which is filled in part
    assert [ask(rig, prefix, "a") for prefix in stays] == before
    shared = max(common_tokens(pack(prefix), pack(gone)) for prefix in stays)
    assert ask(rig, gone, "b") == shared // B * B
    rig.quiet()


def test_a_prefix_is_cut_inside_a_node() -> None:
    """One node holds what stays and what goes: it is split; and a running sequence keeps what it reads."""
    rig = Rig(num_blocks=64)
    held = rig.acquire([*LONG, 1, 2, 3], tenant="a", scope=PUBLIC, num_tokens=len(LONG))
    rig.compute(held, len(LONG) + 3)
    rig.report(rig.message(held))
    assert rig.manager.prune(TenantId(PUBLIC), Approved(SHORT)) == 2
    rig.check()
    rig.finish(held)
    assert rig.manager.snapshot().cached_blocks == 2  # nothing was published after it
    assert ask(rig, SHORT, "b") == len(SHORT)
    rig.quiet()


def test_a_path_of_more_nodes_than_python_has_stack_for_is_pruned() -> None:
    """One prefix, and at each of its blocks another that parts there: a node for each block."""
    depth = sys.getrecursionlimit() + 100
    rig = Rig(num_blocks=4 * depth)
    longest = list(range(depth * B))
    rig.serve([*longest, 1], tenant="a", scope=PUBLIC, num_tokens=len(longest))
    for blocks in range(1, depth):
        other = [*longest[: blocks * B], *([0] * B)]
        rig.serve([*other, 1], tenant="a", scope=PUBLIC, num_tokens=len(other))
    kept = [*longest[:-B], *([0] * B)]
    assert rig.manager.prune(TenantId(PUBLIC), Approved(kept)) > depth
    rig.check()
    assert ask(rig, kept, "b") == len(kept)
    rig.quiet()


@pytest.mark.parametrize("stays", [[], SHORT, LONG])
def test_what_ran_below_a_withdrawn_prefix_is_not_kept(stays: list[int]) -> None:
    """It would bring the prefix back when it goes on; below one that stays it is kept, and goes on."""
    rig = KeptRig(num_blocks=64)
    held = rig.acquire([*LONG, 1, 2, 3], tenant="a", scope=PUBLIC, num_tokens=len(LONG))
    rig.manager.prune(TenantId(PUBLIC), Approved(*([stays] if stays else [])))
    (answer,) = rig.keep(held, b"k", ttl_ns=10**12).kept
    assert answer.name == (b"k" if stays == LONG else b"")
    assert len(rig.branches) == (stays == LONG)
    assert bool(rig.manager.list_prefixes(tenant=TenantId(PUBLIC)).items) == (stays == LONG)
    rig.check()
    if stays == LONG:
        rig.drop(b"k")
    rig.quiet()


def test_a_purge_of_the_scope_is_the_prune_that_leaves_nothing() -> None:
    """The control of the counts above."""
    rig = Rig(num_blocks=64)
    ask(rig, SHORT, "a")
    ask(rig, OTHER, "b")
    assert rig.manager.prune(TenantId(PUBLIC), Approved()) == 2 + 3 + 2 + 2
    assert rig.manager.snapshot().cached_blocks == 0
    assert rig.manager.prune(TenantId("@nobody"), Approved()) == 0


def test_withdrawal_over_the_wire_spares_the_other_approvals() -> None:
    """Requests and kept conversations below another approval go on from the cache; below the withdrawn one both end.
    Digests alone are known of either, and a restart in between changes nothing."""
    one, two = list(range(16)), [*range(16), *range(500, 516)]  # two begins with one
    other = list(range(300, 320))

    async def body(rig: Any) -> None:
        decoder = await rig.attach()
        first, second = await tenants(rig, "a", "b")
        for name, tokens in (("one", one), ("two", two), ("other", other)):
            await rig.admin.ApprovePrefix(admin_pb2.ApprovePrefixRequest(name=name, token_ids=tokens))

        def public(tokens: list[int]) -> Any:
            return {"prefix": common_pb2.ScopePrefix(scope=common_pb2.SCOPE_PUBLIC, num_tokens=len(tokens))}

        handles = {}
        for name, tokens in (("two", two), ("other", other)):
            held = await lease(decoder, first, [*tokens, 7, 8], **public(tokens))
            done = {"lease_id": held.lease_id, "sealed_tokens": len(tokens) + 2, "release": True, "keep_seconds": 60.0}
            handles[name] = (await decoder.ask(report=report_request(done))).report.kept[0].handle
        assert await serve(decoder, second, [*two, 9], **public(two)) == len(two)
        done = await rig.admin.WithdrawPrefix(admin_pb2.WithdrawPrefixRequest(name="two"))
        assert done.evicted_blocks == 4 + 1 + 1  # of the 8 blocks of `two` the second half, and two tails
        assert (await refusal(decoder, second, [*two, 9], **public(two))).reason == "PREFIX_NOT_APPROVED"
        assert (await refusal(decoder, first, [7], base_handle=handles["two"])).reason == "BRANCH_NOT_FOUND"
        assert await serve(decoder, second, [*one, 9], **public(one)) == len(one)
        assert await serve(decoder, second, [*other, 9], **public(other)) == len(other)
        again = await lease(decoder, first, [7], base_handle=handles["other"])
        assert again.cached_tokens == len(other) + 2
        await decoder.ask(report=report_request({"lease_id": again.lease_id, "release": True, "copied": False}))
        assert await rig.is_sound()

    async def inside() -> None:
        async with running(pool_blocks=64) as rig:
            await body(rig)

    asyncio.run(inside())


def test_what_an_approval_covers_outlives_a_restart(tmp_path: Any) -> None:
    """Digests of an approval's parts come back from the file; one of an older build covers nothing until it is approved
    again."""
    tokens = pack(list(range(40)))
    store = TenantStore(tmp_path / "tenants.db")
    for name, count in (("kept", 40), ("gone", 32)):
        Tenants(store).approvals.approve(name, tokens[: 4 * count], 5)
    store.close()
    store = TenantStore(tmp_path / "tenants.db")
    approvals = Tenants(store).approvals
    left = approvals.remaining(approvals.withdraw("gone"), 16)
    assert left.covers(tokens[: 4 * 32])
    assert not left.covers(pack([*range(31), 77]))
    assert not left.covers(pack(range(48)))
    assert left.ends(tokens[: 4 * 32])  # 40 tokens are two whole blocks too
    assert not approvals.remaining(left.withdrawn, 8).ends(tokens[: 4 * 32])
    assert approvals.remaining(left.withdrawn, 8).ends(tokens[: 4 * 40])
    assert approvals.remaining(left.withdrawn, 8).ends(tokens[: 4 * 16])  # nobody's end: where one was cut back to
    store._db.execute("UPDATE approvals SET steps = x''")
    store.close()
    store = TenantStore(tmp_path / "tenants.db")
    approvals = Tenants(store).approvals
    assert not approvals.remaining(left.withdrawn, 16).covers(tokens[: 4 * 32])
    approvals.approve("kept", tokens, 6)
    assert approvals.remaining(left.withdrawn, 16).covers(tokens[: 4 * 32])
    store.close()
