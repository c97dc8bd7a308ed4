"""Layered scopes: a prefix that many tenants share, and private tails below it that none of them shares."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemgr.blocks import BlockState
from cachemgr.ids import TenantId
from cachemgr.layers import layered_root
from cachemgr.nodes import Node
from common.errors import InvalidArgument, ResourceExhausted
from tests.cachemgr.core_rig import Rig, Running, pack, root_of, span_of

B = 4
PUBLIC = "@public"
TEAM = "@group:team"
SYSTEM = list(range(2 * B))  # two blocks that everybody begins with


def tail(number: int, length: int = B + 2) -> list[int]:
    """Tokens that no other number shares."""
    return list(range(1000 * number, 1000 * number + length))


def owned(rig: Rig, owner: str) -> int:
    """Indexed blocks of a tenant or a scope."""
    views = rig.manager.list_prefixes(limit=1000, tenant=TenantId(owner)).items
    return sum(len(view.blocks) for view in views)


def serve(rig: Rig, tokens: list[int], tenant: str, num_tokens: int = 2 * B, scope: str = PUBLIC) -> int:
    """A request whose first tokens lie in a scope; its cached tokens."""
    cached = rig.serve(tokens, tenant=tenant, scope=scope, num_tokens=num_tokens)
    rig.check()
    return cached


def test_256_tenants_share_one_system_prompt_and_nothing_else() -> None:
    """The prompt of all is resident once, each tail once for its tenant; a second round finds each its own."""
    rig = Rig(num_blocks=1024)
    for number in range(1, 257):
        cached = rig.serve([*SYSTEM, *tail(number)], tenant=f"t{number}", scope=PUBLIC, num_tokens=2 * B)
        assert cached == (0 if number == 1 else 2 * B)
    rig.check()
    assert owned(rig, PUBLIC) == 2
    assert {owned(rig, f"t{number}") for number in range(1, 257)} == {2}
    assert rig.manager.snapshot().indexed_blocks == 2 + 256 * 2
    for number in range(1, 257):
        cached = rig.serve([*SYSTEM, *tail(number)], tenant=f"t{number}", scope=PUBLIC, num_tokens=2 * B)
        assert cached == len(SYSTEM) + B + 1
    rig.quiet()


def test_nobody_hits_the_private_tail_of_another() -> None:
    """B has the shared prefix of A's very prompt and no token more; A itself has all of it."""
    rig = Rig()
    prompt = [*SYSTEM, *tail(1)]
    assert serve(rig, prompt, "a") == 0
    assert serve(rig, prompt, "b") == 2 * B
    assert serve(rig, prompt, "a") == len(prompt) - 1
    assert serve(rig, prompt, "b") == len(prompt) - 1  # its own now
    assert (owned(rig, PUBLIC), owned(rig, "a"), owned(rig, "b")) == (2, 2, 2)


def test_a_scope_is_found_by_nobody_who_does_not_name_it() -> None:
    """Private requests, another group and another prefix length find nothing of a scope, and it nothing of theirs."""
    rig = Rig(num_blocks=64)
    prompt = [*SYSTEM, *tail(1)]
    assert serve(rig, prompt, "a") == 0
    assert rig.serve(prompt, tenant="a") == 0  # all of it private: a tree of its own
    assert serve(rig, prompt, "a", scope=TEAM) == 0
    assert serve(rig, prompt, "a", num_tokens=B) == B  # the prefix is shared, the tail hangs elsewhere
    assert serve(rig, prompt, "a") == len(prompt) - 1  # each finds itself
    assert rig.serve(prompt, tenant="a") == len(prompt) - 1
    assert serve(rig, prompt, "a", scope=TEAM) == len(prompt) - 1


@pytest.mark.parametrize("num_tokens", [2 * B - 1, 2 * B, 2 * B + 1, 3 * B - 1])
def test_a_prefix_is_cut_to_whole_blocks(num_tokens: int) -> None:
    """What of a scope's tokens does not fill a block is private: another tenant computes it."""
    rig = Rig()
    whole = num_tokens // B * B
    prompt = [*SYSTEM, *tail(1, 2 * B)]
    serve(rig, prompt, "a", num_tokens)
    assert owned(rig, PUBLIC) == whole // B
    assert serve(rig, prompt, "b", num_tokens) == whole
    assert serve(rig, prompt, "a", num_tokens) == len(prompt) - 1


