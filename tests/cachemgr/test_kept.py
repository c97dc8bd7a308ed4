"""Kept branches in the core: continued, forked, cut and dropped; what they give up under pressure; who reaches them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cachemgr.ids import TenantId
from cachemgr.results import Keep
from cachemgr.state import CacheState
from common.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from tests.cachemgr.core_rig import root_of
from tests.cachemgr.kept_rig import SECOND, KeptRig

B = 4
A = TenantId("a")


def test_a_kept_conversation_goes_on_from_its_own_blocks() -> None:
    """Whole blocks are shared, the tail is copied, and every cached cell reads what it must."""
    rig = KeptRig()
    tokens = list(range(10, 10 + 2 * B + 3))
    rig.kept(tokens, b"k")
    assert rig.branches == [len(tokens)]
    held = rig.manager.snapshot().active_blocks
    sequence = rig.resume(b"k", [90, 91])
    assert sequence.tokens == [*tokens, 90, 91]
    assert sequence.computed == len(tokens), "all of it is cached"
    assert sequence.copy is not None and sequence.copy.num_tokens == 3
    assert held == 3 and rig.references(sequence.table[0]) == 3, "index, branch and lease"
    rig.compute(sequence)
    rig.check()
    rig.finish(sequence)
    rig.drop(b"k")
    rig.quiet()


def test_the_newest_token_has_no_block_and_is_computed_by_whoever_goes_on() -> None:
    """A sampled token that was never computed is kept all the same."""
    rig = KeptRig()
    sequence = rig.acquire(range(10, 10 + B))
    rig.compute(sequence)
    sequence.tokens.append(77)
    message = rig.message(sequence, release=True)
    rig.sequences.remove(sequence)
    report = type(message)(message.lease_id, tokens=message.tokens, sealed_tokens=B, release=True, keep=Keep(b"k", 9))
    answer = rig.report(report)
    assert [(item.name, item.num_tokens) for item in answer.kept] == [(b"k", B + 1)]
    goes_on = rig.resume(b"k")
    assert goes_on.tokens == [*range(10, 10 + B), 77] and goes_on.computed == B
    rig.finish(goes_on)
    rig.drop(b"k")
    rig.quiet()


def test_a_conversation_that_is_not_stored_goes_on_from_its_own_blocks_too() -> None:
    """`no_store`: nothing is in the index, the branch has it; what follows is not published either."""
    rig = KeptRig()
    tokens = list(range(10, 10 + 2 * B + 2))
    rig.kept(tokens, b"k", no_store=True)
    assert rig.manager.snapshot().indexed_blocks == 0
    sequence = rig.resume(b"k", [5])
    assert sequence.computed == len(tokens) and sequence.copy is not None
    rig.compute(sequence)
    rig.check()
    rig.finish(sequence)
    assert rig.manager.snapshot().indexed_blocks == 0
    rig.drop(b"k")
    rig.quiet()
    assert rig.manager.snapshot().free_blocks == 32


def test_fork_rollback_and_drop_share_and_count_blocks() -> None:
    """Three more handles of one branch; each way goes on alone; references tell how many there are."""
    rig = KeptRig()
    tokens = list(range(10, 10 + 2 * B + 3))
    rig.kept(tokens, b"k")
    assert rig.manager.fork_kept(A, b"k", [b"1", b"2", b"3"], ttl_ns=SECOND, now_ns=0) == len(tokens)
    views = rig.manager.list_branches().items
    assert [view.references for view in views] == [5] * 4, "four branches and the index"
    rig.manager.rollback_kept(A, b"2", B + 1, now_ns=0)
    assert rig.branches == [11, 11, B + 1, 11]
    rig.check()
    cut = rig.resume(b"2", [7, 7])
    assert cut.tokens == [*tokens[: B + 1], 7, 7] and cut.computed == B + 1
    ways = [rig.resume(name, [number]) for number, name in enumerate((b"1", b"3"), start=50)]
    for way in (cut, *ways):
        rig.compute(way)
    rig.check()
    for way in (cut, *ways):
        rig.finish(way)
    for name in (b"k", b"1", b"2", b"3"):
        rig.drop(name)
    rig.quiet()
    assert rig.branches == []


def test_a_branch_is_made_in_one_decoder_and_continued_in_another() -> None:
    """Also after the session that made it is gone, its process dead or not."""
    rig = KeptRig()
    tokens = list(range(10, 10 + 2 * B + 3))
    rig.kept(tokens, b"k")
    other = rig.attach()
    rig.manager.detach(rig.session, process_dead=False, now_ns=0)
    sequence = rig.resume(b"k", [1], session=other)
    assert sequence.computed == len(tokens)
    rig.compute(sequence)
    rig.check()
    rig.finish(sequence)
    rig.drop(b"k")
    rig.quiet()


def test_from_an_earlier_token_on() -> None:
    """`base_tokens` goes on from the middle; out of range is refused by name."""
    rig = KeptRig()
    tokens = list(range(10, 10 + 2 * B + 3))
    rig.kept(tokens, b"k")
    sequence = rig.resume(b"k", [1, 2], base_tokens=B + 2)
    assert sequence.tokens == [*tokens[: B + 2], 1, 2] and sequence.computed == B + 2
    rig.finish(sequence)
    with pytest.raises(InvalidArgument, match="base_tokens"):
        rig.resume(b"k", base_tokens=len(tokens) + 1)
    rig.drop(b"k")
    rig.quiet()


@pytest.mark.parametrize("call", ["resume", "fork", "rollback", "drop"])
def test_who_may_not_reach_a_branch_learns_nothing(call: str) -> None:
    """Another tenant's, an expired and a made-up name: the same words. Positive control: the owner reaches it."""
    rig = KeptRig()
    rig.kept(range(10, 10 + B), b"k", ttl_ns=100)

    def use(tenant: str, name: bytes, now_ns: int, root: bytes | None = None) -> None:
        owner = TenantId(tenant)
        match call:
            case "resume":
                rig.finish(rig.resume(name, [1], tenant=tenant, now_ns=now_ns, **({"root": root} if root else {})))
            case "fork":
                rig.manager.fork_kept(owner, name, [b"new"], ttl_ns=1, now_ns=now_ns)
            case "rollback":
                rig.manager.rollback_kept(owner, name, 1, now_ns=now_ns)
            case "drop":
                rig.manager.drop_kept(owner, name, now_ns=now_ns)

    wrong = [("b", b"k", 0, None), ("a", b"no", 0, None), ("a", b"k", 100, None), ("b", b"no", 100, None)]
    if call == "resume":
        wrong.append(("a", b"k", 0, root_of("another model")))
    messages = set()
    for arguments in wrong:
        with pytest.raises(NotFound) as raised:
            use(*arguments)
        messages.add((str(raised.value), raised.value.reason))
    assert len(messages) == 1
    use("a", b"k", 99)
    rig.check()


