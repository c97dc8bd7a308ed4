"""What the cache manager promises to decoders, one promise a test."""

from __future__ import annotations

import numpy as np
import pytest

from cachemgr.blocks import BlockState
from cachemgr.ids import LeaseId, SessionId, TenantId
from cachemgr.results import SequenceReport
from common.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from tests.cachemgr.core_rig import NO_BLOCKS, Rig, pack, root_of

B = 4


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    """Tokens that no prompt with another `first` shares."""
    return list(range(first, first + num_tokens))


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_repeated_prompt_hits_all_but_its_last_token(blocks: int, more: int) -> None:
    """Prompts of kB-1, kB and kB+1 tokens, sent three times, find everything but their last token."""
    rig = Rig()
    tokens = prompt(blocks * B + more)
    cached = [rig.serve(tokens) for _ in range(3)]
    assert cached == [0, len(tokens) - 1, len(tokens) - 1]
    shot = rig.manager.snapshot()
    assert (shot.misses, shot.hits, shot.hit_tokens) == (1, 2, 2 * (len(tokens) - 1)) or len(tokens) == 1
    rig.quiet()


def test_one_token_prompt_never_hits() -> None:
    """There is nothing but the last token, so nothing is cached."""
    rig = Rig()
    assert [rig.serve([3]), rig.serve([3])] == [0, 0]


def test_match_inside_a_block_is_a_copy() -> None:
    """Two prompts that differ inside the third block share two blocks and copy the tokens before the difference."""
    rig = Rig()
    rig.serve(prompt(3 * B))
    sequence = rig.acquire([*prompt(2 * B + 3), 99, 98])
    assert sequence.computed == 2 * B + 3
    assert sequence.copy is not None
    assert sequence.copy.num_tokens == 3
    assert sequence.copy.target == sequence.table[2]
    assert sequence.copy.source not in sequence.table
    rig.check()
    rig.finish(sequence)
    assert rig.manager.snapshot().cow_copies == 1
    rig.quiet()
    assert rig.serve(prompt(3 * B + 1)) == 3 * B  # the first one is still whole


def test_source_of_a_copy_is_held_until_the_copy_is_reported() -> None:
    """Pressure cannot take the block that a decoder is about to copy from."""
    rig = Rig(num_blocks=4)
    rig.serve(prompt(2 * B))
    sequence = rig.acquire([*prompt(B + 2), 99])
    assert sequence.copy is not None
    assert rig.manager.evict(num_blocks=10) == 0
    rig.check()
    rig.run_copy(sequence)
    rig.report(rig.message(sequence))
    assert rig.manager.evict(num_blocks=10) == 1


def test_copy_is_given_up_where_its_source_is_the_missing_block() -> None:
    """A prompt that fills the pool is admitted although its own last block would be needed as a source."""
    rig = Rig(num_blocks=3)
    rig.serve(prompt(3 * B))
    assert rig.serve(prompt(3 * B)) == 2 * B
    rig.quiet()


def test_eviction_takes_exactly_what_is_missing_from_the_tail() -> None:
    """After exactly one block of X had to go, X still has its other seven."""
    rig = Rig(num_blocks=16)
    rig.serve(prompt(8 * B))
    rig.serve(prompt(4 * B, 1000))
    rig.serve(prompt(5 * B, 2000))
    assert rig.manager.snapshot().evictions == 1
    assert rig.serve([*prompt(8 * B), 7]) == 7 * B
    rig.quiet()


def test_eviction_is_least_recently_used_first() -> None:
    """A prefix that was used again outlives one that was not."""
    rig = Rig(num_blocks=8)
    for first in (0, 100, 200):
        rig.serve(prompt(2 * B, first))
    rig.serve(prompt(2 * B, 0))
    rig.manager.evict(num_blocks=2)
    assert [rig.serve(prompt(2 * B, first)) > 0 for first in (0, 200)] == [True, True]
    assert rig.serve(prompt(2 * B, 100)) == 0


def test_eviction_takes_lower_priority_first() -> None:
    """A newer prefix of low priority goes before an older one of high priority."""
    rig = Rig(num_blocks=8)
    rig.serve(prompt(2 * B, 0), priority=90)
    rig.serve(prompt(2 * B, 100), priority=10)
    rig.manager.evict(num_blocks=2)
    assert rig.serve(prompt(2 * B, 0)) > 0
    assert rig.serve(prompt(2 * B, 100)) == 0


