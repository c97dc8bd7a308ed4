"""Layer groups: window blocks are there for whoever may read them, and for nobody else when room is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cachemgr import groups, window_blocks
from cachemgr.explain import MissReason
from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from cachemgr.results import Acquired, Keep, SequenceReport
from cachemgr.state import CacheState
from cachemgr.window_blocks import USED, WindowBlocks, reach_of
from common.errors import FailedPrecondition, ResourceExhausted
from tests.cachemgr.core_rig import Rig, Running, pack, root_of

B = 4
WINDOW = 10
REACH = reach_of(WINDOW, B)
SPAN = -(-(WINDOW - 1) // B)  # whole blocks that the window of the token after a whole block touches


def make_rig(num_blocks: int = 64, num_window_blocks: int = 2 * REACH) -> Rig:
    return Rig(num_blocks=num_blocks, window_tokens=WINDOW, num_window_blocks=num_window_blocks)


def state_of(rig: Rig) -> CacheState:
    return rig.manager._state


def windows_of(rig: Rig) -> WindowBlocks:
    windows = state_of(rig).window_blocks
    assert windows is not None
    return windows


def prefill(rig: Rig, sequence: Running, up_to: int | None = None) -> None:
    """Computes a prompt, a block a step, beyond its table on credit."""
    end = len(sequence.tokens) if up_to is None else up_to
    while sequence.computed < end:
        if sequence.computed == len(sequence.table) * B and not rig.credit[sequence.session]:
            rig.report(wanted=1, session=sequence.session)
            assert rig.credit[sequence.session], "no block was to be had"
        rig.compute(sequence, min((sequence.computed // B + 1) * B, end))
        rig.report(rig.message(sequence), session=sequence.session)
        rig.check()


def serve(rig: Rig, tokens: Sequence[int], tenant: str = "a", **how: object) -> int:
    """A whole request; returns its cached tokens."""
    sequence = rig.acquire(tokens, tenant=tenant, **how)  # type: ignore[arg-type]
    cached = sequence.computed
    prefill(rig, sequence)
    rig.report(rig.message(sequence, release=True), returned=rig.credit[rig.session])
    return cached


def present(rig: Rig, table: Sequence[int]) -> list[bool]:
    """Which blocks have window blocks."""
    return [bool(windows_of(rig).of[block]) for block in table]


# ---- what a sequence needs


@pytest.mark.parametrize("no_store", [True, False])
def test_a_sequence_may_be_many_times_longer_than_its_window_blocks(no_store: bool) -> None:
    """Window blocks for two windows serve a sequence of all blocks; every key that is read is there at every step.
    Where nothing that was passed can be had, it ends with the window blocks."""
    rig = make_rig()
    sequence = rig.acquire(range(40 * B), no_store=no_store)
    prefill(rig, sequence)
    for step in range(20 * B):
        rig.report(wanted=0 if rig.credit[rig.session] else 1)
        assert rig.grow(sequence, 500 + step)
        rig.compute(sequence)
        rig.report(rig.message(sequence))
        rig.check()
    assert windows_of(rig).num_reclaimed > 40
    rig.report(rig.message(sequence, release=True), returned=rig.credit[rig.session])
    rig.quiet()


def test_without_what_was_passed_a_long_prompt_ends_with_its_window_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test before."""
    monkeypatch.setattr(window_blocks, "count_loose", lambda *arguments: 0)
    rig = make_rig()
    with pytest.raises(AssertionError, match="no block was to be had"):
        prefill(rig, rig.acquire(range(40 * B)))


def test_window_blocks_stay_as_long_as_there_is_room() -> None:
    """What a sequence has passed is taken when another needs it, not before: a hit may begin anywhere until then."""
    rig = make_rig(num_window_blocks=64)
    sequence = rig.acquire(range(20 * B))
    prefill(rig, sequence)
    assert all(present(rig, sequence.table))
    assert rig.acquire([*range(3 * B), 99]).computed == 3 * B