def test_less_than_a_block_in_a_scope_is_private() -> None:
    """A prefix without a whole block leaves the request as private as one without it."""
    rig = Rig()
    prompt = [*SYSTEM, *tail(1)]
    serve(rig, prompt, "a", B - 1)
    assert owned(rig, PUBLIC) == 0
    assert serve(rig, prompt, "b", B - 1) == 0
    assert rig.serve(prompt, tenant="a") == len(prompt) - 1


@pytest.mark.parametrize("length", [2 * B - 1, 2 * B, 2 * B + 1])
def test_a_prompt_that_lies_wholly_in_a_scope(length: int) -> None:
    """Whole blocks are shared; the partly filled tail, and what is generated after it, stays with its tenant."""
    rig = Rig()
    prompt = list(range(length))
    sequence = rig.acquire(prompt, tenant="a", scope=TEAM, num_tokens=length)
    rig.compute(sequence)
    rig.report(rig.message(sequence), wanted=2)
    for token in range(500, 500 + B):
        rig.grow(sequence, token)
    rig.finish(sequence)
    rig.check()
    assert owned(rig, TEAM) == length // B
    answered = [*prompt, *range(500, 500 + B), 7]
    assert serve(rig, answered, "b", length, TEAM) == length // B * B
    assert serve(rig, answered, "a", length, TEAM) >= length + B - 1


def test_a_match_inside_the_prefix_is_copied() -> None:
    """Two prefixes that differ inside a block share the tokens before, by a copy of the scope's block."""
    rig = Rig()
    serve(rig, [*SYSTEM, *tail(1)], "a")
    other = [*SYSTEM[: B + 2], 90, 91, *tail(2)]
    sequence = rig.acquire(other, tenant="b", scope=PUBLIC, num_tokens=2 * B)
    assert sequence.computed == B + 2
    rig.finish(sequence)
    rig.check()
    assert owned(rig, PUBLIC) == 3
    assert serve(rig, other, "c") == 2 * B


def test_two_that_computed_the_same_prefix_end_with_one_copy() -> None:
    """The second one's prefix is replaced by the published one, its tail stays its own."""
    rig = Rig()
    first = rig.acquire([*SYSTEM, *tail(1)], tenant="a", scope=PUBLIC, num_tokens=2 * B)
    second = rig.acquire([*SYSTEM, *tail(2)], tenant="b", scope=PUBLIC, num_tokens=2 * B)
    third = rig.acquire([*SYSTEM, *tail(1)], tenant="a", scope=PUBLIC, num_tokens=2 * B)
    for sequence in (first, second, third):
        rig.compute(sequence)
        rig.report(rig.message(sequence), applied_revision=0)
        rig.check()
    assert first.table[:2] == second.table[:2] == third.table[:2]
    assert first.table[:3] == third.table[:3]  # its own tail, too
    assert second.table[2] != first.table[2]
    for sequence in (first, second, third):
        rig.finish(sequence)
    rig.report()
    rig.quiet()
    assert rig.manager.snapshot().indexed_blocks == 2 + 2 + 2


def test_a_prefix_is_computed_and_published_in_parts() -> None:
    """Chunk by chunk: what of the prefix is sealed serves another tenant before the rest is there."""
    rig = Rig()
    sequence = rig.acquire([*SYSTEM, *tail(1)], tenant="a", scope=PUBLIC, num_tokens=2 * B)
    rig.compute(sequence, B + 1)
    rig.report(rig.message(sequence))
    beside = rig.acquire([*SYSTEM, *tail(2)], tenant="b", scope=PUBLIC, num_tokens=2 * B)
    assert beside.computed == B
    rig.check()
    rig.finish(sequence)
    rig.finish(beside)
    rig.report()
    rig.quiet()
    assert owned(rig, PUBLIC) == 2