def test_no_node_outlives_its_parent() -> None:
    """Evicting block by block leaves a tree in which every parent is present."""
    rig = Rig(num_blocks=32)
    for tail in (1, 2, 3):
        rig.serve([*prompt(4 * B), *prompt(3 * B, 100 * tail)])
        rig.serve([*prompt(2 * B), *prompt(B + 1, 1000 * tail)])
    while rig.manager.evict(num_blocks=1):
        rig.check()
        views = rig.manager.list_prefixes(limit=1000).items
        present = {view.node for view in views}
        assert all(view.parent == 0 or view.parent in present for view in views)
    assert rig.manager.snapshot().free_blocks == 32


def test_evicted_block_is_never_matched_again() -> None:
    """X, evict all, Y in the same blocks, X again: a miss; Y again: a hit."""
    rig = Rig(num_blocks=16)
    rig.serve(prompt(8 * B))
    assert rig.manager.evict(everything=True) == 8
    assert rig.manager.snapshot().indexed_blocks == 0
    rig.serve(prompt(8 * B, 500))
    assert rig.serve(prompt(8 * B)) == 0
    assert rig.serve(prompt(8 * B, 500)) == 8 * B - 1


def test_evict_everything_is_refused_while_blocks_are_in_use() -> None:
    """A reset never claims more than it did."""
    rig = Rig()
    rig.serve(prompt(B, 100))
    sequence = rig.acquire(prompt(B))
    with pytest.raises(FailedPrecondition):
        rig.manager.evict(everything=True)
    assert rig.manager.snapshot().indexed_blocks == 1
    rig.finish(sequence)
    assert rig.manager.evict(everything=True) == 2


@pytest.mark.parametrize("arguments", [{}, {"num_blocks": 0}, {"num_blocks": -1}])
def test_evict_needs_a_choice(arguments: dict[str, int]) -> None:
    """Evicting nothing in particular is a mistake of the caller."""
    with pytest.raises(InvalidArgument):
        Rig().manager.evict(**arguments)


def test_duplicates_are_replaced_and_wait_for_the_acknowledgement() -> None:
    """Two that computed the same blocks end with one copy; the other is freed when its holder has switched."""
    rig = Rig(num_blocks=8)
    first, second = rig.acquire(prompt(2 * B)), rig.acquire(prompt(2 * B))
    rig.compute(first)
    rig.compute(second)
    rig.report(rig.message(first))
    own = list(second.table)
    answer = rig.report(rig.message(second))
    assert [(item.lease_id, item.first_index, item.blocks.tolist()) for item in answer.replacements] == [
        (second.lease_id, 0, first.table)
    ]
    assert second.table == first.table != own
    assert rig.manager.snapshot().free_blocks == 4
    rig.report(applied_revision=answer.revision - 1)
    assert rig.manager.snapshot().free_blocks == 4
    rig.check()
    rig.report(applied_revision=answer.revision)
    assert rig.manager.snapshot().free_blocks == 6
    rig.check()


def test_duplicates_are_freed_at_release() -> None:
    """A lease that ends takes its duplicates with it, acknowledged or not."""
    rig = Rig(num_blocks=8)
    first, second = rig.acquire(prompt(2 * B)), rig.acquire(prompt(2 * B))
    rig.finish(first)
    rig.compute(second)
    rig.report(rig.message(second), applied_revision=0)
    rig.report(rig.message(second, release=True), applied_revision=0)
    assert rig.manager.snapshot().free_blocks == 6
    rig.quiet()


def test_acknowledging_the_future_is_refused() -> None:
    """A revision that was never given out frees nothing."""
    rig = Rig()
    with pytest.raises(InvalidArgument):
        rig.report(applied_revision=rig.manager.revision + 1)


def test_blocks_are_published_only_when_sealed() -> None:
    """A running prompt is found as far as it was sealed, and no further."""
    rig = Rig()
    sequence = rig.acquire(prompt(4 * B))
    assert rig.serve([*prompt(4 * B), 1]) == 0
    rig = Rig()
    sequence = rig.acquire(prompt(4 * B))
    rig.compute(sequence, 2 * B + 1)
    rig.report(rig.message(sequence))
    assert rig.serve([*prompt(4 * B), 1]) == 2 * B
    rig.check()