def test_a_long_prompt_begins_with_a_part_of_the_window_blocks() -> None:
    """A table that window blocks cannot be had for is shorter than its prompt; the pool of blocks must have room for
    all of it. What fits is whole at once."""
    rig = make_rig(num_window_blocks=2 * REACH)
    assert len(rig.acquire(range(2 * REACH * B)).table) == 2 * REACH
    rig = make_rig(num_window_blocks=2 * REACH)
    assert len(rig.acquire(range(60 * B)).table) == 2 * REACH
    rig = make_rig(num_blocks=300, num_window_blocks=100)
    assert len(rig.acquire(range(60 * B)).table) == 100 // groups.BEGIN_SHARE
    rig = make_rig()
    with pytest.raises(ResourceExhausted) as refused:
        rig.acquire(range(65 * B))
    assert refused.value.reason == "EXCEEDS_POOL"


def test_a_lease_that_window_blocks_cannot_be_had_for_waits() -> None:
    """POOL_FULL says that window blocks lack, how many are needed and how many can be had; nothing has changed. When
    others have passed theirs, it begins."""
    rig = make_rig()
    first = rig.acquire(range(60 * B))
    rig.compute(first, B)
    rig.report(rig.message(first))
    before = rig.manager.snapshot()
    with pytest.raises(ResourceExhausted) as refused:
        rig.acquire(range(900, 900 + 2 * B))
    error = refused.value
    assert (error.reason, error.subject, error.needed, error.usable) == ("POOL_FULL", "window_blocks", 2, 0)
    assert rig.manager.snapshot() == before
    prefill(rig, first, len(first.table) * B)
    second = rig.acquire(range(900, 900 + 2 * B))
    rig.compute(second)
    rig.check()


def test_credit_comes_only_with_window_blocks() -> None:
    """A session is lent no block that has none."""
    rig = make_rig()
    rig.acquire(range((2 * REACH - 3) * B))
    rig.report(wanted=8)
    assert len(rig.credit[rig.session]) == 3
    rig.check()
    rig.report(returned=rig.credit[rig.session])
    assert windows_of(rig).num_free == 3


# ---- hits


def test_a_hit_ends_where_its_window_is_there() -> None:
    """Of a cached path whose window blocks went, what comes before the last window that is whole is shared; what is
    computed again fills the path, and then all of it is shared. The blocks of the others were never gone."""
    rig = make_rig()
    tokens = [*range(20 * B)]
    serve(rig, tokens)
    assert serve(rig, [*tokens, 77]) == 20 * B  # its end is there
    assert shortened(rig) == (0, 0)
    assert serve(rig, [*tokens[: 10 * B], 77]) == 0  # no window in the middle is
    assert shortened(rig) == (1, 10 * B)
    listed = rig.manager.list_prefixes(tenant=TenantId("a"))
    assert sum(item.num_tokens for item in listed.items) == 20 * B + 2  # two tails of one token
    assert serve(rig, [*tokens[: 10 * B], 78]) == 10 * B  # where the paths part, by now
    assert shortened(rig) == (1, 10 * B)
    rig.quiet()


def shortened(rig: Rig) -> tuple[int, int]:
    """Hits that window blocks cut short, and the tokens that were cached in vain."""
    windows = rig.manager.snapshot().windows
    assert windows is not None
    return windows.shortened_hits, windows.shortened_tokens