def test_time_ends_branches() -> None:
    """`tick` drops what has expired and nothing else; published blocks stay cached."""
    rig = KeptRig()
    rig.kept(range(10, 10 + B), b"soon", ttl_ns=100)
    rig.kept(range(50, 50 + B), b"late", ttl_ns=200)
    rig.manager.tick(99)
    assert len(rig.branches) == 2
    rig.manager.tick(100)
    assert len(rig.branches) == 1
    rig.check()
    rig.manager.tick(10**12)
    assert rig.branches == []
    rig.quiet()
    assert rig.manager.snapshot().cached_blocks == 2


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("purged", ["a", "b"])
def test_what_was_purged_while_it_ran_is_not_kept(purged: str, forked: bool) -> None:
    """A running sequence, or a branch that it makes, ends without a kept branch and holds nothing; where another tenant
    was purged it is kept."""
    rig = KeptRig()
    sequence = rig.acquire(range(10, 10 + 2 * B + 1))
    rig.compute(sequence, 2 * B)
    rig.report(rig.message(sequence))
    rig.manager.purge(TenantId(purged))
    if forked:
        (branch,) = rig.fork(sequence, [1], B + 2)
        rig.finish(sequence)
        sequence = branch
    answer = rig.keep(sequence, b"k", ttl_ns=10**12)
    assert answer.refusals == []
    expected = [] if purged == "a" else [b"k"]
    assert [item.name for item in answer.kept] == (expected or [b""])
    assert list(state_of(rig).kept.branches) == expected
    rig.check()
    if expected:
        rig.drop(b"k")
    rig.quiet()


