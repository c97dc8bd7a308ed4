"""Turns of the tenants: deficit round robin against the bound that it promises and against a round-by-round oracle."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from decoder.fair_queue import DEBT_ROUNDS, FairShares, Head

QUANTUM = 32
COSTS = st.lists(st.integers(1, 200), min_size=1, max_size=12)
WEIGHTS = st.sampled_from((0.25, 0.5, 1.0, 2.0, 4.0))
BACKLOG = st.lists(st.tuples(WEIGHTS, COSTS), min_size=2, max_size=5)


class ByRounds:
    """The paper's algorithm as it is told, one round after the other: every tenant that waits gets its quantum, and
    then tenants are served in turn, a request each, while they can pay."""

    def __init__(self, tenants: dict[str, tuple[float, deque[int]]]) -> None:
        self.tenants = tenants
        self.deficit = dict.fromkeys(tenants, 0.0)
        self.order = deque(sorted(tenants))

    def serve_all(self) -> list[str]:
        served = []
        while any(queue for _, queue in self.tenants.values()):
            for name, (weight, queue) in self.tenants.items():
                self.deficit[name] = self.deficit[name] + QUANTUM * weight if queue else 0.0
            while (name := self._next()) is not None:
                self.order.remove(name)
                self.order.append(name)
                self.deficit[name] -= self.tenants[name][1].popleft()
                served.append(name)
        return served

    def _next(self) -> str | None:
        able = (name for name in self.order if (queue := self.tenants[name][1]) and queue[0] <= self.deficit[name])
        return next(able, None)


def heads_of(tenants: dict[str, tuple[float, deque[int]]]) -> dict[str, Head]:
    return {name: Head(queue[0], weight) for name, (weight, queue) in tenants.items() if queue}


def named(backlog: list[tuple[float, list[int]]]) -> dict[str, tuple[float, deque[int]]]:
    return {f"t{index}": (weight, deque(costs)) for index, (weight, costs) in enumerate(backlog)}


@given(BACKLOG)
@settings(max_examples=150, deadline=None)
def test_the_order_is_that_of_the_rounds(backlog: list[tuple[float, list[int]]]) -> None:
    """Whole rounds that serve nobody are skipped at once, and change no turn."""
    shares, tenants, served = FairShares(QUANTUM), named(backlog), []
    while (name := shares.choose(heads_of(tenants))) is not None:
        served.append(name)
        shares.serve(name, tenants[name][1].popleft())
    assert served == ByRounds(named(backlog)).serve_all()


@given(BACKLOG, st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_two_that_wait_throughout_gain_by_weight_up_to_a_quantum_and_a_request(
    backlog: list[tuple[float, list[int]]], already: int
) -> None:
    """The bound of the paper's section 3, at every moment, whatever one of them has been given before, alone."""
    shares, tenants = FairShares(QUANTUM), named(backlog)
    shares.charge("t0", already, tenants["t0"][0])
    debt = min(already / tenants["t0"][0], DEBT_ROUNDS * QUANTUM)
    gained = dict.fromkeys(tenants, 0)
    while len(heads := heads_of(tenants)) == len(tenants):
        name = shares.choose(heads)
        assert name is not None
        cost = tenants[name][1].popleft()
        shares.serve(name, cost)
        gained[name] += cost
        for one, (weight, _) in tenants.items():
            for other, (other_weight, _) in tenants.items():
                gap = gained[one] / weight - gained[other] / other_weight
                ahead = debt if other == "t0" else 0.0  # what it was given before comes off, and no more
                assert gap <= ahead + 2 * QUANTUM + 200 / weight + 200 / other_weight, (one, other)


def test_a_flood_makes_one_newcomer_wait_for_a_quantum_and_no_more() -> None:
    """However many requests wait before it, a newcomer goes after what one quantum buys the flood; first come first
    served, the positive control, makes it wait for all of them."""
    shares, flood = FairShares(QUANTUM), deque([10] * 40)
    for _ in range(7):
        assert shares.choose({"flood": Head(flood[0], 1.0)}) == "flood"
        shares.serve("flood", flood.popleft())
    before = 0
    while shares.choose({"flood": Head(flood[0], 1.0), "new": Head(10, 1.0)}) == "flood":
        shares.serve("flood", flood.popleft())
        before += 1
    assert before <= QUANTUM // 10 + 1 < len(flood)


def test_coming_back_again_and_again_gains_nothing() -> None:
    """Who leaves the queue after each request and comes back a moment later has no more tokens than who waits
    throughout, with requests however small."""
    shares, gained = FairShares(QUANTUM), {"stays": 0, "leaves": 0}
    present = True
    for _ in range(3000):
        heads = {"stays": Head(1, 1.0)} | ({"leaves": Head(QUANTUM, 1.0)} if present else {})
        name = shares.choose(heads)
        assert name is not None
        shares.serve(name, heads[name].cost)
        gained[name] += heads[name].cost
        present = name != "leaves"
    assert gained["leaves"] > 0
    assert gained["leaves"] <= gained["stays"] + 2 * QUANTUM, gained


def test_what_comes_after_the_service_is_charged_and_debts_are_bounded() -> None:
    """Tokens of answers make a debt that others' rounds pay for; it is never above DEBT_ROUNDS rounds."""
    shares = FairShares(QUANTUM)
    for _ in range(100_000):
        shares.charge("talks", 1, 1.0)
    heads = {"talks": Head(QUANTUM, 1.0), "asks": Head(QUANTUM, 1.0)}
    served = []
    for _ in range(DEBT_ROUNDS + 6):
        name = shares.choose(heads)
        assert name is not None
        served.append(name)
        shares.serve(name, QUANTUM)
    assert served[:DEBT_ROUNDS] == ["asks"] * DEBT_ROUNDS
    assert "talks" in served[DEBT_ROUNDS : DEBT_ROUNDS + 3]
    alone = FairShares(QUANTUM)
    alone.charge("talks", 10**9)
    assert alone.choose({"talks": Head(5, 1.0)}) == "talks", "nobody else waits: a debt keeps nothing from running"


def test_tenants_that_left_leave_no_account() -> None:
    """What a thousand tenants leave behind is forgotten by the next choices, debts once they are paid."""
    shares = FairShares(QUANTUM)
    for number in range(1000):
        name = f"t{number}"
        assert shares.choose({name: Head(5, 1.0)}) == name
        shares.serve(name, 5)
        shares.charge(name, 20)
    for _ in range(3):
        shares.choose({"last": Head(QUANTUM, 1.0)})
        shares.serve("last", QUANTUM)
    assert len(shares) == 1
