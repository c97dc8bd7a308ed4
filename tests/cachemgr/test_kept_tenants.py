"""Kept branches among tenants: quotas, floors and wider scopes."""

from __future__ import annotations

import pytest

from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from common.errors import ResourceExhausted
from tests.cachemgr.core_rig import span_of
from tests.cachemgr.kept_rig import KeptRig

B = 4
A, OTHER = TenantId("a"), TenantId("b")
TEAM = "@group:team"


def test_kept_blocks_count_as_the_tenants_own_and_give_way_below_its_ceiling() -> None:
    """At the ceiling a tenant's own conversations make room for its work, another tenant's do not."""
    rig = KeptRig(num_blocks=32)
    rig.manager.set_quota(A, Quota(ceiling_blocks=6))
    rig.kept(range(100, 100 + 3 * B), b"other", tenant="b")
    rig.kept(range(10, 10 + 5 * B), b"k", no_store=True)
    sequence = rig.acquire(range(50, 50 + 4 * B))
    assert [view.num_blocks for view in rig.manager.list_branches().items] == [3, 0]
    rig.check()
    rig.finish(sequence)
    with pytest.raises(ResourceExhausted) as raised:
        rig.acquire(range(500, 500 + 7 * B))
    assert raised.value.reason == "QUOTA_EXCEEDED"
    rig.drop(b"k")
    rig.drop(b"other", tenant="b")
    rig.quiet()


@pytest.mark.parametrize("no_store", [False, True])
def test_a_flood_takes_no_kept_block_below_another_tenants_floor(no_store: bool) -> None:
    """A tenant at its floor keeps its conversation whole; positive control: without a floor it gives way."""
    rig = KeptRig(num_blocks=12)
    rig.manager.set_quota(OTHER, Quota(floor_blocks=4))
    rig.kept(range(100, 100 + 4 * B), b"k", tenant="b", no_store=no_store)
    with pytest.raises(ResourceExhausted) as raised:
        rig.acquire(range(9 * B))
    assert (raised.value.reason, raised.value.needed, raised.value.usable) == ("EXCEEDS_USABLE", 9, 8)
    assert [view.num_blocks for view in rig.manager.list_branches().items] == [4]
    sequence = rig.acquire(range(8 * B))
    answer = rig.report(wanted=3)
    assert len(answer.credit) == 0, "not for a decoder's credit either"
    rig.finish(sequence)
    rig.manager.set_quota(OTHER, Quota())
    sequence = rig.acquire(range(200, 200 + 9 * B))
    assert [view.num_blocks for view in rig.manager.list_branches().items] == [0]
    rig.finish(sequence)
    rig.drop(b"k", tenant="b")
    rig.quiet()


def test_a_branch_that_stands_above_its_floor_gives_only_what_is_above() -> None:
    """Six blocks that are published nowhere, a floor of two: a flood gets four, continuing finds two."""
    rig = KeptRig(num_blocks=12)
    rig.manager.set_quota(OTHER, Quota(floor_blocks=2))
    rig.kept(range(100, 100 + 6 * B), b"k", tenant="b", no_store=True)
    with pytest.raises(ResourceExhausted):
        rig.acquire(range(11 * B))
    sequence = rig.acquire(range(10 * B))
    assert [view.num_blocks for view in rig.manager.list_branches().items] == [2]
    assert rig.manager.quota_usage(OTHER).used_blocks == 2
    rig.check()
    rig.finish(sequence)
    rig.manager.evict(everything=False, num_blocks=10)
    again = rig.resume(b"k", range(5), tenant="b")
    assert again.computed == 2 * B
    rig.finish(again)
    rig.drop(b"k", tenant="b")
    rig.quiet()


def test_the_older_branch_of_a_tenant_at_its_floor_is_passed_by() -> None:
    """A younger one of another tenant gives way instead."""
    rig = KeptRig(num_blocks=12)
    rig.manager.set_quota(OTHER, Quota(floor_blocks=4))
    rig.kept(range(100, 100 + 4 * B), b"old", tenant="b", no_store=True)
    rig.kept(range(300, 300 + 4 * B), b"young", tenant="c", no_store=True)
    rig.finish(rig.acquire(range(8 * B)))
    assert [view.num_blocks for view in rig.manager.list_branches().items] == [4, 0]
    rig.drop(b"old", tenant="b")
    rig.drop(b"young", tenant="c")
    rig.quiet()