def test_only_the_sealed_part_is_published_at_release() -> None:
    """A sequence that ends early leaves what it computed, token for token."""
    rig = Rig()
    sequence = rig.acquire(prompt(4 * B))
    rig.compute(sequence, 2 * B + 1)
    rig.report(rig.message(sequence, release=True))
    rig.quiet()
    assert rig.manager.snapshot().cached_blocks == 3
    assert rig.serve(prompt(4 * B)) == 2 * B + 1


def test_partial_tail_is_superseded_by_the_whole_block() -> None:
    """Turn after turn, a conversation does not leave a trail of partly filled blocks."""
    rig = Rig()
    for length in range(1, 4 * B + 1):
        rig.serve(prompt(length))
    rig.quiet()
    assert rig.manager.snapshot().cached_blocks == 4


def test_partial_tail_that_is_covered_is_not_published() -> None:
    """A shorter sequence adds nothing to a longer one."""
    rig = Rig()
    rig.serve(prompt(3 * B))
    rig.serve(prompt(2 * B + 2))
    assert rig.manager.snapshot().cached_blocks == 3


def test_superseded_tail_goes_when_its_last_reader_is_done() -> None:
    """A tail that was held while it was superseded is dropped afterwards."""
    rig = Rig()
    rig.serve(prompt(B + 2))
    reader = rig.acquire([*prompt(B + 2), 77])
    assert reader.copy is not None
    source = reader.copy.source
    writer = rig.acquire(prompt(2 * B + 1))
    rig.run_copy(writer)
    rig.compute(writer)
    rig.report(rig.message(writer))
    assert rig.manager.list_blocks(after=source - 1, limit=1).items[0].published
    rig.report(SequenceReport(reader.lease_id, release=True))
    rig.finish(writer)
    rig.quiet()
    assert not rig.manager.list_blocks(after=source - 1, limit=1).items[0].published


def test_shared_trunk_counts_each_block_once() -> None:
    """Branches and splits of one trunk cost the distinct blocks, no more."""
    rig = Rig()
    for shared in (4, 3, 2):
        rig.serve([*prompt(shared * B), *prompt(2 * B, 100 * shared)])
    assert rig.manager.snapshot().cached_blocks == 4 + 2 + 2 + 2
    rig.quiet()


def test_fork_shares_whole_blocks_and_copies_the_tail() -> None:
    """Three branches of a 2B+3-token prompt: two blocks with four references, a tail for each, three copies."""
    rig = Rig()
    parent = rig.acquire(prompt(2 * B + 3))
    rig.compute(parent)
    rig.report(rig.message(parent))
    children = rig.fork(parent, [1, 2, 3], 2 * B + 3)
    rig.check()
    assert [child.table[:2] for child in children] == [parent.table[:2]] * 3
    assert len({sequence.table[2] for sequence in [parent, *children]}) == 4
    assert all(child.copy is not None and child.copy.num_tokens == 3 for child in children)
    blocks = rig.manager.list_blocks(limit=2).items
    assert [view.references for view in blocks] == [5, 5]  # four leases and the index
    rig.report(wanted=8)
    for number, sequence in enumerate([parent, *children]):
        rig.run_copy(sequence)
        assert rig.grow(sequence, 100 + number)
        assert rig.grow(sequence, 200 + number)
        rig.compute(sequence)
        rig.check()
    rig.report(*[rig.message(sequence, release=True) for sequence in [parent, *children]])
    rig.report(returned=rig.credit[rig.session])
    assert rig.manager.snapshot().cow_copies == 3
    rig.quiet()


def test_tail_is_published_while_a_branch_still_copies_from_it() -> None:
    """A parent may end before its branch has run its copy; the branch reads the right tokens all the same."""
    rig = Rig()
    parent = rig.acquire(prompt(B + 2))
    rig.compute(parent)
    rig.report(rig.message(parent))
    (child,) = rig.fork(parent, [1], B + 2)
    rig.report(rig.message(parent, release=True))
    rig.check()
    assert rig.manager.evict(num_blocks=10) == 0
    rig.run_copy(child)
    rig.check()
    rig.finish(child)
    rig.quiet()
    assert rig.manager.snapshot().cached_blocks == 2