@pytest.mark.parametrize("computed", [1, B - 1, B, B + 1, 2 * B - 1])
def test_a_sequence_that_ends_within_its_prefix_leaves_whole_blocks_alone(computed: int) -> None:
    """A partly filled block of a scope is published nowhere: neither there nor in the tenant's own tree."""
    rig = Rig()
    sequence = rig.acquire([*SYSTEM, *tail(1)], tenant="a", scope=PUBLIC, num_tokens=2 * B)
    rig.compute(sequence, computed)
    rig.report(rig.message(sequence, release=True))
    rig.quiet()
    assert (owned(rig, PUBLIC), owned(rig, "a")) == (computed // B, 0)
    for tenant in ("a", "b"):
        assert (
            rig.acquire([*SYSTEM, *tail(1)], tenant=tenant, scope=PUBLIC, num_tokens=2 * B).computed
            == computed // B * B
        )


def test_a_sequence_that_goes_on_publishing_does_not_carry_tails_along() -> None:
    """A node that grows while its sequence is computed is cut where a tail of another tenant hangs."""
    rig = Rig(num_blocks=64)
    long = [*SYSTEM, *range(50, 50 + 4 * B)]
    growing = rig.acquire([*long, 1], tenant="a", scope=PUBLIC, num_tokens=6 * B)
    for end in range(B, 6 * B + 1, B):
        rig.compute(growing, end)
        rig.report(rig.message(growing))
        number = end // B
        serve(rig, [*long[:end], *tail(number)], f"t{number}", end)
        assert serve(rig, [*long[:end], *tail(number)], f"t{number}", end) == end + B + 1
    for number in range(1, 7):
        assert serve(rig, [*long[: number * B], *tail(number)], f"t{number}", number * B) == number * B + B + 1
    assert owned(rig, PUBLIC) == 6


def test_a_longer_prefix_of_the_scope_goes_on_where_a_tail_hangs() -> None:
    """Tails hang at their own length of the prefix, whatever the scope has beyond; none of them is lost by a split."""
    rig = Rig(num_blocks=64)
    long = [*SYSTEM, *range(50, 50 + 2 * B)]
    serve(rig, [*long, *tail(1)], "a", 4 * B)
    serve(rig, [*long[: 3 * B], *tail(2)], "b", 3 * B)
    serve(rig, [*long[: 2 * B], *tail(3)], "c", 2 * B)
    assert owned(rig, PUBLIC) == 4
    assert serve(rig, [*long, *tail(1)], "a", 4 * B) == 4 * B + B + 1
    assert serve(rig, [*long[: 3 * B], *tail(2)], "b", 3 * B) == 3 * B + B + 1
    assert serve(rig, [*long[: 2 * B], *tail(3)], "c", 2 * B) == 2 * B + B + 1
    longer = [*long, *range(70, 70 + B)]
    serve(rig, [*longer, *tail(4)], "d", 5 * B)  # grows beyond a node that trees hang at
    assert owned(rig, PUBLIC) == 5
    assert serve(rig, [*long, *tail(1)], "a", 4 * B) == 4 * B + B + 1


def test_a_prefix_outlives_every_tail_below_it() -> None:
    """Pressure takes tails first and the prefix last; no tail stays behind without its prefix."""
    rig = Rig(num_blocks=16)
    for number in range(1, 4):
        serve(rig, [*SYSTEM, *tail(number, 2 * B)], f"t{number}")
    assert owned(rig, PUBLIC) == 2
    for left in range(7, 1, -1):
        assert rig.manager.evict(num_blocks=1) == 1
        rig.check()
        assert owned(rig, PUBLIC) == 2
        assert rig.manager.snapshot().indexed_blocks == left
    assert rig.manager.evict(num_blocks=9) == 2
    rig.quiet()
    assert rig.manager.snapshot().free_blocks == 16


def test_use_of_a_tail_keeps_its_prefix_young() -> None:
    """When the tails are gone, a prefix that was just used stays longer than an older private prompt."""
    rig = Rig(num_blocks=32)
    serve(rig, [*SYSTEM, *tail(1)], "a")
    rig.serve(tail(9, 2 * B), tenant="z")
    serve(rig, [*SYSTEM, *tail(1)], "a")
    assert rig.manager.evict(tenant=TenantId("a")) == 2
    assert rig.manager.evict(num_blocks=2) == 2
    assert (owned(rig, PUBLIC), owned(rig, "z")) == (2, 0)


def test_evicting_one_tenant_spares_the_scope_and_the_others() -> None:
    """`evict(tenant)` takes that tenant's tails alone."""
    rig = Rig()
    serve(rig, [*SYSTEM, *tail(1)], "a")
    serve(rig, [*SYSTEM, *tail(2)], "b")
    assert rig.manager.evict(tenant=TenantId("a")) == 2
    assert (owned(rig, PUBLIC), owned(rig, "a"), owned(rig, "b")) == (2, 0, 2)
    assert rig.manager.evict(tenant=TenantId(PUBLIC)) == 0  # b's tail hangs below it
    assert rig.manager.evict(tenant=TenantId("b")) == 2
    assert rig.manager.evict(tenant=TenantId(PUBLIC)) == 2
    rig.quiet()


def test_purge_of_a_tenant_leaves_the_scope() -> None:
    """Its running request keeps its blocks and publishes nothing more, into the scope neither."""
    rig = Rig()
    serve(rig, [*SYSTEM, *tail(2)], "b")
    running = rig.acquire([*SYSTEM, *tail(1, 3 * B)], tenant="a", scope=PUBLIC, num_tokens=2 * B)
    rig.compute(running, 3 * B)
    rig.report(rig.message(running))
    fresh = rig.acquire([*tail(5, 2 * B), *tail(6)], tenant="a", scope=PUBLIC, num_tokens=2 * B)
    assert rig.manager.purge(TenantId("a")) == 1
    rig.check()
    rig.finish(running)
    rig.finish(fresh)
    assert (owned(rig, PUBLIC), owned(rig, "a"), owned(rig, "b")) == (2, 0, 2)
    assert serve(rig, [*SYSTEM, *tail(2)], "b") == 2 * B + B + 1
    rig.quiet()


def test_purge_of_a_scope_takes_what_hangs_below_it() -> None:
    """Nothing stays resident that nobody can hit; other scopes and private prompts stay."""
    rig = Rig(num_blocks=64)
    serve(rig, [*SYSTEM, *tail(1)], "a")
    serve(rig, [*SYSTEM, *tail(1)], "a", scope=TEAM)
    rig.serve(tail(3), tenant="a")
    running = rig.acquire([*SYSTEM, *tail(2, 3 * B)], tenant="b", scope=TEAM, num_tokens=2 * B)
    rig.compute(running, 4 * B)
    rig.report(rig.message(running))
    assert rig.manager.purge(TenantId(TEAM)) == 2 + 2 + 2
    rig.check()
    assert (owned(rig, TEAM), owned(rig, "b")) == (0, 0)
    assert serve(rig, [*SYSTEM, *tail(1)], "a") == 2 * B + B + 1
    assert rig.serve(tail(3), tenant="a") == len(tail(3)) - 1
    rig.finish(running)
    assert serve(rig, [*SYSTEM, *tail(2, 3 * B)], "b", scope=TEAM) == 0
    rig.quiet()


def test_a_tail_that_was_in_use_at_the_purge_is_free_when_its_holder_ends() -> None:
    """Anchored blocks that a lease holds are unlisted, and freed with it."""
    rig = Rig()
    running = rig.acquire([*SYSTEM, *tail(2, 3 * B)], tenant="b", scope=TEAM, num_tokens=2 * B)
    rig.compute(running)
    rig.report(rig.message(running))
    rig.manager.purge(TenantId(TEAM))
    assert rig.manager.snapshot().indexed_blocks == 0
    assert rig.manager.snapshot().active_blocks == len(running.table)
    rig.report(rig.message(running, release=True))
    assert rig.manager.snapshot().free_blocks == 32


def test_evicting_everything_empties_layers_too() -> None:
    """No order of layers keeps a block from `evict(everything)`."""
    rig = Rig(num_blocks=64)
    for number in range(1, 6):
        serve(rig, [*SYSTEM, *tail(number)], f"t{number}")
        serve(rig, [*SYSTEM, *tail(number)], f"t{number}", scope=TEAM)
    assert rig.manager.evict(everything=True) == 2 + 10 + 2 + 10
    assert rig.manager.snapshot().free_blocks == 64


def test_evicting_everything_reaches_a_prefix_that_nobody_used_again() -> None:
    """A prefix becomes evictable only with the last tail below it, in the same call."""
    rig = Rig()
    sequence = rig.acquire([*SYSTEM, *tail(1)], tenant="a", scope=PUBLIC, num_tokens=2 * B)
    for end in (B, 2 * B, 3 * B):
        rig.compute(sequence, end)
        rig.report(rig.message(sequence))
    rollback(rig, sequence, 1)
    rig.run_copy(sequence)
    rig.report(rig.message(sequence, release=True))
    indexed = rig.manager.snapshot().indexed_blocks
    assert indexed >= 3
    assert rig.manager.evict(everything=True) == indexed
    assert rig.manager.snapshot().indexed_blocks == 0


def test_a_request_without_reading_still_publishes_into_the_scope() -> None:
    """`no_read` matches nothing and ends with the published copy; `no_store` publishes nothing into a scope."""
    rig = Rig()
    hidden = rig.acquire([*SYSTEM, *tail(1)], tenant="a", scope=PUBLIC, num_tokens=2 * B, no_store=True)
    rig.finish(hidden)
    assert rig.manager.snapshot().indexed_blocks == 0
    unread = rig.acquire([*SYSTEM, *tail(1)], tenant="a", scope=PUBLIC, num_tokens=2 * B, no_read=True)
    rig.finish(unread)
    assert serve(rig, [*SYSTEM, *tail(1)], "b") == 2 * B
    rig.quiet()


@pytest.mark.parametrize("keep", [1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B, 3 * B + 1])
@pytest.mark.parametrize("computed", [1, B + 1, 2 * B + 1, 4 * B])
@pytest.mark.parametrize("warm", [True, False])
def test_rollback_across_the_border_makes_what_follows_private(keep: int, computed: int, warm: bool) -> None:
    """A sequence that was cut back into its prefix goes on privately: no other tenant ever hits what it says there."""
    rig = Rig()
    prompt = [*SYSTEM, *tail(1, 2 * B)]
    if warm:
        serve(rig, prompt, "a")
    running = rig.acquire(prompt, tenant="b", scope=PUBLIC, num_tokens=2 * B)
    rig.compute(running, computed)
    rig.report(rig.message(running), wanted=6)
    rollback(rig, running, keep)
    rig.check()
    for token in range(600, 600 + 3 * B):
        assert rig.grow(running, token)
    rig.finish(running)
    rig.report(returned=rig.credit[rig.session])
    rig.quiet()
    again = [*prompt[:keep], *range(600, 600 + 3 * B), 5]
    whole = min(keep, 2 * B) // B * B
    for tenant, scope, num_tokens, shared in (("c", "", 0, 0), ("d", PUBLIC, whole, whole), ("e", PUBLIC, 2 * B, keep)):
        other = rig.acquire(again, tenant=tenant, scope=scope, num_tokens=num_tokens)
        assert other.computed <= min(shared, num_tokens)
        assert other.computed == min(shared, num_tokens) or not warm
        rig.finish(other)
    scope = PUBLIC if whole else ""
    assert rig.serve(again, tenant="b", scope=scope, num_tokens=whole) == len(again) - 1


def rollback(rig: Rig, sequence: Running, keep: int) -> None:
    """Cuts a sequence as its decoder does."""
    plan = rig.manager.rollback(sequence.session, sequence.lease_id, keep, 0)
    sequence.tokens = sequence.tokens[:keep]
    sequence.reported = keep
    sequence.computed = min(sequence.computed, keep)
    size = rig.block_tokens
    sequence.table = sequence.table[: -(-keep // size)]
    sequence.prefix_tokens = min(sequence.prefix_tokens, keep // size * size)
    if plan is not None:
        sequence.table[sequence.computed // size] = plan.target
        sequence.copy = plan


@pytest.mark.parametrize("count", [1, B, B + 2, 2 * B, 2 * B + 3, 3 * B, 3 * B + 2])
def test_branches_across_the_border_go_their_own_private_way(count: int) -> None:
    """A branch shares what it was given; what it adds is its tenant's, also where the parent's prefix was longer."""
    rig = Rig(num_blocks=64)
    prompt = [*SYSTEM, *tail(1, 2 * B)]
    parent = rig.acquire(prompt, tenant="a", scope=PUBLIC, num_tokens=2 * B)
    rig.compute(parent)
    rig.report(rig.message(parent), wanted=10)
    branches = rig.fork(parent, [1, 2], count)
    rig.check()
    for number, branch in enumerate(branches):
        for token in range(600 + 100 * number, 600 + 100 * number + 2 * B):
            assert rig.grow(branch, token)
        rig.run_copy(branch)
        rig.finish(branch)
    rig.finish(parent)
    rig.report(returned=rig.credit[rig.session])
    rig.quiet()
    whole = min(count, 2 * B) // B * B
    said = [*prompt[:count], *range(600, 600 + 2 * B), 5]
    assert rig.serve(said, tenant="c", scope=PUBLIC, num_tokens=2 * B) == min(count, 2 * B)
    assert rig.serve(said, tenant="a", scope=PUBLIC if whole else "", num_tokens=whole) == len(said) - 1


def test_a_full_pool_refuses_a_layered_request_without_a_trace() -> None:
    """A lease that cannot be had leaves no tree, no hold and no anchor behind."""
    rig = Rig(num_blocks=6)
    holder = rig.acquire(tail(8, 4 * B), tenant="z")
    before = rig.manager.snapshot()
    with pytest.raises(ResourceExhausted):
        rig.acquire([*SYSTEM, *tail(1)], tenant="a", scope=PUBLIC, num_tokens=2 * B)
    assert rig.manager.snapshot() == before
    rig.check()
    rig.finish(holder)


@pytest.mark.parametrize(
    ("scope", "num_tokens"), [(PUBLIC, -1), (PUBLIC, len(SYSTEM) + 1)]
)  # fmt: skip
def test_a_prefix_longer_than_the_prompt_is_refused(scope: str, num_tokens: int) -> None:
    """The error says what is allowed."""
    rig = Rig()
    with pytest.raises(InvalidArgument) as caught:
        rig.acquire(SYSTEM, tenant="a", scope=scope, num_tokens=num_tokens)
    assert caught.value.field == "prefix.num_tokens"
    assert "0..8" in str(caught.value)


def test_views_show_which_node_a_tail_hangs_below() -> None:
    """Blocks of a prefix belong to the scope, also while they are computed; a tail's parent is the scope's node."""
    rig = Rig()
    running = rig.acquire([*SYSTEM, *tail(1)], tenant="a", scope=TEAM, num_tokens=2 * B)
    owners = {view.block: view.tenant for view in rig.manager.list_blocks(limit=32, state=BlockState.ACTIVE).items}
    assert [owners[block] for block in running.table] == [TEAM, TEAM, "a", "a"]
    rig.finish(running)
    nodes = {view.node: view for view in rig.manager.list_prefixes().items}
    below = [view for view in nodes.values() if view.tenant == "a" and view.start_token == 2 * B]
    assert len(below) == 1
    above = nodes[below[0].parent]
    assert (above.tenant, above.children, above.parent) == (TEAM, 1, 0)


KINDS = ["serve", "serve", "start", "start", "step", "step", "step", "end", "roll", "roll", "fork", "evict", "purge"]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["", PUBLIC, PUBLIC, TEAM]),
        st.integers(0, 8),
        st.integers(0, 3),
        st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=8),
    ),
    min_size=6,
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS, st.sampled_from([128, 1]))
def test_any_history_of_layers_keeps_every_invariant(
    actions: list[tuple[str, str, str, int, int, list[int]]], bits: int
) -> None:
    """Prompts that collide in all ways, in three scopes, on a pool too small: cells and structures stay right."""
    rig = Rig(num_blocks=14, block_tokens=2, name_bits=bits)
    for kind, tenant, scope, number, which, tokens in actions:
        chosen = rig.sequences[which % len(rig.sequences)] if rig.sequences else None
        with contextlib.suppress(ResourceExhausted):
            act(rig, kind, chosen, tenant, scope, number, tokens)
        rig.check()
    for sequence in list(rig.sequences):
        rig.report(rig.message(sequence, release=True))
    rig.report()
    rig.quiet()
    rig.manager.evict(everything=True)
    assert rig.manager.snapshot().free_blocks == 14
    assert not rig.manager._state.index.forest.trees


def act(rig: Rig, kind: str, chosen: Running | None, tenant: str, scope: str, number: int, tokens: list[int]) -> None:
    """One step of a history. Copies run at once."""
    num_tokens = min(number, len(tokens)) if scope else 0
    if kind == "serve":
        rig.serve(tokens, tenant=tenant, scope=scope, num_tokens=num_tokens)
    elif kind == "start":
        rig.run_copy(rig.acquire(tokens, tenant=tenant, scope=scope, num_tokens=num_tokens))
    elif kind == "evict":
        rig.manager.evict(num_blocks=max(number, 1))
    elif kind == "purge" and number < 4:
        rig.manager.purge(TenantId(scope or tenant))
    elif chosen is not None and kind == "step":
        rig.compute(chosen, min(len(chosen.tokens), chosen.computed + max(number // 2, 1)))
        rig.report(rig.message(chosen), applied_revision=0)
    elif chosen is not None and kind == "end":
        rig.report(rig.message(chosen, release=True))
    elif chosen is not None and kind == "roll":
        rig.report(rig.message(chosen))
        rollback(rig, chosen, min(max(number, 1), len(chosen.tokens)))
        rig.run_copy(chosen)
    elif chosen is not None and kind == "fork":
        rig.report(rig.message(chosen))
        if chosen.computed:
            for branch in rig.fork(chosen, [1], min(max(number, 1), chosen.computed)):
                rig.run_copy(branch)


def anchor_of(rig: Rig) -> Node:
    """A node that a tree hangs below."""
    return next(node for node in rig.manager._state.index.forest.nodes.values() if node.anchored)


@pytest.mark.parametrize("kind", ["count", "lost", "moved", "owner"])
def test_integrity_finds_a_broken_layer(kind: str) -> None:
    """A wrong count, a tree that hangs nowhere or at a wrong place, and a prefix of another owner are found."""
    rig = Rig()
    serve(rig, [*SYSTEM, *tail(1)], "a")
    running = rig.acquire([*SYSTEM, *tail(1), 5], tenant="a", scope=PUBLIC, num_tokens=2 * B)
    rig.check()
    forest = rig.manager._state.index.forest
    node = anchor_of(rig)
    layered = next(tree for tree in forest.trees.values() if tree.anchor is node)
    if kind == "count":
        node.anchored += 1
    elif kind == "lost":
        layered.anchor = None
    elif kind == "moved":
        layered.anchor = next(iter(layered.root.children))
    else:
        rig.manager._state.pool.owner[running.table[0]] = 1 + rig.manager._state.pool.owner[running.table[0]]
    assert rig.manager.check_integrity()


def test_the_root_of_a_tail_binds_tenant_scope_and_prefix() -> None:
    """The same tail under another tenant, scope or prefix has another root, so that none finds another's."""
    roots = {
        layered_root(root_of(tenant), span_of(scope, 0).root, pack(tokens))
        for tenant in ("a", "b")
        for scope in (PUBLIC, TEAM)
        for tokens in (SYSTEM, SYSTEM[:B], [*SYSTEM[:-1], 99])
    }
    assert len(roots) == 12
    assert {len(root) for root in roots} == {32}