def test_where_paths_part_window_blocks_outlast_what_was_merely_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that many prompts begin with is found at its end, although every sequence passes it: also when others
    need all the room that there is. Where hits count for no more than what was passed, it never is."""
    assert _share_a_prefix() == [0, 0, 12 * B, 12 * B, 12 * B]  # the second one finds where paths part
    monkeypatch.setattr(WindowBlocks, "use", lambda windows, blocks, rank=0: None)
    assert _share_a_prefix() == [0] * 5


def _share_a_prefix() -> list[int]:
    """Cached tokens of prompts that share twelve blocks."""
    rig = make_rig(num_blocks=512, num_window_blocks=5 * REACH)
    cached = []
    for number in range(5):
        begin = 1000 * (number + 1)
        cached.append(serve(rig, [*range(12 * B), *range(begin, begin + 8 * B)]))
        serve(rig, range(begin + 500, begin + 500 + 30 * B))
        rig.check()
    return cached


@pytest.mark.parametrize("again", [[], [7], [7] * (2 * B)])
@pytest.mark.parametrize("prompt_tokens", [9 * B, 9 * B + 1, 9 * B + 3])
def test_the_end_of_a_prompt_is_found_again_however_long_its_answer(
    again: list[int], prompt_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt again, and one that goes on from it, begin at its end: also when others took all that was only
    passed. Where the end of a prompt counts for no more than that, all is computed again."""
    most = prompt_tokens - (not again)
    assert _asked_again(prompt_tokens, again) == most
    monkeypatch.setattr(WindowBlocks, "use", lambda windows, blocks, rank=0: None)
    assert _asked_again(prompt_tokens, again) == 0


def _asked_again(prompt_tokens: int, again: list[int]) -> int:
    """Tokens that are cached of a prompt that was answered at length, after others."""
    rig = make_rig(num_blocks=256, num_window_blocks=4 * REACH)
    prompt = [*range(prompt_tokens)]
    sequence = rig.acquire(prompt)
    prefill(rig, sequence)
    for step in range(6 * B):
        rig.report(wanted=0 if rig.credit[rig.session] else 1)
        assert rig.grow(sequence, 500 + step)
        rig.compute(sequence)
        rig.report(rig.message(sequence))
        rig.check()
    rig.report(rig.message(sequence, release=True), returned=rig.credit[rig.session])
    serve(rig, range(1000, 1000 + 60 * B))
    cached = rig.acquire([*prompt, *again]).computed
    rig.check()
    return cached


def test_a_conversation_that_goes_on_leaves_its_former_end_behind() -> None:
    """What was kept for the end of a path goes with what is merely passed once a sequence goes on from there; where
    paths part it is worth keeping."""
    rig = make_rig(num_blocks=256, num_window_blocks=64)
    tokens = [*range(12 * B)]
    serve(rig, tokens)
    assert _ends_are_kept(rig, 12)
    assert serve(rig, [*tokens, *range(700, 700 + 6 * B)], no_store=True) == 12 * B  # no other end is listed
    assert _ends_are_kept(rig, 12)
    assert serve(rig, [*tokens, *range(500, 500 + 6 * B)]) == 12 * B
    assert not _ends_are_kept(rig, 12)
    assert _ends_are_kept(rig, 18)
    assert serve(rig, [*tokens, *range(600, 600 + 6 * B)]) == 12 * B
    assert _ends_are_kept(rig, 12)
    rig.quiet()


def _ends_are_kept(rig: Rig, place: int) -> bool:
    """Whether the window blocks before a place of the first path are kept for what ends there."""
    state, windows = state_of(rig), windows_of(rig)
    blocks = [source_block(state, number) for number in range(place - SPAN, place)]
    return bool((windows.stamps[blocks] >= USED).all())


def test_a_copy_needs_the_window_block_of_its_source() -> None:
    """A hit inside a block whose window block went ends at the block before."""
    rig = make_rig(num_window_blocks=32)
    serve(rig, range(6 * B))
    source = rig.acquire([*range(5 * B + 2), 99])
    assert source.copy is not None
    assert source.computed == 5 * B + 2
    rig.finish(source)
    state, windows = state_of(rig), windows_of(rig)
    windows.detach(np.array([source_block(state, 5)], np.intp))
    again = rig.acquire([*range(5 * B + 1), 98])
    assert (again.copy, again.computed) == (None, 5 * B)
    rig.check()


