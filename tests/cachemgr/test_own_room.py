"""Sequences that stand still are lent what their own tenants may have, where floors leave no credit."""

from __future__ import annotations

import numpy as np
import pytest

from cachemgr import reports
from cachemgr.ids import LeaseId, TenantId
from cachemgr.quotas import Quota
from cachemgr.results import Keep, Reported
from cachemgr.resuming import Held
from common.errors import ResourceExhausted
from tests.cachemgr.core_rig import Rig, Running, pack

B = 4
NO_BLOCKS = np.zeros(0, np.int32)


def full(num_blocks: int = 24, floors: tuple[int, int] = (14, 10), window_tokens: int = 0) -> Rig:
    """A pool that floors take whole: tenant "b" has its floor cached, of "a" fills the rest what is idle."""
    rig = Rig(num_blocks=num_blocks, window_tokens=window_tokens)
    for tenant, floor in zip("ab", floors, strict=True):
        rig.manager.set_quota(TenantId(tenant), Quota(floor_blocks=floor))
    if floors[1]:
        rig.serve(range(1000, 1000 + floors[1] * B), tenant="b")
    return rig


def ask(rig: Rig, *lacking: LeaseId, wanted: int = 1, returned: tuple[int, ...] = ()) -> Reported:
    """A report that wants credit, for leases that stand still."""
    answer = rig.manager.report(
        rig.session,
        [],
        returned=np.array(returned, np.int32),
        wanted=wanted,
        lacking=lacking,
        applied_revision=rig.revision[rig.session],
        now_ns=0,
    )
    rig.credit[rig.session] += answer.credit.tolist()
    return answer


def take(rig: Rig, sequence: Running, blocks: list[int]) -> Reported:
    """A sequence takes blocks, and the manager is told."""
    sequence.table += blocks
    sequence.taken += blocks
    return rig.report(rig.message(sequence))


def charged(rig: Rig) -> dict[str, int]:
    """Blocks of each tenant."""
    return {name: rig.manager.quota_usage(TenantId(name)).used_blocks for name in "ab"}


def test_what_is_lent_is_the_tenants_own() -> None:
    """Idle blocks of a tenant at its floor go for its own sequence, and for nobody's credit; other floors are whole."""
    rig = full()
    sequence = rig.acquire(range(B))
    rig.serve(range(100, 100 + 13 * B))
    assert charged(rig) == {"a": 14, "b": 10}
    answer = ask(rig, sequence.lease_id)
    assert not len(answer.credit)
    (growth,) = answer.grown
    assert growth.lease_id == sequence.lease_id
    assert len(growth.blocks) == 1
    assert charged(rig) == {"a": 13, "b": 10}, "credit is nobody's until it is taken"
    rig.check()
    assert not take(rig, sequence, growth.blocks.tolist()).refusals
    assert charged(rig) == {"a": 14, "b": 10}
    assert ask(rig, sequence.lease_id, wanted=0).grown == [], "who wants nothing is lent nothing"
    rig.finish(sequence)
    rig.quiet()


def test_a_sequence_is_lent_as_much_as_it_is_named_for_and_its_tenant_has() -> None:
    """One block an entry, in their order; leases that are over, and those of a tenant with nothing left, get none."""
    rig = full()
    first, second = rig.acquire(range(2 * B)), rig.acquire(range(50, 50 + 8 * B))
    theirs = rig.acquire(range(3000, 3000 + 10 * B), tenant="b")  # holds all that its tenant has
    rig.serve(range(100, 100 + 4 * B))
    named = (first.lease_id, theirs.lease_id, LeaseId(999), *[second.lease_id] * 2, first.lease_id, second.lease_id)
    grown = {item.lease_id: len(item.blocks) for item in ask(rig, *named, wanted=7).grown}
    assert grown == {first.lease_id: 2, second.lease_id: 2}
    rig.check()


def test_credit_comes_before_what_is_lent() -> None:
    """Where some credit is to be had, as many entries as that does for are lent nothing: the best ranked ones."""
    rig = full(floors=(12, 10))
    sequences = [rig.acquire(range(start, start + B)) for start in (0, 50, 80)]
    rig.serve(range(100, 100 + 11 * B))
    answer = ask(rig, *(sequence.lease_id for sequence in sequences), wanted=3)
    assert len(answer.credit) == 2
    assert [item.lease_id for item in answer.grown] == [sequences[2].lease_id]
    assert ask(rig, sequences[0].lease_id, wanted=0).grown == []


def test_only_who_was_lent_a_block_may_take_it() -> None:
    """Another sequence that takes it loses its lease, also one of the same tenant; given back it is credit like any."""
    rig = full()
    mine, other = rig.acquire(range(B)), rig.acquire(range(50, 50 + B))
    rig.serve(range(100, 100 + 12 * B))
    (growth,) = ask(rig, mine.lease_id).grown
    (refusal,) = take(rig, other, growth.blocks.tolist()).refusals
    assert refusal.lease_id == other.lease_id
    assert not rig.manager._state.book.sessions[rig.session].lent
    rig.report()
    rig.serve(range(200, 200 + 2 * B))
    again = rig.acquire(range(50, 50 + B))
    (growth,) = ask(rig, mine.lease_id).grown
    ask(rig, returned=tuple(growth.blocks.tolist()), wanted=0)
    rig.check()
    rig.manager.set_quota(TenantId("a"), Quota())
    credit = ask(rig, wanted=24).credit.tolist()
    assert set(growth.blocks.tolist()) <= set(credit)
    assert not take(rig, again, growth.blocks.tolist()).refusals