def test_a_tenant_keeps_a_bounded_number() -> None:
    """One more is RESOURCE_EXHAUSTED with numbers: asked for early, at the end, and as a fork; another tenant may."""
    rig = KeptRig(num_blocks=64)
    state_of(rig).kept.limit = 3
    rig.kept(range(10, 10 + B), b"1")
    rig.manager.fork_kept(A, b"1", [b"2"], ttl_ns=SECOND, now_ns=0)
    with pytest.raises(ResourceExhausted) as raised:
        rig.manager.fork_kept(A, b"1", [b"3", b"4"], ttl_ns=SECOND, now_ns=0)
    assert (raised.value.reason, raised.value.needed, raised.value.usable) == ("TOO_MANY_KEPT", 4, 3)
    assert len(rig.branches) == 2, "all or none"
    rig.manager.fork_kept(A, b"1", [b"3"], ttl_ns=SECOND, now_ns=0)
    with pytest.raises(ResourceExhausted, match="conversations"):
        rig.resume(b"1", [1], will_keep=True)
    answer = rig.keep(rig.acquire(range(70, 70 + B + 1)), b"4")
    assert [refusal.error.reason for refusal in answer.refusals] == ["TOO_MANY_KEPT"] and not answer.kept
    assert rig.manager.snapshot().leases == 0, "the sequence has ended all the same"
    rig.kept(range(B), b"5", tenant="b")
    rig.drop(b"3")
    rig.kept(range(70, 70 + B), b"6")
    rig.check()


def test_a_name_is_used_once() -> None:
    """The service draws 16 random bytes; a name that is taken is refused, and the sequence has ended."""
    rig = KeptRig()
    rig.kept(range(10, 10 + B), b"k")
    answer = rig.keep(rig.acquire(range(50, 50 + B)), b"k")
    assert isinstance(answer.refusals[0].error, AlreadyExists)
    rig.drop(b"k")
    rig.quiet()


@pytest.mark.parametrize("no_store", [False, True])
def test_kept_branches_give_way_to_work_and_keep_their_tokens(no_store: bool) -> None:
    """A pool full of branches is no full pool: the oldest lose their blocks first, and still go on."""
    rig = KeptRig(num_blocks=8)
    first, second = list(range(10, 10 + 3 * B)), list(range(50, 50 + 3 * B))
    rig.kept(first, b"1", no_store=no_store)
    rig.kept(second, b"2", no_store=no_store)
    assert rig.manager.snapshot().usable_blocks == 2
    work = rig.acquire(range(80, 80 + 4 * B))
    views = rig.manager.list_branches().items
    assert [view.num_blocks for view in views] == [0, 3], "the oldest alone"
    rig.finish(work)
    rig.check()
    sequence = rig.resume(b"2", [1])
    assert sequence.computed == len(second), "positive control: the younger has its blocks"
    rig.finish(sequence)
    sequence = rig.resume(b"1", [1])
    assert sequence.tokens == [*first, 1]
    rig.compute(sequence)
    rig.check()
    rig.finish(sequence)
    for name in (b"1", b"2"):
        rig.drop(name)
    rig.quiet()


