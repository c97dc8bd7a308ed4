"""Tenants in the queue and in the budget of a step: whose turn it is, what it costs, and what never counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidArgument
from common.tokens import pack_tokens
from decoder.admission import PATIENCE, QUANTUM_TOKENS, AdmissionQueue
from decoder.chunk_shares import divide, share_chunks
from decoder.sequence import LeaseId, ScopePrefix
from decoder.service_rate import LEAST_SECONDS, MOST_SECONDS, UNKNOWN_SECONDS, ServiceRate
from decoder.validation import ServedModel, request_of
from tessera.decode.v1 import decode_pb2
from tests.decoder.test_scheduler import Rig, make, refuse


def starts(rig: Rig, steps: int = 400) -> list[int]:
    """The order in which sequences get their place."""
    seen: list[int] = []
    for _ in range(steps):
        rig.step()
        seen += [int(item.sequence_id) for item in rig.scheduler.running if int(item.sequence_id) not in seen]
        seen += [number for number in rig.ended if number not in seen]
    return seen


@pytest.mark.parametrize(("tenant", "most"), [("other", 12), ("flood", 40)])
def test_a_flood_of_one_tenant_does_not_hold_up_another(tenant: str, most: int) -> None:
    """Forty requests wait, and one of another tenant comes: it starts within a quantum's worth of theirs. As a request
    of the same tenant, the positive control, it is the last."""
    rig = Rig(num_blocks=64, max_batch=2)
    for number in range(1, 41):
        rig.scheduler.enqueue(make(number, 12, max_tokens=3, tenant="flood"))
    for _ in range(4):
        rig.step()
    rig.scheduler.enqueue(make(99, 12, max_tokens=3, tenant=tenant))
    order = starts(rig)
    assert len(order) == 41
    place = order.index(99)
    assert place <= most
    assert tenant == "other" or place == 40


def test_priorities_are_a_tenants_own() -> None:
    """The highest priority of one tenant comes before its own others, and not before another tenant's turn."""
    queue = AdmissionQueue()
    for number in range(1, 9):
        queue.add(make(number, 64, priority=100 if number > 4 else 0, tenant="loud"))
    for number in range(11, 15):
        queue.add(make(number, 64, tenant="quiet"))
    order = drain(queue)
    assert [number for number in order if number < 10] == [5, 6, 7, 8, 1, 2, 3, 4]
    assert sum(number > 10 for number in order[:4]) == 2, "turn by turn"


def drain(queue: AdmissionQueue, cached: dict[int, int] | None = None) -> list[int]:
    """Admit one after the other, each with so many tokens from its tenant's own cache."""
    order = []
    while (sequence := queue.next()) is not None:
        queue.answered(sequence.sequence_id)
        queue.admitted(sequence, (cached or {}).get(int(sequence.sequence_id), 0))
        order.append(int(sequence.sequence_id))
    return order


def test_weights_divide_the_admissions() -> None:
    """A tenant of weight 3 has three requests admitted for each of one with weight 1."""
    queue = AdmissionQueue()
    for number in range(1, 41):
        queue.add(make(number, 64, tenant="heavy", tenant_weight=3.0))
        queue.add(make(100 + number, 64, tenant="light", tenant_weight=1.0))
    first = drain(queue)[:40]
    assert sum(number <= 40 for number in first) == 30


def test_own_cached_tokens_are_given_back_and_others_never_count() -> None:
    """What comes from the tenant's own cache costs nothing, so its turn comes sooner."""
    turns = []
    for cached in ({}, dict.fromkeys(range(1, 41), 63)):
        queue = AdmissionQueue()
        for number in range(1, 41):
            queue.add(make(number, 64, tenant="a"))
            queue.add(make(100 + number, 64, tenant="b"))
        turns.append(sum(number <= 40 for number in drain(queue, cached)[:40]))
    assert turns == [20, 38]