@pytest.mark.parametrize("cut", [0, 2 * B + 1, 2 * B, B + 2, 3])
def test_a_conversation_goes_on_in_the_scope_that_it_was_begun_in(cut: int) -> None:
    """Two blocks of a group, the tail private: continued from anywhere, without naming the group again."""
    rig = KeptRig(num_blocks=32)
    tokens = list(range(10, 10 + 3 * B + 2))
    rig.keep(rig.acquire(tokens, scope=TEAM, num_tokens=2 * B), b"k", ttl_ns=10**12)
    sequence = rig.resume(b"k", [7, 8], base_tokens=cut)
    known = cut or len(tokens)
    sequence.scope, sequence.prefix_tokens = TEAM, min(2 * B, known // B * B)
    assert sequence.tokens == [*tokens[:known], 7, 8]
    assert sequence.computed == (known if known >= 2 * B else known // B * B), "part of a group's block is none of it"
    rig.compute(sequence)
    rig.check()
    rig.finish(sequence)
    rig.drop(b"k")
    rig.quiet()


def test_a_private_conversation_puts_nothing_into_a_wider_scope() -> None:
    """Whatever prefix comes with its continuation: its first tokens are those of the branch, which nobody approved."""
    rig = KeptRig(num_blocks=32)
    rig.kept(range(10, 10 + 2 * B), b"k", ttl_ns=10**12)
    rig.finish(rig.resume(b"k", [7] * B, prefix=span_of(TEAM, B)))
    assert {view.tenant for view in rig.manager.list_prefixes().items} == {A}
    rig.finish(rig.acquire(range(50, 50 + 2 * B), scope=TEAM, num_tokens=B))  # the control: a new sequence does
    assert {view.tenant for view in rig.manager.list_prefixes().items} == {A, TEAM}


@pytest.mark.parametrize("cut", [2 * B + 1, 2 * B, B + 2, 3])
def test_a_branch_is_cut_within_its_wider_prefix(cut: int) -> None:
    """Of a block of the group that is cut, nothing is held; it is read or computed by whoever goes on."""
    rig = KeptRig(num_blocks=32)
    tokens = list(range(10, 10 + 3 * B + 2))
    rig.keep(rig.acquire(tokens, scope=TEAM, num_tokens=2 * B), b"k", ttl_ns=10**12)
    rig.manager.rollback_kept(A, b"k", cut, now_ns=0)
    rig.check()
    sequence = rig.resume(b"k", [7, 8])
    sequence.scope, sequence.prefix_tokens = TEAM, min(2 * B, cut // B * B)
    rig.compute(sequence)
    rig.check()
    rig.finish(sequence)
    rig.drop(b"k")
    rig.quiet()


def test_the_end_of_a_group_ends_what_was_begun_in_it() -> None:
    """Its blocks are unlisted; the conversation is NOT_FOUND, and another of the tenant stays."""
    rig = KeptRig(num_blocks=32)
    tokens = list(range(10, 10 + 3 * B))
    rig.keep(rig.acquire(tokens, scope=TEAM, num_tokens=2 * B), b"k", ttl_ns=10**12)
    rig.kept(range(50, 50 + B), b"own")
    rig.manager.purge(TenantId(TEAM))
    rig.check()
    assert rig.branches == [B]
    rig.drop(b"own")
    rig.quiet()


@pytest.mark.parametrize("floor", [7, 6])
def test_a_branch_that_would_free_nothing_for_another_keeps_its_blocks(floor: int) -> None:
    """What stands above its tenant's floor is to be had by that tenant's idle blocks already: dropping it would give no
    more, and nothing changes. With a lower floor it gives, and the other begins."""
    rig = KeptRig(num_blocks=14, block_tokens=2)
    rig.manager.set_quota(TenantId("a"), Quota(floor_blocks=floor))
    rig.kept(range(8), b"talk", no_store=True)
    rig.finish(rig.acquire(range(50, 58)))
    before = rig.manager.snapshot()
    if floor == 7:
        with pytest.raises(ResourceExhausted):
            rig.acquire(range(900, 916), tenant="b")
        assert rig.manager.snapshot() == before
        assert rig.resume(b"talk", [1]).computed == 8
    else:
        assert len(rig.acquire(range(900, 916), tenant="b").table) == 8
    rig.check()
