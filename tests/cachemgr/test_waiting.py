"""Sharing while computing: who waits for whom, and what ends a wait."""

from __future__ import annotations

import numpy as np
import pytest

from cachemgr.ids import SessionId, TenantId
from cachemgr.results import Acquired, SequenceReport, Waiting
from cachemgr.resuming import Held
from cachemgr.waiting import MAX_WAITS
from tests.cachemgr.core_rig import NO_BLOCKS, Rig, Running, pack, root_of, span_of

B = 4
PROMPT = list(range(6 * B))
PUBLIC = "@public"


def ask(
    rig: Rig, tokens: list[int], *, tenant: str = "a", session: SessionId | None = None, request: str = "second",
    may_wait: bool = True, no_read: bool = False, scope: str = "", num_tokens: int = 0,
) -> Acquired | Waiting:  # fmt: skip
    """An acquire that may be answered with a wait."""
    return rig.manager.acquire(
        rig.session if session is None else session, tenant=TenantId(tenant), root=root_of(tenant), tokens=pack(tokens),
        request_id=request, sample=0, no_read=no_read, may_wait=may_wait, now_ns=0,
        prefix=span_of(scope, num_tokens) if scope else None,
    )  # fmt: skip


def waits(rig: Rig, tokens: list[int], **options: object) -> Waiting:
    """The wait that an acquire is answered with."""
    answer = ask(rig, tokens, **options)  # type: ignore[arg-type]
    assert isinstance(answer, Waiting)
    rig.check()
    return answer


def seal(rig: Rig, sequence: Running, num_tokens: int) -> None:
    """A chunk was computed and told."""
    rig.compute(sequence, num_tokens)
    rig.report(rig.message(sequence), session=sequence.session)


def ready(rig: Rig) -> list[int]:
    """Wait ids that are over since the last look."""
    return [wait for _, wait in rig.manager.take_ready_waits()]


def test_a_prompt_under_way_is_waited_for_and_computed_once() -> None:
    """The second one waits until every common block is published, and then has them all."""
    rig = Rig()
    first = rig.acquire(PROMPT)
    wait = waits(rig, [*PROMPT, 99])
    assert (wait.resident_tokens, wait.coming_tokens) == (0, 6 * B)
    seal(rig, first, 3 * B)
    assert ready(rig) == []
    seal(rig, first, 6 * B)
    assert rig.manager.take_ready_waits() == [(rig.session, wait.wait_id)]
    assert rig.manager.take_ready_waits() == []
    second = ask(rig, [*PROMPT, 99])
    assert isinstance(second, Acquired) and second.cached_tokens == 6 * B
    shot = rig.manager.snapshot()
    assert (shot.waits, shot.misses, shot.hits) == (1, 1, 1)


def test_a_wait_leases_and_counts_nothing() -> None:
    """The answer holds no block, and is neither a hit nor a miss."""
    rig = Rig()
    rig.acquire(PROMPT)
    before = rig.manager.snapshot()
    waits(rig, PROMPT)
    after = rig.manager.snapshot()
    assert (after.leases, after.active_blocks, after.misses) == (before.leases, before.active_blocks, before.misses)


def test_the_answer_says_what_is_there_and_what_comes() -> None:
    """Where chunks are sealed already, only the rest is waited for; the last token of a prompt is never promised."""
    rig = Rig()
    first = rig.acquire(PROMPT)
    seal(rig, first, 3 * B)
    wait = waits(rig, PROMPT)
    assert (wait.resident_tokens, wait.coming_tokens) == (3 * B, 6 * B - 1)


