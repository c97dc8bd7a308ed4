"""Adoption: a new manager has the index of the one that died, and what decoders held is leased to them again, or to
nobody; nothing of it is given to anybody else before they are heard."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from cachemgr.adoption import LIMBO
from cachemgr.ids import TenantId
from cachemgr.journal import IndexJournal
from cachemgr.journal_format import Sections, write_header
from cachemgr.manager import CacheManager
from cachemgr.nodes import Tree
from cachemgr.quotas import Quota
from cachemgr.recovery import recover
from cachemgr.results import Acquired, SequenceReport
from common.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from tests.cachemgr.adoption_rig import DyingRig, claim_of, wander
from tests.cachemgr.core_rig import root_of
from tests.cachemgr.journal_rig import identity


def test_what_was_cached_is_a_hit_afterwards() -> None:
    """With nothing running, the index is whole after the death, tails and wider scopes included; all else is free."""
    rig = DyingRig()
    rig.serve(range(1, 12))
    rig.serve([*range(1, 9), 77, 78, 79])
    rig.serve(range(40, 54), scope="@public", num_tokens=8)
    before = rig.manager.snapshot()
    rig.die()
    rig.come_back()
    rig.check()
    after = rig.manager.snapshot()
    assert (after.cached_blocks, after.free_blocks) == (before.cached_blocks, before.free_blocks)
    assert after.adopted_blocks == before.cached_blocks
    assert rig.serve([*range(1, 12), 5]) == 11
    assert rig.serve([*range(1, 9), 77, 78, 79, 5]) == 11
    assert rig.serve(range(40, 55), scope="@public", num_tokens=8) == 14
    assert rig.serve(range(40, 55), tenant="b", scope="@public", num_tokens=8) == 8
    assert rig.serve(range(1, 12), tenant="b") == 0
    rig.check()


@pytest.mark.parametrize("seed", range(60))
def test_everybody_comes_back_and_nothing_is_lost(seed: int) -> None:
    """A death at a random moment of random work, a few times over: every sequence is kept, reads what it wrote, goes on
    to its end, and afterwards the pool is whole."""
    rng = random.Random(seed)
    rig = DyingRig(num_blocks=rng.choice((12, 24, 48)))
    rig.attach()
    for _ in range(4):
        wander(rig, rng, 40)
        listed = rig.manager.snapshot().indexed_blocks
        rig.die()
        assert rig.manager.snapshot().indexed_blocks == listed
        held = len(rig.sequences)
        answers = rig.come_back()
        assert [lease for answer in answers for lease in answer.leases if not lease] == []
        assert len(rig.sequences) == held
        rig.check()
    for sequence in list(rig.sequences):
        rig.finish(sequence)
    for session in list(rig.credit):
        rig.report(session=session, returned=list(rig.credit[session]))
    rig.quiet()


def test_what_a_report_left_for_later_is_published_after_the_death() -> None:
    """A manager that died between an answer and the listing of what the report had sealed: the decoder presents it, and
    the next manager lists it."""
    rig = DyingRig()
    sequences = [rig.acquire([number] * 4) for number in range(1, 9)]
    rig.report(wanted=8)
    for token in (0, 7, 7, 7, 7):
        for sequence in sequences:
            assert not token or rig.grow(sequence, token)
            rig.compute(sequence)
        rig.report(*map(rig.message, sequences))
    assert len(rig.manager._core.late) == 8
    rig.die()
    assert rig.manager.snapshot().indexed_blocks == 8
    assert all(lease for answer in rig.come_back() for lease in answer.leases)
    rig.check()
    assert rig.manager.snapshot().indexed_blocks == 16
    assert rig.acquire([3, 3, 3, 3, 7, 7, 7, 7, 1]).computed == 8


@pytest.mark.parametrize("seed", range(30))
def test_of_two_decoders_one_is_dead(seed: int) -> None:
    """What the dead one held is free once the other has claimed; the other lost nothing."""
    rng = random.Random(seed)
    rig = DyingRig(num_blocks=24)
    dead = rig.attach()
    wander(rig, rng, 80)
    rig.die()
    rig.sequences = [sequence for sequence in rig.sequences if sequence.session != dead]
    del rig.credit[dead]
    answers = rig.come_back()
    assert all(lease for answer in answers for lease in answer.leases)
    rig.check()
    for sequence in list(rig.sequences):
        rig.finish(sequence)
    for session in list(rig.credit):
        rig.report(session=session, returned=list(rig.credit[session]))
    rig.quiet()


def test_nothing_is_allocated_or_evicted_before_everybody_is_heard() -> None:
    """While it adopts, a manager gives no block away, though half of its pool is cached; then it does."""
    rig = DyingRig(num_blocks=8)
    rig.serve(range(1, 17))
    rig.die()
    assert rig.manager.adopting
    session = rig.attach()
    with pytest.raises(ResourceExhausted, match="can be had now"):
        rig.acquire(range(50, 55), session=session)
    assert rig.manager.credit(session, 4, 0).tolist() == []
    with pytest.raises(Unavailable, match="waits for the decoders"):
        rig.manager.evict(everything=True)
    with pytest.raises(Unavailable, match="waits for the decoders"):
        rig.manager.purge(TenantId("a"))
    rig.manager.finish_adoption(now_ns=0)
    assert not rig.manager.adopting
    assert rig.acquire(range(50, 55), session=session).lease_id
    with pytest.raises(FailedPrecondition, match="nothing to claim"):
        rig.manager.claim(session, [], np.zeros(0, np.int32), 0)


def test_what_a_late_process_may_write_stays_quarantined_until_it_is_dead() -> None:
    """A process that lives and did not come: what it was given last waits for its death; all else serves, what it gave
    back before and what others had is free."""
    rig = DyingRig(num_blocks=12)
    late = rig.attach()
    rig.serve(range(1, 9))
    rig.report(session=late, wanted=3)
    back = rig.credit[late][:2]
    rig.report(session=late, returned=back)
    rig.report(wanted=1)  # one of those two
    lost = rig.acquire(range(30, 38), session=late)
    rig.die()
    rig.sequences.remove(lost)
    rig.manager.finish_adoption(writers={late}, now_ns=0)
    shot = rig.manager.snapshot()
    writable = {*lost.table, *rig.credit[late]}
    assert len(writable) == 3
    assert shot.cached_blocks == 2
    assert shot.quarantined_blocks == len(writable | set(back) - set(rig.credit[rig.session]))
    assert rig.manager.check_integrity() == []
    session = rig.attach()
    granted = set(rig.manager.credit(session, 12, 0).tolist())
    assert len(granted) == 12 - shot.quarantined_blocks  # what is cached may be evicted, what is quarantined may not
    assert not writable & granted
    assert granted >= set(rig.credit[rig.session])
    assert rig.manager.process_gone(LIMBO) == shot.quarantined_blocks
    assert rig.manager.check_integrity() == []


def test_a_block_that_may_be_written_is_claimed_once() -> None:
    """Of two decoders that both say that a writable block is theirs, the second loses that sequence alone; its blocks
    are not free before it has acknowledged."""
    rig = DyingRig(num_blocks=16)
    thief = rig.attach()
    mine = rig.acquire(range(1, 7))
    rig.compute(mine)
    other = rig.acquire(range(50, 56), session=thief)
    fine = rig.acquire(range(70, 76), session=thief)
    rig.die()
    rig.claim(rig.session, [mine])
    other.table[1] = mine.table[1]
    answer = rig.claim(thief, [other, fine])
    assert [bool(lease) for lease in answer.leases] == [False, True]
    rig.manager.finish_adoption(now_ns=0)
    rig.check()
    free = rig.manager.snapshot().free_blocks
    rig.report(session=fine.session)
    assert rig.manager.snapshot().free_blocks == free + 1
    rig.check()


@pytest.mark.parametrize("source", ["its own", "limbo", "quarantine", "refused with it"])
def test_a_copy_is_claimed_from_where_it_was_alone(source: str) -> None:
    """A copy that has not run names a block that the index lists where it stood, or one of a sequence that is claimed:
    never what another session left unclaimed, or what is quarantined."""
    rig = DyingRig(num_blocks=24)
    victim = rig.attach()
    rig.serve(range(1, 8))
    secret = rig.acquire(range(50, 58), session=victim, tenant="b", no_store=True)
    rig.compute(secret)
    copying = rig.acquire([*range(1, 7), 90, 91, 92])
    assert copying.copy is not None
    held = rig.acquire(range(70, 78), no_store=True)
    rig.compute(held)
    rig.die()
    claims = [claim_of(copying), claim_of(held, no_store=True)]
    if source == "quarantine":
        rig.manager.finish_adoption(now_ns=0, writers={int(victim)})
        rig.manager._state.frozen = True
        claims = claims[:1]
        claims[0] = replace(claims[0], held=replace(claims[0].held, blocks=claims[0].held.blocks[:1]))
    if source == "refused with it":
        claims[1] = replace(claims[1], valid=False)
    number = {"its own": copying.copy.source, "refused with it": held.table[1]}.get(source, secret.table[1])
    copy = copying.copy._replace(source=number)
    claims[0] = replace(claims[0], held=replace(claims[0].held, copy=copy))
    answer = rig.manager.claim(rig.attach(), claims, np.zeros(0, np.int32), 0)
    assert bool(answer.leases[0]) is (source == "its own")
    assert rig.manager.check_integrity() == []


@pytest.mark.parametrize("ended", [False, True])
def test_a_block_whose_holder_has_ended_is_claimed_by_nobody(ended: bool) -> None:
    """A sequence that was claimed and ended while others are waited for: its blocks are free, and no part of the table
    of another that says the same."""
    rig = DyingRig(num_blocks=16)
    first = rig.acquire(range(1, 9), no_store=True)
    rig.compute(first)
    same = claim_of(first, no_store=True)
    rig.die()
    session, nothing = rig.attach(), np.zeros(0, np.int32)
    (lease,) = rig.manager.claim(session, [same], nothing, 0).leases
    if ended:
        news = [SequenceReport(lease, release=True)]
        rig.manager.report(session, news, returned=nothing, wanted=0, applied_revision=0, now_ns=0)
    answer = rig.manager.claim(rig.attach(), [same], nothing, 0)
    assert bool(answer.leases[0]) is not ended
    assert rig.manager.check_integrity() == []


def test_branches_whose_beginning_is_listed_by_another_keep_what_they_share() -> None:
    """Two branches share blocks that are not listed, the first of which another sequence has in the index: the block
    after it is listed by the first branch and is the second's as it is, held once for each."""
    rig = DyingRig(num_blocks=16)
    trunk = rig.acquire(range(1, 13))
    rig.compute(trunk)
    rig.report(rig.message(trunk))
    (branch,) = rig.fork(trunk, [1], 8)
    rig.manager.purge(TenantId("a"))
    rig.serve(range(1, 5))
    rig.die()
    assert rig.manager.snapshot().indexed_blocks == 1
    answer = rig.claim(rig.session, [trunk, branch])
    assert all(answer.leases)
    assert trunk.table[:2] == branch.table[:2]
    rig.manager.finish_adoption(now_ns=0)
    rig.check()
    rig.report()
    rig.check()
    for sequence in (trunk, branch):
        rig.finish(sequence)
    rig.report()
    rig.quiet()