def test_fork_at_a_block_border_copies_nothing() -> None:
    """Whole blocks are never copied."""
    rig = Rig()
    parent = rig.acquire(prompt(2 * B))
    rig.compute(parent)
    rig.report(rig.message(parent))
    before = rig.manager.snapshot().free_blocks
    children = rig.fork(parent, [1, 2], 2 * B)
    assert [child.copy for child in children] == [None, None]
    assert rig.manager.snapshot().free_blocks == before


def test_fork_without_room_makes_no_branch() -> None:
    """All branches or none."""
    rig = Rig(num_blocks=4)
    parent = rig.acquire(prompt(2 * B + 1))
    rig.compute(parent)
    rig.report(rig.message(parent))
    before = rig.manager.snapshot()
    assert rig.fork(parent, [1, 2], 2 * B + 1) == []
    assert rig.manager.snapshot() == before
    assert len(rig.fork(parent, [1], 2 * B + 1)) == 1


def test_fork_beyond_what_is_sealed_is_refused() -> None:
    """A branch never shares tokens that may not be written yet."""
    rig = Rig()
    parent = rig.acquire(prompt(2 * B))
    with pytest.raises(InvalidArgument):
        rig.fork(parent, [1], 1)


def test_rollback_drops_blocks_and_copies_a_shared_tail() -> None:
    """Rejected tokens go; a published block that would be written again is replaced by a copy."""
    rig = Rig()
    sequence = rig.acquire(prompt(3 * B))
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    old = list(sequence.table)
    plan = rig.manager.rollback(rig.session, sequence.lease_id, B + 1, 0)
    assert plan is not None
    assert (plan.source, plan.num_tokens) == (old[1], 1)
    with pytest.raises(FailedPrecondition):
        rig.manager.rollback(rig.session, sequence.lease_id, B, 0)
    assert rig.manager.check_integrity() == []
    assert rig.manager.list_leases().items[0].blocks == [old[0], plan.target]
    assert rig.serve(prompt(3 * B)) == 3 * B - 1  # what was published stays


def test_rollback_inside_a_private_block_copies_nothing() -> None:
    """A block that nobody else has is simply written again."""
    rig = Rig()
    sequence = rig.acquire(prompt(B + 3))
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    assert rig.manager.rollback(rig.session, sequence.lease_id, B + 1, 0) is None
    assert rig.manager.list_leases().items[0].num_tokens == B + 1
    with pytest.raises(InvalidArgument):
        rig.manager.rollback(rig.session, sequence.lease_id, B + 2, 0)


def test_acquire_is_all_or_nothing() -> None:
    """A request that does not fit changes nothing, whatever it would have matched."""
    rig = Rig(num_blocks=8)
    rig.serve(prompt(2 * B))
    held = rig.acquire(prompt(5 * B, 100))
    before = rig.manager.snapshot()
    with pytest.raises(ResourceExhausted) as caught:
        rig.acquire([*prompt(2 * B), *prompt(2 * B, 500)])
    assert (caught.value.reason, caught.value.needed, caught.value.usable) == ("POOL_FULL", 2, 1)
    assert rig.manager.snapshot() == before
    rig.finish(held)
    assert rig.acquire([*prompt(2 * B), *prompt(2 * B, 500)]).computed == 2 * B


def test_request_larger_than_the_pool_is_refused_for_good() -> None:
    """The numbers say that waiting would not help."""
    rig = Rig(num_blocks=4)
    with pytest.raises(ResourceExhausted) as caught:
        rig.acquire(prompt(4 * B + 1))
    assert (caught.value.reason, caught.value.needed, caught.value.usable) == ("EXCEEDS_POOL", 5, 4)
    assert rig.serve(prompt(4 * B)) == 0


def test_failed_allocation_changes_nothing_and_passes() -> None:
    """The n-th allocation fails alone: the one before and the one after are as ever."""
    rig = Rig(fail_allocation=2)
    rig.serve(prompt(B))
    before = rig.manager.snapshot()
    with pytest.raises(ResourceExhausted):
        rig.acquire(prompt(B, 100))
    assert rig.manager.snapshot() == before
    assert rig.serve(prompt(B, 100)) == 0
    rig.quiet()


def test_held_blocks_survive_any_pressure() -> None:
    """Fillers never take what a lease holds, the matched blocks included."""
    rig = Rig(num_blocks=12)
    rig.serve(prompt(4 * B))
    held = rig.acquire([*prompt(4 * B), 5])
    for number in range(20):
        rig.serve(prompt(7 * B, 1000 + 100 * number))
        rig.check()
    assert held.computed == 4 * B
    rig.finish(held)
    rig.quiet()