def source_block(state: CacheState, place: int) -> int:
    """The block of the first path at a place."""
    listed = np.flatnonzero(state.pool.published & (state.index.forest.position == place))
    return int(listed[0])


def test_what_was_computed_twice_lends_its_window_block() -> None:
    """A sequence that changes its block for a listed one that lacks a window block gives it its own, and is told."""
    rig = make_rig(num_window_blocks=32)
    serve(rig, range(6 * B))
    state, windows = state_of(rig), windows_of(rig)
    listed = np.array([source_block(state, place) for place in range(6)], np.intp)
    windows.detach(listed)
    sequence = rig.acquire([*range(6 * B), 99])
    own = list(sequence.table)
    mine = [int(windows.of[block]) for block in own]
    assert sequence.computed == 0
    rig.compute(sequence)
    answer = rig.report(rig.message(sequence), applied_revision=0)
    assert answer.replacements[0].blocks.tolist() == listed.tolist()
    assert [int(windows.of[block]) for block in listed] == mine[:6]
    assert not any(windows.of[block] for block in own[:6])
    rig.check()


def test_a_block_that_a_branch_copies_from_is_published_after_the_copy() -> None:
    """Its window block has to move to a listed block, and might be taken from there before the branch has read it."""
    rig = make_rig(num_window_blocks=32)
    tokens = [*range(4 * B)]
    serve(rig, tokens)
    windows_of(rig).detach(np.flatnonzero(windows_of(rig).of))
    parent = rig.acquire(tokens[: 2 * B + 2])
    rig.compute(parent)
    rig.report(rig.message(parent), wanted=4)
    (branch,) = rig.fork(parent, [1], 2 * B + 2)
    for token in tokens[2 * B + 2 : 3 * B + 1]:
        assert rig.grow(parent, token)
    rig.compute(parent)
    assert rig.report(rig.message(parent)).replacements == []
    lease = state_of(rig).book.leases[parent.lease_id]
    assert (lease.sealed, lease.num_published) == (3 * B + 1, 2)
    rig.check()
    rig.compute(branch)
    rig.report(rig.message(branch))
    assert rig.grow(parent, tokens[3 * B + 1])
    rig.compute(parent)
    assert [item.first_index for item in rig.report(rig.message(parent)).replacements] == [2]
    assert lease.num_published == 3
    rig.check()


# ---- branches


def test_a_fork_keeps_what_its_branches_read() -> None:
    """The parent has passed it, and the blocks for the branches' copies must not take it."""
    rig = Rig(num_blocks=16, window_tokens=1, num_window_blocks=4)
    parent = rig.acquire(range(B + 2))
    rig.compute(parent)
    rig.report(rig.message(parent), wanted=2)
    for step in range(B):
        assert rig.grow(parent, 50 + step)
    rig.compute(parent)
    rig.report(rig.message(parent))
    made = rig.fork(parent, [1, 2], B + 1)
    rig.check()
    for branch in made:
        rig.compute(branch)
    rig.check()


def test_there_is_no_branch_from_where_window_blocks_are_gone() -> None:
    """A fork or a rollback to where something would be read that went is refused as where all layers have windows; to
    where all of it is still there it is done."""
    rig = make_rig(num_window_blocks=2 * REACH)
    sequence = rig.acquire(range(30 * B))
    prefill(rig, sequence)
    assert rig.fork(sequence, [1], 5 * B) == []
    with pytest.raises(FailedPrecondition) as refused:
        rig.manager.rollback(sequence.session, sequence.lease_id, 5 * B, 0)
    assert refused.value.reason == "WINDOW_PASSED"
    rig.check()
    there = 28 * B
    assert present(rig, sequence.table[28 - SPAN : 28]) == [True] * SPAN
    assert len(rig.fork(sequence, [1], there)) == 1
    assert rig.manager.rollback(sequence.session, sequence.lease_id, there, 0) is None
    sequence.tokens, sequence.computed, sequence.table = sequence.tokens[:there], there, sequence.table[:28]
    rig.tell(sequence.session, sequence.table)
    rig.check()