def test_a_block_is_shared_only_behind_the_same_tokens() -> None:
    """A decoder that shows one sealed block in two sequences that begin differently, or under two cache keys, loses the
    second one; behind the same tokens, in other blocks, it is shared."""
    for kind in ("beginning", "root", "same"):
        rig = DyingRig(num_blocks=16)
        first = rig.acquire([1, 2, 3, 4, 5, 6, 7, 8, 9])
        second = rig.acquire([1, 2, 3, 4, 5, 6, 7, 8, 10], no_read=True)
        for sequence in (first, second):
            rig.compute(sequence)
        rig.die()
        second.table[1] = first.table[1]
        if kind == "beginning":
            second.tokens[0] = 77
        claims = [claim_of(first), claim_of(second)]
        if kind == "root":
            claims[1] = replace(claims[1], root=root_of("another key"))
        answer = rig.manager.claim(rig.attach(), claims, np.zeros(0, np.int32), 0)
        assert [bool(lease) for lease in answer.leases] == [True, kind == "same"]
        rig.manager.finish_adoption(now_ns=0)
        assert rig.manager.check_integrity() == []


def test_credit_is_claimed_once() -> None:
    """Credit that is listed, claimed by another or named twice is refused whole."""
    rig = DyingRig(num_blocks=8)
    rig.serve(range(1, 5))
    rig.report(wanted=2)
    credit = list(rig.credit[rig.session])
    rig.die()
    cached = next(view.block for view in rig.manager.list_blocks(limit=8).items if view.published)
    for wrong in ([cached], [credit[0], credit[0]], [0], [99]):
        session = rig.attach()
        with pytest.raises(InvalidArgument, match="credit"):
            rig.manager.claim(session, [], np.array(wrong, np.int32), 0)
    rig.claim(rig.session, [], credit)
    with pytest.raises(InvalidArgument, match="credit"):
        rig.manager.claim(rig.attach(), [], np.array(credit[:1], np.int32), 0)
    rig.manager.finish_adoption(now_ns=0)
    rig.check()