def test_kept_branches_of_the_tenant_give_way() -> None:
    """What a kept conversation holds is no reason to stand still."""
    rig = full()
    sequence = rig.acquire(range(B))
    kept = rig.acquire(range(100, 100 + 13 * B), no_store=True)
    rig.compute(kept)
    rig.report(rig.message(kept, release=True)._replace(keep=Keep(b"k" * 16, 10**9)))
    assert ask(rig, sequence.lease_id).grown
    rig.check()


@pytest.mark.parametrize("heard", [True, False])
def test_a_broken_stream_keeps_what_was_lent_and_heard(heard: bool) -> None:
    """In the table it is kept, as other credit that was taken; where the answer was lost it is let go."""
    rig = full()
    sequence = rig.acquire(range(B))
    rig.serve(range(100, 100 + 13 * B))
    (growth,) = ask(rig, sequence.lease_id).grown
    table = sequence.table + (growth.blocks.tolist() if heard else [])
    rig.manager.away(rig.session, 0)
    held = Held(sequence.lease_id, pack(sequence.tokens), np.array(table, np.int32), 0)
    resumed = rig.manager.resume(rig.session, [held], NO_BLOCKS, 0)
    assert resumed.leases == [sequence.lease_id]
    sequence.table = table
    assert charged(rig)["a"] == 13 + heard
    assert not rig.manager._state.book.sessions[rig.session].lent
    rig.check()


def test_the_check_sees_a_loan_that_is_no_credit() -> None:
    """Positive control of the integrity check."""
    rig = full()
    sequence = rig.acquire(range(B))
    rig.manager._state.book.sessions[rig.session].lent[3] = sequence.lease_id
    assert any("lent" in violation for violation in rig.manager.check_integrity())


def prefill(rig: Rig, sequence: Running) -> bool:
    """Computes a prompt beyond its table, a block a step, on credit or on what it is lent; False where neither came."""
    while sequence.computed < len(sequence.tokens):
        if sequence.computed == len(sequence.table) * B:
            answer = ask(rig, sequence.lease_id)
            blocks = [*answer.credit.tolist(), *(block for item in answer.grown for block in item.blocks.tolist())]
            rig.credit[rig.session].clear()
            if not blocks:
                return False
            sequence.table += blocks
            sequence.taken += blocks
        rig.compute(sequence, min((sequence.computed // B + 1) * B, len(sequence.tokens)))
        rig.report(rig.message(sequence))
        rig.check()
    return True


@pytest.mark.parametrize("floors", [(17, 7), (24, 0)])
@pytest.mark.parametrize("no_store", [True, False])
def test_a_prompt_that_reads_nothing_comes_to_its_end(
    floors: tuple[int, int], no_store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where floors take the whole pool and idle blocks fill them, a prompt longer than the pool that may read nothing
    needs its own tenant's room. Without it (the rule before) it gives way at the same place each time."""
    rig = full(floors=floors, window_tokens=B)
    rig.serve(range(2000, 2000 + floors[0] * B))
    sequence = rig.acquire(range(70 * B), no_read=True, no_store=no_store)
    assert prefill(rig, sequence)
    rig.report(rig.message(sequence, release=True))
    rig.quiet()
    if no_store:
        return  # what it has passed is free then, and credit
    monkeypatch.setattr(reports, "lend_own", lambda *_: [])
    rig = full(floors=floors, window_tokens=B)
    rig.serve(range(2000, 2000 + floors[0] * B))
    ends: list[int] = []
    for _ in range(6):
        sequence = rig.acquire(range(70 * B), no_read=True, resumed=bool(ends))
        assert not prefill(rig, sequence)
        ends.append(sequence.computed)
        rig.report(rig.message(sequence, release=True))
    assert ends[1:] == ends[1:2] * 5


@pytest.mark.parametrize("no_read", [True, False])
def test_a_window_that_the_tenant_has_no_room_for_is_refused(no_read: bool) -> None:
    """A prompt longer than the pool begins with half of it; where its window needs more, and other floors leave that
    much to nobody, it is told so at once. One block more, and it comes to its end."""
    for floor, fits in ((11, False), (10, True)):
        rig = full(floors=(24 - floor, floor), window_tokens=13 * B)
        if not fits:
            with pytest.raises(ResourceExhausted) as refused:
                rig.acquire(range(70 * B), no_read=no_read)
            assert refused.value.reason == "EXCEEDS_USABLE"
            assert (refused.value.needed, refused.value.usable) == (14, 13)
        else:
            sequence = rig.acquire(range(70 * B), no_read=no_read)
            assert len(sequence.table) == 12
            assert prefill(rig, sequence)