@pytest.mark.parametrize("scope", [ScopePrefix("", 12), ScopePrefix("team", 12), None])
def test_tokens_of_a_wider_scope_are_charged_as_if_computed(scope: ScopePrefix | None) -> None:
    """What another tenant may have put into a shared scope changes no turn; what came from the tenant's own cache, the
    positive control, does."""
    orders = []
    for cached in (0, 12):
        rig = Rig(num_blocks=64)
        sequence = make(1, 16, tenant="z", scope=scope)
        rig.scheduler.enqueue(sequence)
        assert rig.scheduler.next_admission() is sequence
        rig.scheduler.queue.answered(sequence.sequence_id)
        rig.scheduler.admit(sequence, LeaseId(1), rig.pool.take(4), cached, None)
        rig.scheduler.queue.add(make(2, QUANTUM_TOKENS - 16 + 12, tenant="z"))
        rig.scheduler.queue.add(make(3, QUANTUM_TOKENS, tenant="b"))
        orders.append(drain(rig.scheduler.queue))
    assert orders[0] == [3, 2]
    assert orders[1] == ([2, 3] if scope is None else [3, 2])


def test_a_turn_is_kept_until_it_is_used() -> None:
    """One that finds the pool full, or waits for a prefix, is asked for again first and pays once; so does one that was
    preempted. One that ends before it was admitted has its tokens given back."""
    queue = AdmissionQueue()
    first, second = make(1, 64, tenant="a"), make(2, 64, tenant="b")
    queue.add(first)
    queue.add(second)
    assert queue.next() is first
    refuse(queue, first)
    assert queue.next() is None, "nobody overtakes it"
    queue.retry()
    assert queue.next() is first
    queue.answered(first.sequence_id)
    queue.admitted(first, 0)
    first.admitted = True
    queue.add(first)  # preempted
    assert queue.next() is first
    assert queue.next() is second
    queue.recall()
    third = make(3, 64, tenant="b")
    queue.add(third)
    queue.discard(second)
    order = [queue.next(), queue.next()]
    assert order == [first, third]


def test_who_may_pass_a_blocked_head_is_one_of_each_tenant_first() -> None:
    """Where an idle decoder tries others, a flood does not take all the tries."""
    queue = AdmissionQueue()
    head, other = make(1, 64, tenant="flood"), make(99, 64, tenant="other")
    for number in range(2, 30):
        queue.add(make(number, 64, tenant="flood"))
    queue.add(head)
    queue.add(other)
    for _ in range(PATIENCE):
        queue.retry()
        assert queue.next(is_idle=True) is head
        refuse(queue, head)
    tried = []
    for _ in range(2):
        sequence = queue.next(is_idle=True)
        assert sequence is not None
        refuse(queue, sequence)
        tried.append(int(sequence.sequence_id))
    assert tried == [2, 99]


def test_a_steps_budget_is_shared_by_tenants() -> None:
    """Eight long prompts of one tenant leave half of a step to one of another; alone they get all of it."""
    flood = [make(number, 400, tenant="flood") for number in range(1, 9)]
    other = make(99, 400, tenant="other")
    for sequence in (*flood, other):
        sequence.num_computed = 0
    parts = {int(sequence.sequence_id): count for sequence, count in share_chunks([*flood, other], 64)}
    assert parts[99] == 32
    assert sum(parts.values()) == 64
    alone = {int(sequence.sequence_id): count for sequence, count in share_chunks(flood, 64)}
    assert sum(alone.values()) == 64
    assert alone[1] >= 32


@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from((1e-6, 0.3, 1.0, 7.0, 1e6))), min_size=1, max_size=6),
    st.integers(1, 256),
)
@settings(max_examples=150, deadline=None)
def test_parts_are_max_min_fair(tenants: list[tuple[int, float]], budget: int) -> None:
    """Nothing is left over while somebody wants it, nobody gets more than it wants, and who gets less than it wants
    has no less by weight than anybody else, up to one token."""
    wanted = {f"t{index}": tokens for index, (tokens, _) in enumerate(tenants)}
    weights = {f"t{index}": weight for index, (_, weight) in enumerate(tenants)}
    parts = divide(wanted, weights, budget)
    assert sum(parts.values()) == min(budget, sum(wanted.values()))
    for name, part in parts.items():
        assert 0 <= part <= wanted[name]
        if part < wanted[name]:
            level = (part + 1) / weights[name]
            assert all((other_part - 1) / weights[other] <= level * 1.000001 for other, other_part in parts.items())