@pytest.mark.parametrize("seed", range(200))
def test_a_lying_or_broken_decoder_harms_itself_alone(seed: int) -> None:
    """Random nonsense in what is presented: whatever is kept, the books add up, and no other sequence reads a wrong
    cell."""
    rng = random.Random(seed)
    rig = DyingRig(num_blocks=24)
    broken = rig.attach()
    wander(rig, rng, 60)
    rig.die()
    honest = [sequence for sequence in rig.sequences if sequence.session != broken]
    liars = [sequence for sequence in rig.sequences if sequence.session == broken]
    credit = rig.credit.pop(broken)
    for session, own in list(rig.credit.items()):
        rig.claim(session, [sequence for sequence in honest if sequence.session == session], own)
        del rig.credit[session]
    for sequence in liars:
        kind = rng.randrange(6)
        place = rng.randrange(len(sequence.table))
        if kind == 0:
            sequence.table[place] = rng.randrange(-1, 27)
        elif kind == 1:
            sequence.computed = rng.randrange(40)
        elif kind == 2:
            sequence.tokens[rng.randrange(len(sequence.tokens))] = 999
        elif kind == 3:
            sequence.table.append(rng.randrange(1, 25))
        elif kind == 4:
            sequence.tenant = "a" if sequence.tenant == "b" else "b"
    session = rig.attach()
    answer = rig.manager.claim(session, [claim_of(liar) for liar in liars], np.array(credit, np.int32), 0)
    rig.sequences = honest
    rig.manager.finish_adoption(now_ns=0)
    rig.check()
    rig.manager.report(
        session, [], returned=np.zeros(0, np.int32), wanted=0, applied_revision=answer.revision, now_ns=0
    )
    rig.check()
    rig.manager.detach(session, process_dead=True, now_ns=0)
    rig.check()