def test_no_read_matches_nothing_and_no_store_leaves_nothing() -> None:
    """Both do what they say; the same request without them hits."""
    rig = Rig()
    rig.serve(prompt(2 * B), no_store=True)
    assert rig.manager.snapshot().indexed_blocks == 0
    rig.quiet()
    rig.serve(prompt(2 * B))
    assert rig.acquire(prompt(2 * B), no_read=True).computed == 0
    assert rig.acquire(prompt(2 * B)).computed == 2 * B - 1


def test_two_tenants_never_share() -> None:
    """Another tenant misses, under its own root and even under the same one; the same tenant hits."""
    rig = Rig()
    rig.serve(prompt(2 * B), tenant="a")
    assert rig.serve(prompt(2 * B), tenant="b") == 0
    other = rig.manager.acquire(
        rig.session, tenant=TenantId("c"), root=root_of("a"), tokens=pack(prompt(2 * B)), request_id="r", sample=0,
        now_ns=0,
    )  # fmt: skip
    assert other.cached_tokens == 0
    assert rig.serve(prompt(2 * B), tenant="a") == 2 * B - 1
    tenants = {view.tenant: (view.hits, view.misses) for view in rig.manager.snapshot().tenants}
    assert tenants == {"a": (1, 1), "b": (0, 1), "c": (0, 1)}
    assert {view.tenant for view in rig.manager.list_prefixes().items} == {"a", "b"}
    assert {view.tenant for view in rig.manager.list_prefixes(tenant=TenantId("b")).items} == {"b"}


def test_weak_names_collide_and_never_cause_a_wrong_hit() -> None:
    """With 4-bit names 40 prompts collide often; every one finds its own blocks and no other's."""
    rig = Rig(num_blocks=96, name_bits=4)
    prompts = [prompt(2 * B, 100 * number) for number in range(40)]
    assert [rig.serve(tokens) for tokens in prompts] == [0] * 40
    assert rig.manager.snapshot().hash_collisions > 0
    assert [rig.serve(tokens) for tokens in prompts] == [2 * B - 1] * 40
    rig.quiet()
    strong = Rig(num_blocks=96)
    for tokens in prompts:
        strong.serve(tokens)
    assert strong.manager.snapshot().hash_collisions == 0


def test_evicted_names_are_forgotten() -> None:
    """Only two blocks that are published at once can collide."""
    rig = Rig(name_bits=100)
    for _ in range(3):
        rig.serve(prompt(2 * B + 1))
        rig.manager.evict(everything=True)
    assert rig.manager.snapshot().hash_collisions == 0


def test_resumed_sequence_is_not_counted_again() -> None:
    """Hits and misses count admitted requests, once."""
    rig = Rig()
    rig.serve(prompt(2 * B))
    rig.acquire([*prompt(2 * B), 1], resumed=True)
    shot = rig.manager.snapshot()
    assert (shot.hits, shot.misses, shot.hit_tokens) == (0, 1, 0)


def test_credit_is_counted_and_goes_where_it_is_said_to() -> None:
    """Granted, taken and returned blocks add up at every moment."""
    rig = Rig(num_blocks=8)
    sequence = rig.acquire(prompt(B))
    rig.compute(sequence)
    rig.report(rig.message(sequence), wanted=3)
    assert len(rig.credit[rig.session]) == 3
    assert rig.manager.snapshot().credit_blocks == 3
    assert rig.grow(sequence, 9)
    rig.report(rig.message(sequence), returned=[rig.credit[rig.session][-1]])
    shot = rig.manager.snapshot()
    assert (shot.credit_blocks, shot.active_blocks, shot.free_blocks) == (1, 3, 5)
    assert rig.manager.list_sessions().items[0].credit_blocks == 1
    assert len(rig.manager.credit(rig.session, 100, 0)) == 5
    rig.finish(sequence)
    rig.check()


def test_credit_evicts_what_is_cached() -> None:
    """A full cache does not starve a running sequence."""
    rig = Rig(num_blocks=4)
    rig.serve(prompt(4 * B))
    assert len(rig.manager.credit(rig.session, 2, 0)) == 2
    assert rig.manager.snapshot().cached_blocks == 2