def test_the_hint_is_the_time_for_half_of_what_waits() -> None:
    """At ten admissions a second a queue of 40 is half empty in two seconds. The hint grows while nothing is admitted,
    and has bounds. It depends on the times that it is given and on nothing else."""
    rate = ServiceRate()
    assert rate.retry_seconds(40, 0) == UNKNOWN_SECONDS
    for number in range(100):
        rate.admitted(number * 100_000_000)
    now = 100 * 100_000_000
    assert rate.retry_seconds(40, now) == pytest.approx(2.0)
    assert rate.retry_seconds(40, now) == rate.retry_seconds(40, now)
    assert rate.retry_seconds(40, now + 32 * 100_000_000) == pytest.approx(4.0)
    assert rate.retry_seconds(1, now) == LEAST_SECONDS
    assert rate.retry_seconds(10**6, now) == MOST_SECONDS


@pytest.mark.parametrize(("given", "taken"), [(0.0, 1.0), (2.5, 2.5), (1e-300, 1e-6), (1e300, 1e6)])
def test_the_weight_of_a_submission(given: float, taken: float) -> None:
    """Unset is 1, and what would overflow is cut; a weight that is no number is refused by name."""
    submit = decode_pb2.Submit(request_id="r", grant=b"g", tokens=pack_tokens([1]), tenant="a", tenant_weight=given)
    submit.sampling.temperature = 0.0
    found = request_of(submit, ServedModel(8, 16, frozenset()))
    assert (found.tenant, found.tenant_weight) == ("a", taken)
    submit.tenant_weight = float("nan")
    with pytest.raises(InvalidArgument, match="tenant_weight"):
        request_of(submit, ServedModel(8, 16, frozenset()))


def test_a_step_with_decodes_has_its_own_budget() -> None:
    """A long prompt that comes while a stream decodes is computed in steps of at most `mixed_chunk_tokens`, the decode
    included; with nobody decoding, in whole chunks. The stream gains a token in every step."""
    rig = Rig(num_blocks=200, max_batch=4, chunk_tokens=64, mixed_chunk_tokens=16)
    rig.scheduler.enqueue(make(1, 8, max_tokens=30))
    rig.step()
    stream = rig.scheduler.running[0]
    rig.scheduler.enqueue(make(2, 150, max_tokens=1))
    mixed = 0
    while 1 not in rig.ended:
        before = stream.num_tokens
        plan = rig.step()
        assert len(plan.decodes) + sum(count for _, count in plan.chunks) <= 16
        assert stream.num_tokens == before + 1 or 1 in rig.ended
        mixed += bool(plan.decodes and plan.chunks)
    assert mixed >= 9
    rig.scheduler.enqueue(make(3, 150, max_tokens=1))
    assert [count for _, count in rig.step().chunks] == [64]


@pytest.mark.parametrize("tenant", ["other", "flood"])
def test_who_gives_way_is_of_the_tenant_that_holds_most(tenant: str) -> None:
    """A pool too small for what runs: of another tenant, the one that came last stays; of the same tenant, the positive
    control, it is the first to go."""
    rig = Rig(num_blocks=20, max_batch=4)
    for number in range(1, 4):
        rig.scheduler.enqueue(make(number, 12, max_tokens=30, tenant="flood"))
    rig.scheduler.enqueue(make(9, 12, max_tokens=30, tenant=tenant))
    for _ in range(200):
        rig.step()
    assert sorted(rig.ended) == [1, 2, 3, 9]
    assert rig.preempted[0] == (9 if tenant == "flood" else 3)