def test_what_expires_while_it_adopts_goes_afterwards() -> None:
    """A time to live is on record too: it ends nothing that a decoder might yet claim, and everything after that."""
    rig = DyingRig(num_blocks=8)
    kept = rig.acquire(range(1, 10))
    rig.finish(kept)
    short = rig.manager.acquire(
        rig.session, tenant=TenantId("a"), root=root_of("a"), tokens=bytes(4 * 9), request_id="r", sample=0,
        ttl_ns=1000, now_ns=0,
    )  # fmt: skip
    assert isinstance(short, Acquired)
    rig.report(SequenceReport(short.lease_id, sealed_tokens=9, release=True))
    rig.die()
    rig.manager.tick(2000)
    assert rig.manager.snapshot().cached_blocks == 6
    rig.manager.finish_adoption(now_ns=2000)
    rig.manager.tick(2000)
    assert rig.manager.snapshot().cached_blocks == 3
    assert rig.manager.check_integrity() == []


def test_owners_that_are_gone_are_not_adopted() -> None:
    """A tenant that was deleted just before the death has nothing in the new index, and its blocks are free."""
    rig = DyingRig()
    rig.serve(range(1, 12), tenant="a")
    rig.serve(range(1, 12), tenant="b")
    found = recover(IndexJournal(rig.memory))
    manager = CacheManager(num_blocks=32, block_tokens=4, epoch=8)
    listed = manager.adopt(found, 0, lambda tenant: tenant != TenantId("b"))
    manager.finish_adoption(now_ns=0)
    assert len(listed) == 3
    assert manager.snapshot().free_blocks == 29
    assert manager.check_integrity() == []


