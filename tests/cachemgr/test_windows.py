"""Windows: a running sequence lets go of what it has passed, and of nothing that it may read."""

from __future__ import annotations

import numpy as np
import pytest

from cachemgr import windows
from cachemgr.admin_messages import lease_message
from cachemgr.ids import TenantId
from cachemgr.quotas import Quota
from cachemgr.results import Keep, SequenceReport
from cachemgr.resuming import Held
from common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from tests.cachemgr.adoption_rig import DyingRig
from tests.cachemgr.core_rig import Rig, Running, pack, root_of

B = 4
WINDOW = 10
MOST = WINDOW // B + 2  # blocks that a window may touch


def decode(rig: Rig, sequence: Running, count: int) -> None:
    """Generates `count` tokens, one a step, as a decoder does that asks for one block ahead."""
    for step in range(count):
        if not rig.credit[rig.session]:
            rig.report(wanted=1)
        assert rig.grow(sequence, 500 + step), "no block was to be had"
        rig.compute(sequence)
        rig.report(rig.message(sequence))
        rig.check()


def prefill(rig: Rig, sequence: Running) -> bool:
    """Computes what is left of a prompt, a block a step, beyond its table on credit; False where that did not come."""
    while sequence.computed < len(sequence.tokens):
        if sequence.computed == len(sequence.table) * B:
            if not rig.credit[rig.session]:
                rig.report(wanted=1)
            if not rig.credit[rig.session]:
                return False
            sequence.table.append(rig.credit[rig.session].pop())
            sequence.taken.append(sequence.table[-1])
        rig.compute(sequence, min((sequence.computed // B + 1) * B, len(sequence.tokens)))
        rig.report(rig.message(sequence))
        rig.check()
    return True


def held(rig: Rig, sequence: Running) -> int:
    """Blocks that a sequence holds by the manager's books."""
    return len(rig.manager._state.book.leases[sequence.lease_id].held)


@pytest.mark.parametrize("no_store", [True, False])
def test_a_sequence_may_be_many_times_longer_than_the_pool(no_store: bool) -> None:
    """A pool of two windows serves 40 windows; every key that is read is there at every step. Without a window it ends
    with the pool."""
    rig = Rig(num_blocks=2 * MOST, window_tokens=WINDOW)
    sequence = rig.acquire(range(B), no_store=no_store)
    rig.compute(sequence)
    decode(rig, sequence, 40 * WINDOW)
    assert held(rig, sequence) <= MOST
    rig.report(rig.message(sequence, release=True), returned=rig.credit[rig.session])
    rig.quiet()
    assert rig.manager.snapshot().active_blocks == 0

    rig = Rig(num_blocks=2 * MOST)
    sequence = rig.acquire(range(B), no_store=no_store)
    rig.compute(sequence)
    with pytest.raises(AssertionError, match="no block was to be had"):
        decode(rig, sequence, 40 * WINDOW)


def test_a_token_that_passes_a_block_lets_it_go_at_once() -> None:
    """Also where that token takes no block and completes none, and the sequence publishes what it computes."""
    rig = Rig(num_blocks=16, window_tokens=12)
    sequence = rig.acquire(range(B))
    rig.compute(sequence)
    decode(rig, sequence, 10)
    assert (len(sequence.tokens), held(rig, sequence)) == (14, 4)
    decode(rig, sequence, 1)
    assert (len(sequence.tokens), held(rig, sequence)) == (15, 3)


def test_a_sequence_holds_its_window_and_no_more() -> None:
    """With room to spare as well; what it publishes is cached then, and found, what it does not is free."""
    rig = Rig(num_blocks=128, window_tokens=WINDOW)
    private, stored = rig.acquire(range(B), no_store=True), rig.acquire(range(100, 100 + B))
    for sequence in (private, stored):
        rig.compute(sequence)
        decode(rig, sequence, 20 * B)
        assert held(rig, sequence) <= MOST
    shot = rig.manager.snapshot()
    assert shot.cached_blocks == 21 - held(rig, stored)
    shown = [lease_message(view, 0) for view in rig.manager.list_leases().items]
    assert [item.num_blocks for item in shown] == [held(rig, private), held(rig, stored)]
    assert shown[0].blocks[: 21 - held(rig, private)] == [0] * (21 - held(rig, private))
    assert rig.serve([*stored.tokens, 7]) == 21 * B
    assert rig.serve([*private.tokens, 7]) == 0


@pytest.mark.parametrize(("floor", "goes"), [(12, False), (2, True)])
def test_a_tenants_floor_is_kept(floor: int, goes: bool) -> None:
    """Another's need takes no tenant below its floor, not by what its sequences have passed either."""
    rig = Rig(num_blocks=16, window_tokens=WINDOW)
    rig.manager.set_quota(TenantId("a"), Quota(floor_blocks=floor))
    running = rig.acquire(range(12 * B), tenant="a")
    rig.compute(running)
    rig.report(rig.message(running))
    try:
        rig.acquire(range(1000, 1000 + 8 * B), tenant="b")
    except ResourceExhausted:
        assert not goes
    else:
        assert goes
    assert (rig.manager.snapshot().cached_blocks == 9) is not goes
    rig.check()


def test_a_ceiling_is_kept_by_what_was_passed() -> None:
    """A tenant at its ceiling goes on with blocks that its own sequence has passed."""
    rig = Rig(num_blocks=32, window_tokens=WINDOW)
    rig.manager.set_quota(TenantId("a"), Quota(ceiling_blocks=2 * MOST))
    sequence = rig.acquire(range(B), tenant="a")
    rig.compute(sequence)
    decode(rig, sequence, 10 * WINDOW)
    assert held(rig, sequence) <= 2 * MOST


def test_branches_share_what_is_left_and_nothing_before() -> None:
    """A fork where all that the branch reads is held has the same null blocks; one further back has no branch, and a
    rollback there is refused. Both read what they must."""
    rig = Rig(num_blocks=64, window_tokens=WINDOW)
    parent = rig.acquire(range(10 * B), no_store=True)
    rig.compute(parent)
    rig.report(rig.message(parent))
    assert held(rig, parent) <= MOST
    assert not rig.fork(parent, [1], 7 * B)
    with pytest.raises(FailedPrecondition) as refused:
        rig.manager.rollback(rig.session, parent.lease_id, 7 * B, 0)
    assert refused.value.reason == "WINDOW_PASSED"
    (branch,) = rig.fork(parent, [1], 10 * B - 1)
    assert branch.table[:7] == [0] * 7
    rig.run_copy(branch)
    rig.report(rig.message(branch))
    decode(rig, branch, 5 * B)
    decode(rig, parent, 5 * B)
    rig.finish(branch)
    rig.finish(parent)
    rig.report(returned=rig.credit[rig.session])
    rig.quiet()


def test_a_conversation_is_kept_by_its_window() -> None:
    """It holds what its next token reads: who continues it computes nothing again, who cuts it further back does."""
    rig = Rig(num_blocks=64, window_tokens=WINDOW)
    for base_tokens, cached in ((0, 10 * B), (10 * B - 1, 10 * B - 1), (7 * B, 0)):
        sequence = rig.acquire(range(10 * B), no_store=True)
        rig.compute(sequence)
        rig.report(rig.message(sequence))
        done = rig.report(rig.message(sequence, release=True)._replace(keep=Keep(b"name", 10**9)))
        assert [item.num_tokens for item in done.kept] == [10 * B]
        assert rig.manager.snapshot().active_blocks == 3
        answer = rig.manager.acquire(
            rig.session, tenant=TenantId("a"), root=root_of("a"), tokens=pack([1]), request_id="r", sample=0,
            base=b"name", base_tokens=base_tokens, now_ns=0,
        )  # fmt: skip
        assert answer.cached_tokens == cached
        assert not rig.manager.check_integrity()
        rig.report(SequenceReport(answer.lease_id, release=True))
        rig.manager.rollback_kept(TenantId("a"), b"name", 7 * B, now_ns=0)
        assert not rig.manager.check_integrity()
        rig.manager.drop_kept(TenantId("a"), b"name", now_ns=0)
        rig.quiet()


def test_the_end_of_a_session_frees_what_is_held_alone() -> None:
    """A session that dies, or is quarantined, with sequences that have let go leaves nothing behind."""
    for dead in (True, False):
        rig = Rig(num_blocks=64, window_tokens=WINDOW)
        for no_store in (True, False):
            sequence = rig.acquire(range(10 * B), no_store=no_store)
            rig.compute(sequence)
            rig.report(rig.message(sequence))
        rig.manager.detach(rig.session, process_dead=dead, now_ns=0)
        rig.manager.process_gone(rig.session)
        assert not rig.manager.check_integrity()
        assert rig.manager.snapshot().active_blocks == 0


def test_a_decoder_that_comes_back_may_name_what_it_has_passed() -> None:
    """It is not told what it lost of its table; such a block may be its own credit by now. All of it goes on; what it
    still reads must be its own: one such block of another makes it a misfit, the control."""
    for place, kept in ((0, True), (8, False)):
        rig = Rig(num_blocks=13, window_tokens=WINDOW)
        sequence = rig.acquire(range(10 * B), no_store=True)
        before = list(sequence.table)
        rig.compute(sequence)
        rig.report(rig.message(sequence))
        rig.report(wanted=10)
        assert set(rig.credit[rig.session]) & set(before[:7])
        sequence.table[place] = rig.credit[rig.session][-1]
        rig.manager.away(rig.session, 0)
        held = Held(sequence.lease_id, pack(sequence.tokens), np.array(sequence.table, np.int32), 10 * B)
        credit = np.array(
            [block for block in rig.credit[rig.session] if place == 0 or block != before[place]], np.int32
        )
        if kept:
            answer = rig.manager.resume(rig.session, [held], credit, 0)
            assert answer.leases == [sequence.lease_id]
            decode(rig, sequence, 3 * B)
        else:
            with pytest.raises(InvalidArgument):
                rig.manager.resume(rig.session, [held], credit, 0)


@pytest.mark.parametrize("no_store", [True, False])
def test_a_new_manager_takes_over_what_has_let_go(no_store: bool) -> None:
    """After a death a sequence is leased again with what it reads, and publishes on where it did. Whatever stands
    before that in the decoder's table is not believed."""
    rig = DyingRig(num_blocks=24, window_tokens=WINDOW)
    sequence = rig.acquire(range(10 * B), no_store=no_store)
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    own = list(sequence.table)
    sequence.table[0] = own[0] % 24 + 1 if no_store else own[9]
    rig.die()
    rig.come_back()
    rig.check()
    assert held(rig, sequence) == 3
    lease = rig.manager._state.book.leases[sequence.lease_id]
    assert lease.store is not no_store and lease.blocks.tolist()[7:] == own[7:]
    decode(rig, sequence, 3 * B)
    assert (rig.serve([*range(10 * B), 7]) == 0) is no_store
    rig.finish(sequence)
    rig.report(returned=rig.credit[rig.session])
    rig.quiet()


def test_null_blocks_are_claimed_only_before_the_window() -> None:
    """A table with a gap in what is still read makes no lease."""
    rig = DyingRig(num_blocks=24, window_tokens=WINDOW)
    sequence = rig.acquire(range(10 * B), no_store=True)
    rig.compute(sequence)
    rig.report(rig.message(sequence))
    sequence.table[7] = 0
    rig.die()
    rig.come_back()
    assert not sequence.lease_id and not rig.manager.check_integrity()


def test_a_prompt_may_be_longer_than_the_pool() -> None:
    """Its lease begins with half the pool and takes the rest from credit; found again as others are. Where not even a
    window fits, and without windows, it is refused for good."""
    rig = Rig(num_blocks=12, window_tokens=WINDOW)
    prompt = range(40 * B)
    for num_blocks, cached in ((6, 0), (40, 40 * B - 1)):
        sequence = rig.acquire(prompt)
        assert (len(sequence.table), sequence.computed) == (num_blocks, cached)
        assert prefill(rig, sequence)
        rig.report(rig.message(sequence, release=True), returned=rig.credit[rig.session])
        rig.quiet()
    for num_blocks, window in ((12, 0), (4, WINDOW)):
        rig = Rig(num_blocks=num_blocks, window_tokens=window)
        with pytest.raises(ResourceExhausted) as refused:
            rig.acquire(prompt)
        assert refused.value.reason == "EXCEEDS_POOL"


@pytest.mark.parametrize(("floors", "refused"), [((6, 6), 0), ((17, 7), 5), ((24, 0), 5)])
def test_the_floor_of_a_tenant_does_not_keep_its_prompt_from_its_end(floors: tuple[int, int], refused: int) -> None:
    """Credit is nobody's, so floors that take the whole pool leave none, also where the tenant's own idle blocks fill
    its floor. Its prompt, longer than the pool, gives way `refused` times then, and goes on behind what it computed."""
    rig = Rig(num_blocks=24, window_tokens=B)
    for tenant, floor in zip("ab", floors, strict=True):
        rig.manager.set_quota(TenantId(tenant), Quota(floor_blocks=floor))
    if floors[1]:
        rig.serve(range(1000, 1000 + floors[1] * B), tenant="b")
    computed = []
    while not computed or computed[-1] < 70 * B:
        sequence = rig.acquire(range(70 * B), resumed=bool(computed))
        assert not computed or sequence.computed >= min(computed[-1], 70 * B - 1), "it is computed again"
        prefill(rig, sequence)
        computed.append(sequence.computed)
        assert computed == sorted(set(computed)), "it does not come further"
        rig.report(rig.message(sequence, release=True), returned=rig.credit[rig.session])
        rig.check()
    assert len(computed) == refused + 1
    rig.quiet()


@pytest.mark.parametrize(("num_blocks", "window"), [(8, WINDOW), (5, WINDOW), (2, 1)])
def test_a_prompt_that_shares_half_the_pool_begins_with_a_block_of_its_own(num_blocks: int, window: int) -> None:
    """Where a window takes half of a small pool, and more, the lease of a prompt that is found has room to go on."""
    rig = Rig(num_blocks=num_blocks, window_tokens=window)
    first = rig.acquire(range(20 * B))
    assert len(first.table) == num_blocks // 2
    assert prefill(rig, first)
    rig.report(rig.message(first, release=True), returned=rig.credit[rig.session])
    longer = rig.acquire(range(30 * B))
    shared = sum(block > 0 for block in longer.table[:20])
    assert longer.computed == 20 * B and shared
    assert len(longer.table) == 20 + max(num_blocks // 2 - shared, 1)
    assert prefill(rig, longer)
    rig.check()


def test_the_check_sees_what_was_let_go_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: a window that is one block too short is seen by the integrity check, and by who reads."""
    rig = Rig(num_blocks=64, window_tokens=WINDOW)
    right = windows.passed_by
    with monkeypatch.context() as patch:
        patch.setattr(windows, "passed_by", lambda state, num_tokens: right(state, num_tokens) + 1)
        sequence = rig.acquire(range(10 * B), no_store=True)
        rig.compute(sequence)
        rig.report(rig.message(sequence))
    assert any("that it may read" in line for line in rig.manager.check_integrity())
    rig.manager._state.window_tokens = 0  # the manager's own check is silenced: the shadow memory judges alone
    with pytest.raises(AssertionError):
        rig.check()