def test_what_cannot_be_had_anyway_costs_no_branch_its_blocks() -> None:
    """A refused acquire has changed nothing: running work holds what is missing."""
    rig = KeptRig(num_blocks=8)
    rig.kept(range(10, 10 + 2 * B), b"k")
    running = rig.acquire(range(50, 50 + 4 * B))
    revision = rig.manager.revision
    with pytest.raises(ResourceExhausted) as raised:
        rig.acquire(range(80, 80 + 5 * B))
    assert raised.value.reason == "POOL_FULL"
    assert [view.num_blocks for view in rig.manager.list_branches().items] == [2]
    assert rig.manager.revision == revision
    rig.finish(running)
    rig.acquire(range(80, 80 + 8 * B))
    assert [view.num_blocks for view in rig.manager.list_branches().items] == [0], "positive control: now it fits"
    rig.check()


def test_a_branch_whose_own_blocks_are_asked_for_is_no_room_for_them() -> None:
    """What a request would share cannot be freed for it: nothing is dropped for nothing."""
    rig = KeptRig(num_blocks=8)
    tokens = list(range(10, 10 + 4 * B))
    rig.kept(tokens, b"k")
    running = rig.acquire(range(50, 50 + 3 * B))
    with pytest.raises(ResourceExhausted):
        rig.acquire([*tokens, *range(80, 80 + 3 * B)])
    assert [view.num_blocks for view in rig.manager.list_branches().items] == [4]
    rig.finish(running)
    rig.finish(rig.acquire([*tokens, *range(80, 80 + 3 * B)]))
    rig.drop(b"k")
    rig.quiet()


def test_a_copy_that_never_ran_is_no_part_of_what_is_kept() -> None:
    """Released before its first step: only whole shared blocks are held, and all of its tokens are known."""
    rig = KeptRig()
    rig.serve(range(10, 10 + B + 3))
    sequence = rig.acquire([*range(10, 10 + B + 2), 70, 71])
    assert sequence.copy is not None
    message = rig.message(sequence, release=True)._replace(keep=Keep(b"k", 10**12))
    rig.report(message)
    assert [(view.num_tokens, view.num_blocks) for view in rig.manager.list_branches().items] == [(B + 4, 1)]
    rig.check()
    goes_on = rig.resume(b"k", [5])
    assert goes_on.tokens == [*range(10, 10 + B + 2), 70, 71, 5]
    rig.finish(goes_on)
    rig.drop(b"k")
    rig.quiet()


def test_a_branch_gives_way_to_its_own_continuation() -> None:
    """A branch that fills the pool can still go on from an early token: its own later blocks are let go."""
    rig = KeptRig(num_blocks=8)
    tokens = list(range(10, 10 + 8 * B))
    rig.kept(tokens, b"k", no_store=True)
    sequence = rig.resume(b"k", [1] * (3 * B), base_tokens=2 * B)
    rig.compute(sequence)
    rig.check()
    rig.finish(sequence)
    rig.drop(b"k")
    rig.quiet()


def test_credit_and_copies_take_what_branches_hold() -> None:
    """A running sequence that needs a block does not starve beside kept ones."""
    rig = KeptRig(num_blocks=6)
    running = rig.acquire(range(50, 50 + B))
    rig.kept(range(10, 10 + 5 * B), b"k")
    rig.compute(running)
    answer = rig.report(rig.message(running), wanted=2)
    assert len(answer.credit) == 2
    rig.report(returned=answer.credit.tolist())
    rig.finish(running)
    rig.drop(b"k")
    rig.quiet()


def test_a_purge_ends_the_branches_of_the_tenant_alone() -> None:
    """After the secret of a tenant has changed nothing of it can be reached; the other tenant's goes on."""
    rig = KeptRig()
    rig.kept(range(10, 10 + B + 1), b"a")
    rig.kept(range(10, 10 + B + 1), b"b", tenant="b")
    rig.manager.purge(A)
    rig.check()
    with pytest.raises(NotFound):
        rig.resume(b"a", [1])
    rig.finish(rig.resume(b"b", [1], tenant="b"))
    rig.drop(b"b", tenant="b")
    rig.quiet()