@pytest.mark.parametrize("returned", [[1], [3, 3], [0], [99], [-1]])
def test_returning_what_is_not_credit_is_refused(returned: list[int]) -> None:
    """Foreign, doubled and impossible blocks are refused, and nothing of that report is done."""
    rig = Rig(num_blocks=8)
    rig.acquire(prompt(2 * B))
    rig.report(wanted=2)
    assert 3 in rig.credit[rig.session]
    before = rig.manager.snapshot()
    with pytest.raises(InvalidArgument):
        rig.report(returned=returned, wanted=1)
    assert rig.manager.snapshot() == before


@pytest.mark.parametrize(
    "lie",
    [
        {"sealed_tokens": 2 * B + 1},
        {"sealed_tokens": -1},
        {"tokens": b"abc"},
        {"taken_blocks": np.array([1], np.int32)},
        {"taken_blocks": np.array([7, 7], np.int32)},
    ],
)
def test_bad_sequence_refuses_itself_alone(lie: dict[str, object]) -> None:
    """The lease of a lying report is over, its blocks wait for the acknowledgement, its neighbour is served."""
    rig = Rig(num_blocks=12)
    good, bad = rig.acquire(prompt(2 * B, 50)), rig.acquire(prompt(2 * B))
    rig.report(wanted=4)
    assert 7 in rig.credit[rig.session]
    rig.compute(good)
    answer = rig.report(SequenceReport(bad.lease_id, **lie), rig.message(good))  # type: ignore[arg-type]
    assert [refusal.lease_id for refusal in answer.refusals] == [bad.lease_id]
    assert isinstance(answer.refusals[0].error, InvalidArgument)
    rig.check()
    assert rig.manager.snapshot().indexed_blocks == 2
    taken = sum(block in rig.credit[rig.session] for block in set(lie.get("taken_blocks", NO_BLOCKS).tolist()))  # type: ignore[attr-defined]
    assert rig.manager.snapshot().free_blocks == 4
    rig.report()
    assert rig.manager.snapshot().free_blocks == 6 + taken
    rig.check()


def test_sealing_over_a_copy_that_has_not_run_is_refused() -> None:
    """Tokens after a copy cannot be sealed before the copy."""
    rig = Rig()
    rig.serve(prompt(2 * B))
    sequence = rig.acquire([*prompt(B + 2), 99, 98, 97])
    answer = rig.report(SequenceReport(sequence.lease_id, sealed_tokens=B + 4))
    assert len(answer.refusals) == 1
    rig.check()
    assert rig.manager.evict(num_blocks=10) == 0  # the decoder may be copying still
    rig.report()
    rig.quiet()
    assert rig.manager.evict(num_blocks=10) == 2


def test_copied_tokens_count_as_sealed() -> None:
    """Once the copy has run, a branch may share the copied tokens although nothing else was computed."""
    rig = Rig()
    rig.serve(prompt(2 * B))
    sequence = rig.acquire([*prompt(B + 2), 99, 98])
    rig.run_copy(sequence)
    rig.report(rig.message(sequence))
    (branch,) = rig.fork(sequence, [1], B + 2)
    rig.run_copy(branch)
    rig.check()


def test_sealed_mark_never_shrinks() -> None:
    """A report that takes computed tokens back is a lie."""
    rig = Rig()
    sequence = rig.acquire(prompt(2 * B))
    rig.compute(sequence, B + 1)
    rig.report(rig.message(sequence))
    assert len(rig.report(SequenceReport(sequence.lease_id, sealed_tokens=B)).refusals) == 1


def test_lease_of_another_session_is_not_found() -> None:
    """A decoder can neither report, fork nor roll back what another one holds; its holder can."""
    rig = Rig()
    sequence = rig.acquire(prompt(B))
    rig.compute(sequence)
    other = rig.attach()
    answer = rig.report(rig.message(sequence, release=True), session=other)
    assert isinstance(answer.refusals[0].error, NotFound)
    for call in (rig.manager.fork, rig.manager.rollback):
        with pytest.raises(NotFound):
            call(
                other,
                sequence.lease_id,
                [1] if call == rig.manager.fork else 1,
                *([1] if call == rig.manager.fork else []),
                0,
            )  # type: ignore[operator]
    rig.check()
    assert rig.report(SequenceReport(sequence.lease_id, sealed_tokens=B, release=True)).refusals == []