def test_the_oldest_goes_first_afterwards() -> None:
    """Eviction goes on in the order in which paths were published."""
    rig = DyingRig(num_blocks=8)
    rig.serve(range(1, 9))
    rig.serve(range(40, 48))
    rig.die()
    rig.come_back()
    rig.manager.evict(num_blocks=2)
    assert rig.serve([*range(40, 48), 1]) == 8
    assert rig.serve([*range(1, 9), 1]) == 0


def test_a_large_index_is_read_quickly() -> None:
    """100,000 blocks in 12,500 nodes are recovered and adopted within a bound that is far above what it takes."""
    size, count = 16, 100_000
    memory = np.zeros(Sections.of(count, size).end, np.uint8)
    write_header(memory, identity(count, size), 7)
    journal = IndexJournal(memory)
    rng = np.random.default_rng(1)
    tree = Tree(1, root_of("a"))
    for first in range(1, count, 8):
        tokens = rng.integers(0, 50_000, 8 * size, np.int32).tobytes()
        journal.publish("a", tree, 0, tokens, np.arange(first, first + 8), 0, priority=50)
    manager = CacheManager(num_blocks=count, block_tokens=size, epoch=8)
    started = time.monotonic()
    listed = manager.adopt(recover(IndexJournal(memory)), 0)
    seconds = time.monotonic() - started
    assert len(listed) == count
    assert seconds < 20
    assert manager.check_integrity() == []
    print(f"{count} blocks adopted in {seconds:.2f} s")


def test_floors_do_not_make_the_room_of_a_frozen_core_negative() -> None:
    """A decoder that asks a core that is still frozen for credit gets none, whoever's floors there are."""
    rig = DyingRig()
    rig.serve(range(12), tenant="a")
    rig.die()
    rig.manager.set_quota(TenantId("a"), Quota(floor_blocks=3))
    session = rig.attach()
    assert rig.manager.credit(session, 4, 0).tolist() == []
    answer = rig.manager.report(session, [], returned=np.zeros(0, np.int32), wanted=2, applied_revision=0, now_ns=0)
    assert answer.credit.tolist() == []


@pytest.mark.parametrize("ceiling", [0, 4])
def test_above_its_ceiling_after_claims_a_tenant_gets_nothing_more(ceiling: int) -> None:
    """What grew above a ceiling while no daemon was there is kept, and may end; until the tenant is below it again
    nothing more is leased and no sequence grows. Without a ceiling both go on."""
    rig = DyingRig(num_blocks=16)
    first, second = rig.acquire(range(1, 9)), rig.acquire(range(20, 28))
    for sequence in (first, second):
        rig.compute(sequence)
    rig.report(wanted=4)
    credit = list(rig.credit[rig.session])
    first.table.append(credit.pop())  # it grew while nobody was there to ask
    first.tokens.append(77)
    rig.compute(first)
    rig.die()
    rig.manager.set_quota(TenantId("a"), Quota(ceiling_blocks=ceiling))
    assert all(rig.claim(rig.session, [first, second], credit).leases)
    rig.manager.finish_adoption(now_ns=0)
    assert rig.manager.snapshot().tenants[0].used_blocks == 5
    second.taken, second.tokens = [credit[0]], [*second.tokens, 78]
    second.table.append(credit[0])
    grown = rig.report(rig.message(second))
    assert [refusal.error.reason for refusal in grown.refusals] == (["QUOTA_EXCEEDED"] if ceiling else [])
    if not ceiling:
        assert rig.acquire([90, 91]).table
        return
    with pytest.raises(ResourceExhausted) as caught:
        rig.acquire(range(40, 50))
    assert caught.value.reason == "QUOTA_EXCEEDED"
    rig.finish(first)
    rig.report()
    assert rig.acquire(range(40, 50)).table
    assert rig.manager.check_integrity() == []