def test_pages_of_branches_lose_and_repeat_nothing() -> None:
    """By number, across changes."""
    rig = KeptRig()
    rig.kept(range(10, 10 + B), b"0")
    rig.manager.fork_kept(A, b"0", [b"1", b"2", b"3", b"4"], ttl_ns=SECOND, now_ns=0)
    page = rig.manager.list_branches(0, 2)
    rig.drop(b"0")
    rest = rig.manager.list_branches(page.next_after, 2)
    last = rig.manager.list_branches(rest.next_after, 2)
    numbers = [view.branch for part in (page, rest, last) for view in part.items]
    assert numbers == sorted(set(numbers)) and len(numbers) == 5 and last.next_after == 0


# ---- commit: a running sequence publishes what it has


def test_commit_publishes_the_partly_filled_block_of_a_sequence_that_goes_on() -> None:
    """Another request reads it at once; the sequence copies it before it writes on."""
    rig = KeptRig()
    sequence = rig.acquire(range(10, 10 + B + 2))
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    before = rig.acquire(range(10, 10 + B + 4))
    assert before.computed == B, "positive control: the tail is nobody's yet"
    rig.finish(before)
    rig.manager.evict(everything=False, num_blocks=1)
    rig.manager.commit(sequence.session, sequence.lease_id, B + 2, 0)
    rig.check()
    reader = rig.acquire([*range(10, 10 + B + 2), 60, 61])
    assert reader.computed == B + 2
    rig.compute(reader)
    plan = rig.manager.make_writable(sequence.session, sequence.lease_id, 0)
    assert plan is not None and plan.num_tokens == 2
    sequence.table[1], sequence.copy = plan.target, plan
    rig.check()
    rig.run_copy(sequence)
    sequence.tokens.append(30)
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    rig.check()
    rig.finish(sequence)
    rig.finish(reader)
    rig.quiet()


def test_a_committed_block_is_not_written_before_it_was_made_writable() -> None:
    """The manager refuses a seal into it."""
    rig = KeptRig()
    sequence = rig.acquire(range(10, 10 + B + 2))
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    rig.manager.commit(sequence.session, sequence.lease_id, B + 1, 0)
    sequence.tokens.append(30)
    rig.compute(sequence)
    answer = rig.report(rig.message(sequence))
    assert len(answer.refusals) == 1 and "committed" in str(answer.refusals[0].error)
    rig.report()
    rig.quiet()


def test_a_committed_sequence_ends_forks_and_rolls_back() -> None:
    """Every way on from a commit keeps the books."""
    rig = KeptRig()
    sequences = [rig.acquire(range(100 * n, 100 * n + B + 2)) for n in range(1, 4)]
    for sequence in sequences:
        rig.compute(sequence)
        rig.report(rig.message(sequence))
        rig.manager.commit(sequence.session, sequence.lease_id, B + 1, 0)
        rig.manager.commit(sequence.session, sequence.lease_id, B + 2, 0)
    rig.check()
    ended, forked, cut = sequences
    rig.report(rig.message(ended, release=True))
    (child,) = rig.fork(forked, [1], B + 2)
    rig.compute(child)
    plan = rig.manager.rollback(cut.session, cut.lease_id, B + 1, 0)
    assert plan is not None and plan.num_tokens == 1
    cut.tokens, cut.table[1], cut.copy, cut.computed, cut.reported = cut.tokens[:-1], plan.target, plan, B + 1, B + 1
    rig.check()
    rig.run_copy(cut)
    for sequence in (forked, child, cut):
        rig.report(rig.message(sequence, release=True))
    rig.quiet()


def test_commit_refuses_by_name() -> None:
    """More than is sealed, and a sequence that publishes nothing."""
    rig = KeptRig()
    sequence = rig.acquire(range(10, 10 + B + 2), no_store=True)
    with pytest.raises(InvalidArgument, match="num_tokens"):
        rig.manager.commit(sequence.session, sequence.lease_id, 1, 0)
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    with pytest.raises(Exception, match="not to be published"):
        rig.manager.commit(sequence.session, sequence.lease_id, 1, 0)
    rig.finish(sequence)
    rig.quiet()