def test_detach_of_a_live_process_quarantines_what_it_could_write() -> None:
    """Published blocks stay cached; unpublished ones and the credit wait until the process is known to be gone."""
    rig = Rig(num_blocks=12)
    sequence = rig.acquire(prompt(3 * B))
    rig.compute(sequence, 2 * B + 1)
    rig.report(rig.message(sequence), wanted=2)
    outcome = rig.manager.detach(rig.session, process_dead=False, now_ns=0)
    assert (outcome.leases, outcome.freed_blocks, outcome.quarantined_blocks) == (1, 0, 3)
    shot = rig.manager.snapshot()
    assert (shot.cached_blocks, shot.quarantined_blocks, shot.free_blocks, shot.sessions) == (2, 3, 7, 0)
    assert rig.manager.check_integrity() == []
    with pytest.raises(FailedPrecondition):
        rig.report()
    again = rig.attach()
    with pytest.raises(ResourceExhausted):
        rig.acquire(prompt(10 * B, 100), session=again)
    assert rig.manager.process_gone(rig.session) == 3
    assert rig.manager.process_gone(rig.session) == 0
    assert rig.acquire(prompt(10 * B, 100), session=again).computed == 0


def test_detach_of_a_dead_process_frees_at_once() -> None:
    """Nobody can write any more, so nothing waits; the sealed prefix is found by the next decoder."""
    rig = Rig()
    sequence = rig.acquire(prompt(3 * B))
    rig.compute(sequence, 2 * B + 1)
    rig.report(rig.message(sequence), wanted=2)
    outcome = rig.manager.detach(rig.session, process_dead=True, now_ns=0)
    assert (outcome.leases, outcome.freed_blocks, outcome.quarantined_blocks) == (1, 3, 0)
    rig.sequences.clear()
    rig.session = rig.attach()
    assert rig.serve(prompt(3 * B)) == 2 * B
    rig.quiet()


def test_tail_of_a_lost_session_is_not_published() -> None:
    """A block that a lost writer may still be writing never enters the index, sealed or not."""
    rig = Rig()
    sequence = rig.acquire(prompt(B + 2))
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    rig.manager.detach(rig.session, process_dead=False, now_ns=0)
    assert rig.manager.snapshot().indexed_blocks == 1


def test_purge_drops_a_tenant_and_leaves_running_leases_whole() -> None:
    """The tree is gone at once; a lease keeps its blocks to its end and publishes nothing more."""
    rig = Rig()
    rig.serve(prompt(2 * B), tenant="b")
    rig.serve(prompt(2 * B))
    running = rig.acquire([*prompt(2 * B), *prompt(2 * B, 50)])
    assert rig.manager.purge(TenantId("a")) == 2
    rig.check()
    assert rig.serve(prompt(2 * B), tenant="b") == 2 * B - 1
    rig.finish(running)
    rig.quiet()
    assert rig.serve(prompt(2 * B)) == 0
    assert rig.manager.purge(TenantId("nobody")) == 0


def test_evict_of_one_tenant_leaves_the_others() -> None:
    """An operator can clear one tenant's cache."""
    rig = Rig()
    rig.serve(prompt(2 * B), tenant="a")
    rig.serve(prompt(3 * B), tenant="b")
    assert rig.manager.evict(tenant=TenantId("b")) == 3
    assert rig.manager.evict(tenant=TenantId("nobody")) == 0
    assert rig.serve(prompt(2 * B), tenant="a") == 2 * B - 1


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": b""},
        {"tokens": b"abc"},
        {"root": b"short"},
        {"tenant": ""},
        {"request_id": ""},
        {"request_id": "x" * 257},
        {"sample": -1},
        {"priority": -1},
        {"priority": 101},
    ],
)
def test_acquire_refuses_bad_fields_by_name(change: dict[str, object]) -> None:
    """A bad field is named, and nothing happens."""
    rig = Rig()
    fields: dict[str, object] = {
        "tenant": "a", "root": root_of("a"), "tokens": pack([1]), "request_id": "r", "sample": 0, "priority": 50,
    }  # fmt: skip
    before = rig.manager.snapshot()
    with pytest.raises(InvalidArgument) as caught:
        rig.manager.acquire(rig.session, **{**fields, **change}, now_ns=0)  # type: ignore[arg-type]
    assert caught.value.field == next(iter(change))
    assert rig.manager.snapshot() == before