@pytest.mark.parametrize("common", [0, B - 1, B, 2 * B + 1])
def test_only_whole_common_blocks_are_waited_for(common: int) -> None:
    """Less than a block in common is no reason to wait."""
    rig = Rig()
    first = rig.acquire(PROMPT)
    other = [*PROMPT[:common], *range(500, 500 + 3 * B)]
    answer = ask(rig, other)
    if common < B:
        assert isinstance(answer, Acquired)
        return
    assert isinstance(answer, Waiting)
    assert answer.coming_tokens == common // B * B
    seal(rig, first, common // B * B)
    assert ready(rig) == [answer.wait_id]
    assert isinstance(ask(rig, other), Acquired)  # nothing more of it is coming


def test_no_wait_for_less_than_a_block_more_than_is_there() -> None:
    """What a copy gives already is not waited for."""
    rig = Rig()
    rig.serve(PROMPT[: 2 * B + 3])
    rig.acquire([*PROMPT[: 3 * B], *range(900, 900 + 2 * B)], no_read=True)
    answer = ask(rig, [*PROMPT[: 3 * B], 77])
    assert isinstance(answer, Acquired) and answer.cached_tokens == 2 * B + 3


@pytest.mark.parametrize("how", ["may_wait", "no_read"])
def test_who_may_not_wait_computes(how: str) -> None:
    """Without `may_wait`, or without reading, the same acquire is a lease."""
    rig = Rig()
    rig.acquire(PROMPT)
    assert isinstance(ask(rig, PROMPT), Waiting)
    assert isinstance(ask(rig, PROMPT, may_wait=how != "may_wait", no_read=how == "no_read"), Acquired)


def test_what_is_not_stored_is_not_waited_for() -> None:
    """A sequence that publishes nothing is no producer; one that reads nothing is."""
    rig = Rig()
    rig.acquire(PROMPT, no_store=True)
    assert isinstance(ask(rig, PROMPT), Acquired)
    other = Rig()
    other.acquire(PROMPT, no_read=True)
    assert isinstance(ask(other, PROMPT), Waiting)


def test_a_hit_is_no_producer_and_a_decoding_sequence_neither() -> None:
    """Who computes less than a block of its prompt is not waited for; nor is anybody for what is generated."""
    rig = Rig()
    rig.serve(PROMPT)
    rig.acquire([*PROMPT, 5, 6])
    rig.manager.evict(num_blocks=32)
    assert isinstance(ask(rig, [*PROMPT, 5, 6, 7, 8, 9]), Acquired)
    decoding = rig.acquire([*range(300, 300 + B), 1])
    seal(rig, decoding, B)
    rig.report(wanted=3)
    for token in range(B):
        rig.grow(decoding, token)
    rig.report(rig.message(decoding))
    assert isinstance(ask(rig, [*decoding.tokens, 4]), Acquired)


@pytest.mark.parametrize("end", ["release", "refusal", "rollback", "purge", "dead", "lost", "away"])
def test_every_end_of_the_producer_ends_the_wait(end: str) -> None:
    """If the first one dies, whichever way, the second is told at once, and computes."""
    rig = Rig()
    other = rig.attach()
    first = rig.acquire(PROMPT, session=other)
    wait = waits(rig, PROMPT)
    seal(rig, first, B)
    assert ready(rig) == []
    match end:
        case "release":
            rig.report(rig.message(first, release=True), session=other)
        case "refusal":
            lie = SequenceReport(first.lease_id, sealed_tokens=1000)
            assert rig.report(lie, session=other).refusals
        case "rollback":
            rig.manager.rollback(other, first.lease_id, 2 * B, 0)
        case "purge":
            rig.manager.purge(TenantId("a"))
        case "away":
            rig.manager.away(other, 0)
        case _:
            rig.manager.detach(other, process_dead=end == "dead", now_ns=0)
    assert ready(rig) == [wait.wait_id]
    again = ask(rig, PROMPT)
    assert isinstance(again, Acquired)
    assert again.cached_tokens == (0 if end == "purge" else B)


def test_a_session_that_comes_back_is_waited_for_again() -> None:
    """While a producer's session is away nobody begins to wait; when it is back they do."""
    rig = Rig()
    other = rig.attach()
    first = rig.acquire(PROMPT, session=other)
    rig.manager.away(other, 0)
    idle = ask(rig, PROMPT)
    assert isinstance(idle, Acquired)
    rig.manager.report(
        rig.session, [SequenceReport(idle.lease_id, release=True)], returned=NO_BLOCKS, wanted=0,
        applied_revision=0, now_ns=0,
    )  # fmt: skip
    held = Held(first.lease_id, pack(PROMPT), np.array(first.table, np.int32), 0)
    rig.manager.resume(other, [held], NO_BLOCKS, 0)
    waits(rig, PROMPT)


def test_nobody_waits_for_another_tenant() -> None:
    """The same prompt under another tenant, or another root, is leased at once: its timing tells nothing."""
    rig = Rig()
    rig.acquire(PROMPT, tenant="a")
    assert isinstance(ask(rig, PROMPT, tenant="b"), Acquired)
    assert isinstance(ask(rig, PROMPT, tenant="a"), Waiting)  # the control


def test_a_shared_prefix_is_waited_for_across_tenants_and_no_token_more() -> None:
    """Of a prompt in a wider scope another tenant waits for the scope's blocks alone; its own tenant for all."""
    rig = Rig()
    first = rig.acquire(PROMPT, tenant="a", scope=PUBLIC, num_tokens=3 * B)
    other = waits(rig, PROMPT, tenant="b", scope=PUBLIC, num_tokens=3 * B, request="b")
    own = waits(rig, PROMPT, tenant="a", scope=PUBLIC, num_tokens=3 * B)
    assert (other.coming_tokens, own.coming_tokens) == (3 * B, 6 * B - 1)
    assert isinstance(ask(rig, PROMPT, tenant="b"), Acquired)
    assert isinstance(ask(rig, PROMPT, tenant="b", scope="@group:x", num_tokens=3 * B), Acquired)
    seal(rig, first, 3 * B)
    assert ready(rig) == [other.wait_id]
    assert isinstance(ask(rig, PROMPT, tenant="b", scope=PUBLIC, num_tokens=3 * B, request="b"), Acquired)
    seal(rig, first, 6 * B)
    assert ready(rig) == [own.wait_id]


def test_of_a_shorter_prefix_only_its_own_blocks_are_waited_for() -> None:
    """What a producer computes behind its prefix is private: a longer prefix waits for the common part alone."""
    rig = Rig()
    first = rig.acquire(PROMPT, tenant="a", scope=PUBLIC, num_tokens=2 * B)
    wait = waits(rig, PROMPT, tenant="b", scope=PUBLIC, num_tokens=5 * B)
    assert wait.coming_tokens == 2 * B
    seal(rig, first, 2 * B)
    assert ready(rig) == [wait.wait_id]
    assert isinstance(ask(rig, PROMPT, tenant="b", scope=PUBLIC, num_tokens=5 * B), Acquired)


def test_of_two_producers_the_one_that_goes_further_is_waited_for() -> None:
    """The longest common prefix is chosen; a wait names its own producer, whatever becomes of others."""
    rig = Rig()
    near = rig.acquire(PROMPT[: 3 * B])
    far = rig.acquire(PROMPT)
    wait = waits(rig, [*PROMPT, 9])
    assert wait.coming_tokens == 6 * B
    seal(rig, near, 3 * B)
    rig.report(rig.message(near, release=True))
    assert ready(rig) == []
    seal(rig, far, 6 * B)
    assert ready(rig) == [wait.wait_id]


def test_who_asks_again_waits_once() -> None:
    """A new wait takes the place of the request's old one; other requests and sessions have their own."""
    rig = Rig()
    other = rig.attach()
    first = rig.acquire(PROMPT)
    old = waits(rig, PROMPT)
    new = waits(rig, PROMPT)
    beside = waits(rig, PROMPT, request="third")
    far = waits(rig, PROMPT, session=other)
    assert len({old.wait_id, new.wait_id, beside.wait_id, far.wait_id}) == 4
    seal(rig, first, 6 * B)
    assert rig.manager.take_ready_waits() == [
        (rig.session, new.wait_id), (rig.session, beside.wait_id), (other, far.wait_id)
    ]  # fmt: skip


def test_a_session_that_ends_waits_no_more() -> None:
    """Nothing is kept for it, and others still hear."""
    rig = Rig()
    other = rig.attach()
    first = rig.acquire(PROMPT)
    waits(rig, PROMPT, session=other)
    mine = waits(rig, PROMPT)
    rig.manager.detach(other, process_dead=True, now_ns=0)
    seal(rig, first, 6 * B)
    assert rig.manager.take_ready_waits() == [(rig.session, mine.wait_id)]


def test_two_that_computed_the_same_end_with_one_copy() -> None:
    """Who did not wait switches to the published blocks; its own are free once that is acknowledged."""
    rig = Rig()
    first, second = rig.acquire(PROMPT), rig.acquire(PROMPT)
    for sequence in (first, second):
        rig.compute(sequence)
        rig.report(rig.message(sequence))
    rig.report()
    assert first.table == second.table
    assert rig.manager.snapshot().active_blocks == 6
    rig.finish(first)
    rig.finish(second)
    rig.quiet()


def test_nothing_is_left_behind() -> None:
    """Producers and waits go with their leases; a producer that is done is found no more, though it lives on."""
    rig = Rig(num_blocks=64)
    for tenant in ("a", "b"):
        for scope in ("", PUBLIC):
            sequence = rig.acquire(PROMPT, tenant=tenant, scope=scope, num_tokens=2 * B)
            ask(rig, PROMPT, tenant=tenant, scope=scope, num_tokens=2 * B)
            seal(rig, sequence, 6 * B)
    state = rig.manager._state.waits
    assert (state.producers, state.found) == ({}, {})
    assert rig.manager.snapshot().leases >= 4
    assert len(ready(rig)) == rig.manager.snapshot().waits


@pytest.mark.parametrize("kind", ["ended", "done", "untold", "lost", "elsewhere"])
def test_integrity_finds_a_broken_wait(kind: str) -> None:
    """A producer that ended or is done, a wait that should be over or is nobody's, and a wrong place are found."""
    rig = Rig()
    first = rig.acquire(PROMPT)
    waits(rig, PROMPT)
    seal(rig, first, B)
    state = rig.manager._state
    producer = state.waits.producers[first.lease_id]
    match kind:
        case "ended":
            del state.waits.producers[first.lease_id]
            state.waits.producers[type(first.lease_id)(99)] = producer
        case "done":
            producer.until = 1
        case "untold":
            producer.waits = {waiter: (wait, 1) for waiter, (wait, _) in producer.waits.items()}
        case "lost":
            producer.waits[SessionId(99), "r", 0] = (7, 6)
        case _:
            state.waits.found.clear()
    assert any("wait" in line or "found" in line for line in rig.manager.check_integrity())


def test_too_many_waits_for_one_producer_compute() -> None:
    """The memory that waits take is bounded."""
    rig = Rig(num_blocks=64)
    rig.acquire(PROMPT)
    for number in range(MAX_WAITS):
        assert isinstance(ask(rig, PROMPT, request=str(number)), Waiting)
    assert isinstance(ask(rig, PROMPT, request="0"), Waiting)
    assert isinstance(ask(rig, PROMPT, request="more"), Acquired)