# ---- the check is itself checked


def state_of(rig: KeptRig) -> CacheState:
    return rig.manager._state


def _hold(state: CacheState):
    return next(iter(state.kept.branches.values())).hold


def lose_a_reference(state: CacheState) -> None:
    state.pool.references[_hold(state).table[0]] -= 1


def lose_a_kept_hold(state: CacheState) -> None:
    state.kept.holds[_hold(state).table[0]] -= 1


def miscount_a_tenant(state: CacheState) -> None:
    state.kept.counts[_hold(state).owner] += 1


def change_a_token(state: CacheState) -> None:
    _hold(state).tokens[0] ^= 1


def swap_blocks(state: CacheState) -> None:
    hold = _hold(state)
    hold.table[[0, 1]] = hold.table[[1, 0]]


def claim_more(state: CacheState) -> None:
    _hold(state).sealed += B


def claim_too_many_published(state: CacheState) -> None:
    _hold(state).num_published = _hold(state).num_blocks + 1


def wrong_name(state: CacheState) -> None:
    next(iter(state.kept.branches.values())).name = b"other"


def forget_the_branch(state: CacheState) -> None:
    state.kept.branches.clear()


def give_it_to_a_session(state: CacheState) -> None:
    _hold(state).session_id = 1  # type: ignore[assignment]


def lose_a_user_of_the_tree(state: CacheState) -> None:
    _hold(state).tree.users -= 1


@pytest.mark.parametrize(
    "corrupt",
    [
        lose_a_reference, lose_a_kept_hold, miscount_a_tenant, change_a_token, swap_blocks, claim_more,
        claim_too_many_published, wrong_name, forget_the_branch, give_it_to_a_session, lose_a_user_of_the_tree,
    ],
)  # fmt: skip
def test_each_corruption_of_a_kept_branch_is_found(corrupt: Callable[[CacheState], None]) -> None:
    """And the unbroken state passes."""
    rig = KeptRig()
    rig.kept(range(10, 10 + 2 * B + 3), b"k")
    assert rig.manager.check_integrity() == []
    corrupt(state_of(rig))
    assert rig.manager.check_integrity() != []


def test_many_turns_in_any_order_keep_the_books() -> None:
    """Random keeps, continuations, forks, cuts, drops and pressure on a small pool: every cell stays right."""
    random = np.random.default_rng(5)
    rig = KeptRig(num_blocks=20)
    names: list[bytes] = []
    for turn in range(400):
        action = int(random.integers(6))
        name = names[int(random.integers(len(names)))] if names else b""
        fresh = turn.to_bytes(4, "big")
        new = random.integers(3, size=int(random.integers(1, 9))).tolist()
        try:
            if action <= 1 or not names:
                rig.kept(new * int(random.integers(1, 4)), fresh, no_store=bool(random.integers(2)), ttl_ns=10**12)
                names.append(fresh)
            elif action == 2:
                cut = int(random.integers(0, 5))
                rig.keep(rig.resume(name, new, base_tokens=min(cut, dict(zip(names, rig.branches, strict=True))[name])),
                         fresh, ttl_ns=10**12)  # fmt: skip
                names.append(fresh)
            elif action == 3:
                rig.manager.fork_kept(A, name, [fresh], ttl_ns=10**12, now_ns=0)
                names.append(fresh)
            elif action == 4:
                known = dict(zip(names, rig.branches, strict=True))[name]
                rig.manager.rollback_kept(A, name, int(random.integers(1, known + 1)), now_ns=0)
            else:
                rig.drop(name)
                names.remove(name)
        except ResourceExhausted as error:
            assert error.reason in ("POOL_FULL", "EXCEEDS_POOL")
        rig.check()
        if len(names) > 8:
            rig.drop(names.pop(0))
    for name in names:
        rig.drop(name)
    rig.quiet()