def test_unknown_session_is_refused_everywhere() -> None:
    """A session that is over can do nothing."""
    rig = Rig()
    ghost = SessionId(99)
    calls = [
        lambda: rig.acquire([1], session=ghost),
        lambda: rig.manager.report(ghost, [], returned=NO_BLOCKS, wanted=0, applied_revision=0, now_ns=0),
        lambda: rig.manager.fork(ghost, LeaseId(1), [1], 1, 0),
        lambda: rig.manager.rollback(ghost, LeaseId(1), 1, 0),
        lambda: rig.manager.make_writable(ghost, LeaseId(1), 0),
        lambda: rig.manager.credit(ghost, 1, 0),
        lambda: rig.manager.detach(ghost, process_dead=True, now_ns=0),
    ]
    for call in calls:
        with pytest.raises(FailedPrecondition):
            call()


def test_counts_that_decoders_report_are_summed() -> None:
    """Generated tokens and preemptions add up; queued requests are the present ones."""
    rig = Rig()
    for _ in range(2):
        rig.manager.report(
            rig.session, [], returned=NO_BLOCKS, wanted=0, generated_tokens=5, preemptions=1, queued=3,
            applied_revision=0, now_ns=0,
        )  # fmt: skip
    shot = rig.manager.snapshot()
    assert (shot.generated_tokens, shot.preemptions, shot.queued_requests) == (10, 2, 3)


def test_pages_cover_everything_once_and_in_order() -> None:
    """Prefixes come parents first; blocks, leases and sessions by number; no page repeats or skips."""
    rig = Rig()
    for tail in range(1, 5):
        rig.serve([*prompt(tail * B), *prompt(B + 1, 100 * tail)])
    held = [rig.acquire(prompt(B, 1000 * number)) for number in range(1, 4)]
    rig.attach()
    seen: list[int] = []
    after = 0
    while True:
        page = rig.manager.list_prefixes(after=after, limit=2)
        for view in page.items:
            assert view.parent == 0 or view.parent in seen
            assert len(view.name) == 32
            seen.append(view.node)
        after = page.next_after
        if not after:
            break
    assert sorted(seen) == sorted(view.node for view in rig.manager.list_prefixes(limit=100).items)
    assert len(seen) == len(set(seen)) > 4
    first = rig.manager.list_blocks(limit=20)
    rest = rig.manager.list_blocks(after=first.next_after, limit=20)
    assert [view.block for view in first.items + rest.items] == list(range(1, 33))
    assert rest.next_after == 0
    cached = rig.manager.list_blocks(limit=100, state=BlockState.CACHED).items
    assert all(view.evictable and view.published for view in cached)
    assert len(cached) == rig.manager.snapshot().cached_blocks
    page_one = rig.manager.list_leases(limit=2)
    page_two = rig.manager.list_leases(after=page_one.next_after, limit=2)
    assert [view.lease for view in page_one.items + page_two.items] == [sequence.lease_id for sequence in held]
    assert [view.session for view in rig.manager.list_sessions(limit=5).items] == [1, 2]


def test_names_depend_on_content_and_not_on_how_the_tree_was_cut() -> None:
    """The same prefix has the same name after splits; other tokens or another root have another."""
    rig = Rig()
    rig.serve(prompt(3 * B))
    (whole,) = rig.manager.list_prefixes().items
    rig.serve([*prompt(B), *prompt(2 * B, 100)])
    leaves = [view.name for view in rig.manager.list_prefixes().items if view.start_token]
    assert whole.name in leaves
    assert len(set(leaves)) == 2
    rig.serve(prompt(3 * B), tenant="b")
    (other,) = rig.manager.list_prefixes(tenant=TenantId("b")).items
    assert other.name != whole.name


def test_same_calls_give_the_same_answers() -> None:
    """The manager is a deterministic state machine."""
    runs = []
    for _ in range(2):
        rig = Rig(num_blocks=10)
        for number in range(12):
            rig.serve([*prompt(number % 3 * B), *prompt(B + number % 4, 100 * (number % 5 + 1))])
        runs.append((rig.manager.snapshot(), rig.manager.list_prefixes().items, rig.manager.list_blocks().items))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("arguments", [{"num_blocks": 0}, {"block_tokens": 0}, {"name_bits": 0}, {"name_bits": 129}])
def test_impossible_sizes_are_refused(arguments: dict[str, int]) -> None:
    """A manager is never built on nonsense."""
    with pytest.raises(ValueError, match="allowed"):
        Rig(**arguments)