def test_kept_conversations_need_no_window_blocks() -> None:
    """They go on where they were as long as theirs are there, give them up to whoever needs room, and are then
    computed again as far as they must."""
    rig = make_rig()
    sequence = rig.acquire(range(10 * B + 2), no_store=True)
    prefill(rig, sequence)
    name = b"talk"
    rig.report(rig.message(sequence, release=True)._replace(keep=Keep(name, 10**9)))
    rig.report(returned=rig.credit[rig.session])
    assert continued(rig, name) == 10 * B + 2
    assert continued(rig, name) == 10 * B + 2
    serve(rig, range(800, 800 + 30 * B))
    assert continued(rig, name) == 0
    rig.check()


def continued(rig: Rig, name: bytes) -> int:
    """Tokens that a sequence which continues a kept branch need not compute; it ends at once."""
    answer = rig.manager.acquire(
        rig.session, tenant=TenantId("a"), root=root_of("a"), tokens=pack([1]), request_id="more", sample=0, base=name,
        now_ns=0,
    )  # fmt: skip
    assert isinstance(answer, Acquired)
    rig.report(SequenceReport(answer.lease_id, release=True))
    rig.check()
    return answer.cached_tokens


# ---- pins, floors, content


def test_a_pin_needs_its_end_and_leaves_room_to_run() -> None:
    """What a pinned prefix reads at its end stays; more pins than would leave a sequence its window are refused."""
    rig = make_rig(num_blocks=256, num_window_blocks=40)
    rig.manager.set_quota(TenantId("a"), Quota(pin_blocks=200))
    limit = windows_of(rig).lasting
    assert limit == (40 - REACH - 1) // 2
    made = 0
    for number in range(limit // SPAN + 1):
        tokens = [*range(1000 * number, 1000 * number + 8 * B)]
        serve(rig, tokens)
        if made == limit // SPAN:
            with pytest.raises(ResourceExhausted) as refused:
                rig.manager.pin(TenantId("a"), root=root_of("a"), tokens=pack(tokens), now_ns=0)
            assert (refused.value.reason, refused.value.subject) == ("PIN_BUDGET_EXCEEDED", "window_blocks")
            continue
        rig.manager.pin(TenantId("a"), root=root_of("a"), tokens=pack(tokens), now_ns=0)
        made += 1
    serve(rig, range(9000, 9000 + 60 * B))
    for number in range(made):
        assert serve(rig, [*range(1000 * number, 1000 * number + 8 * B), 5]) == 8 * B
    for pin in rig.manager.list_pins().items:
        rig.manager.unpin(pin.pin)
    rig.quiet()


def test_a_floor_keeps_its_part_of_window_blocks() -> None:
    """What others need does not take the newest that a tenant has cached, up to its floor's part; without a floor it
    does."""
    for floor, cached in ((200, 8 * B), (0, 0)):
        rig = make_rig(num_blocks=256, num_window_blocks=40)
        rig.manager.set_quota(TenantId("b"), Quota(floor_blocks=floor))
        serve(rig, range(8 * B), tenant="b")
        for number in range(20):
            serve(rig, range(1000 * (number + 1), 1000 * (number + 1) + 8 * B))
        assert serve(rig, [*range(8 * B), 5], tenant="b") == cached
        rig.quiet()


def test_window_blocks_that_cross_tenants_are_zeroed() -> None:
    """Also one that was told to be zeroed and whose decoder died before it said so."""
    rig = make_rig(num_window_blocks=2 * REACH)
    serve(rig, range(2 * REACH * B), tenant="a")
    assert rig.manager.take_window_scrub().tolist() == []
    rig.manager.evict(everything=True)
    sequence = rig.acquire(range(2 * B), tenant="b")
    told = [int(windows_of(rig).of[block]) for block in sequence.table]
    assert sorted(rig.manager.take_window_scrub().tolist()) == sorted(told)
    rig.manager.detach(rig.session, process_dead=True, now_ns=0)
    rig.sequences.clear()
    rig.session = rig.attach()
    again = rig.acquire(range(2 * B), tenant="b")
    told = [int(windows_of(rig).of[block]) for block in again.table]
    assert sorted(rig.manager.take_window_scrub().tolist()) == sorted(told)


def test_a_quarantine_keeps_its_window_blocks() -> None:
    """Their writer may live; when it is gone they are free."""
    rig = make_rig(num_window_blocks=2 * REACH)
    session = rig.session
    rig.acquire(range(REACH * B))
    rig.manager.detach(session, process_dead=False, now_ns=0)
    rig.sequences.clear()
    rig.session = rig.attach()
    assert windows_of(rig).num_free == REACH
    with pytest.raises(ResourceExhausted):
        rig.acquire(range((REACH + 3) * B)) and rig.acquire(range(500, 500 + B))
    rig.manager.process_gone(session)
    assert windows_of(rig).num_free >= REACH
    rig.check()


def test_a_table_that_is_shorter_than_its_scope_grows_into_it() -> None:
    """Blocks of credit that lie in a wider scope are the scope's: it is shared as if the table had been whole."""
    rig = make_rig(num_blocks=64, num_window_blocks=2 * REACH)
    tokens = [*range(20 * B)]
    assert serve(rig, [*tokens, 1], tenant="a", scope="@public", num_tokens=20 * B) == 0
    used = rig.manager.quota_usage(TenantId("@public")).used_blocks
    assert used == 20
    assert serve(rig, [*tokens, 2], tenant="b", scope="@public", num_tokens=20 * B) == 20 * B
    rig.quiet()


# ---- the check


def busy_rig() -> Rig:
    """A running lease that has passed something, a pending copy, credit, a kept branch, a pin."""
    rig = make_rig(num_blocks=96, num_window_blocks=48)
    rig.manager.set_quota(TenantId("a"), Quota(pin_blocks=20))
    serve(rig, range(8 * B))
    rig.manager.pin(TenantId("a"), root=root_of("a"), tokens=pack([*range(8 * B)]), now_ns=0)
    prefill(rig, rig.acquire(range(500, 500 + 12 * B)))
    rig.acquire([*range(7 * B + 2), 9])
    kept = rig.acquire(range(700, 700 + 3 * B))
    rig.compute(kept)
    rig.report(rig.message(kept, release=True)._replace(keep=Keep(b"name", 10**9)), wanted=2)
    rig.check()
    return rig


def give_twice(state: CacheState, windows: WindowBlocks) -> None:
    used = np.flatnonzero(windows.of)
    windows.of[used[0]] = windows.of[used[1]]


def lose_one(state: CacheState, windows: WindowBlocks) -> None:
    windows.of[np.flatnonzero(windows.of)[0]] = 0


def attach_a_free_one(state: CacheState, windows: WindowBlocks) -> None:
    windows.of[np.flatnonzero(windows.of)[0]] = windows.free_stack[0]


def attach_to_a_free_block(state: CacheState, windows: WindowBlocks) -> None:
    windows.attach(state.pool.free_stack[:1], 1)


def name_none_that_is_there(state: CacheState, windows: WindowBlocks) -> None:
    windows.of[np.flatnonzero(windows.of)[0]] = windows.num_window_blocks + 1


def forget_who_passed(state: CacheState, windows: WindowBlocks) -> None:
    windows.passed_by[np.flatnonzero(windows.passed_by)[0]] = 0


def count_one_more(state: CacheState, windows: WindowBlocks) -> None:
    windows.passed_by[0] += 1


def take_from_a_lease(state: CacheState, windows: WindowBlocks) -> None:
    lease = next(lease for lease in state.book.leases.values() if lease.behind)
    windows.detach(lease.table[lease.behind : lease.behind + 1])


def take_from_the_credit(state: CacheState, windows: WindowBlocks) -> None:
    session = next(session for session in state.book.sessions.values() if session.credit)
    windows.detach(np.array([min(session.credit)], np.intp))


def take_from_a_source(state: CacheState, windows: WindowBlocks) -> None:
    copy = next(lease.copy for lease in state.book.leases.values() if lease.copy is not None)
    windows.detach(np.array([copy.source], np.intp))


def take_from_a_pin(state: CacheState, windows: WindowBlocks) -> None:
    pin = next(iter(state.pins.values()))
    windows.detach(pin.blocks[pin.behind : pin.behind + 1])


def give_up_too_much(state: CacheState, windows: WindowBlocks) -> None:
    lease = next(lease for lease in state.book.leases.values() if lease.behind)
    windows.passed(lease.table[lease.behind : lease.behind + 1])
    lease.behind += 1


def keep_something_needed(state: CacheState, windows: WindowBlocks) -> None:
    hold = next(iter(state.kept.branches.values())).hold
    hold.behind -= 1
    windows.passed_by[hold.table[hold.behind]] -= 1


def mix_up_the_content(state: CacheState, windows: WindowBlocks) -> None:
    block = next(iter(state.book.leases.values())).table[0]
    windows.content[windows.of[block]] = 99


@pytest.mark.parametrize(
    ("corrupt", "says"),
    [
        (give_twice, "not free or attached to one block"),
        (lose_one, "not free or attached to one block"),
        (attach_a_free_one, "not free or attached to one block"),
        (attach_to_a_free_block, "free, and it has a window block"),
        (name_none_that_is_there, "outside the pool"),
        (forget_who_passed, "the count of those who have passed it is wrong"),
        (count_one_more, "the count of those who have passed it is wrong"),
        (take_from_a_lease, "a window block is missing that may be read"),
        (take_from_the_credit, "its credit: a window block is missing"),
        (take_from_a_source, "the source of its copy: a window block is missing"),
        (take_from_a_pin, "pin 1: a window block is missing"),
        (give_up_too_much, "it has given up window blocks that it may read"),
        (keep_something_needed, "it needs window blocks"),
        (mix_up_the_content, "is said to be another's"),
    ],
)
def test_each_corruption_is_found(corrupt: object, says: str) -> None:
    """The full check sees what is wrong, and nothing before."""
    rig = busy_rig()
    assert rig.manager.check_integrity() == []
    corrupt(state_of(rig), windows_of(rig))  # type: ignore[operator]
    assert any(says in line for line in rig.manager.check_integrity())


def test_without_groups_there_are_no_window_blocks() -> None:
    """A manager without them has none of this; one with them needs a window."""
    rig = Rig(window_tokens=WINDOW)
    assert state_of(rig).window_blocks is None
    assert rig.manager.take_window_scrub().tolist() == []
    with pytest.raises(ValueError, match="window_tokens"):
        Rig(num_window_blocks=4)


def test_why_a_prompt_misses_whose_blocks_are_there() -> None:
    """Its window blocks were taken, by whom and when is told; where they are there it is resident."""
    rig = make_rig(num_blocks=64)
    tokens = [*range(12 * B)]
    serve(rig, tokens)
    explained = rig.manager.explain(TenantId("a"), root=root_of("a"), tokens=pack(tokens))
    assert explained.reason is MissReason.RESIDENT
    rig.now_ns = 77
    rig.acquire(range(900, 900 + 2 * REACH * B), tenant="b")
    explained = rig.manager.explain(TenantId("a"), root=root_of("a"), tokens=pack(tokens))
    assert (explained.reason, explained.evicted_ns, explained.evicted_for) == (MissReason.EVICTED, 77, "b")
    assert explained.resident_tokens == 0
