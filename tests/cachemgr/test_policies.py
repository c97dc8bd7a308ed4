"""Orders of eviction: each names what its paper says, and stays a set of nodes whatever is done to it."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cachemgr import least_recent
from cachemgr.ids import NodeId
from cachemgr.nodes import NO_BLOCKS, Node, Tree
from cachemgr.policies import POLICIES, LeastRecentlyUsed, Order, Sieve, Worth


def nodes(count: int) -> list[Node]:
    tree = Tree(1, b"r" * 32)
    return [Node(NodeId(number + 1), tree, tree.root, b"", NO_BLOCKS, number) for number in range(count)]


def numbers(order: Order) -> list[int]:
    """The node ids in the order in which they go."""
    popped = []
    while (node := order.pop()) is not None:
        assert node.order is None
        popped.append(int(node.node_id))
    return popped


def test_least_recently_used() -> None:
    """What was used last goes last; what is put first goes next."""
    order = LeastRecentlyUsed()
    one, two, three, four = nodes(4)
    for node in (one, two, three, one):
        order.use(node)
    order.put_first(four)
    assert order.first() is four
    order.discard(two)
    assert numbers(order) == [4, 3, 1]


def test_those_ahead_are_the_next_ones_and_no_more() -> None:
    """Entries of uses that later ones have struck out are passed over."""
    order = LeastRecentlyUsed()
    one, two, three, four = nodes(4)
    for node in (one, two, three, two, four):
        order.use(node)
    assert [order.ahead(count) for count in range(4)] == [[], [one], [one, three], [one, three, two]]
    order.drop([one, three])
    assert numbers(order) == [2, 4]


def test_sieve_spares_what_was_used_once_and_keeps_its_place() -> None:
    """The hand passes a used node, goes on from there, and takes it in the next round; new ones come after it."""
    order = Sieve()
    made = nodes(6)
    for node in made[:4]:
        order.use(node)
    order.use(made[0])
    order.use(made[2])
    assert order.pop() is made[1], "the first was used"
    order.use(made[4])
    assert order.pop() is made[3], "the third was used"
    order.put_first(made[5])
    assert order.pop() is made[5]
    order.discard(made[2])
    assert numbers(order) == [5, 1]


def test_worth_counts_uses_and_ages() -> None:
    """More uses, later; and what was once used much does not outlive all that came after it."""
    order = Worth(lambda node: 1.0)
    old, *new = nodes(8)
    for _ in range(4):
        order.use(old)
    order.use(new[0])
    order.use(new[0])
    assert order.pop() is new[0], "the other one has more uses"
    for node in new[1:]:
        order.use(node)
        order.use(node)
        order.pop()
    assert old.order is None, "it has aged"


def test_worth_of_what_costs_more_is_more() -> None:
    """Of equal uses, the cheaper one goes first: that is the depth of the policy `cost`."""
    order = POLICIES["cost"].make_order()
    shallow, deep = nodes(2)
    deep.start = 10_000
    order.use(deep)
    order.use(shallow)
    assert numbers(order) == [1, 2]
    order = POLICIES["lfu"].make_order()
    order.use(deep)
    order.use(shallow)
    assert numbers(order) == [1, 2], "equal worths go by number"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_dead_entries_do_not_pile_up(name: str) -> None:
    """Uses cost no memory for good."""
    order = POLICIES[name].make_order()
    made = nodes(10)
    most = 0
    for number in range(20_000):
        order.use(made[number % 10])
        most = max(most, len(getattr(order, "_heap", ())), len(getattr(order, "_log", ())))
    assert most <= 1100
    assert len(order.nodes()) == 10


def test_what_is_put_first_costs_no_pass_over_all_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room before the first entry is made for many at once, and what is put there goes before all others."""
    passes: list[int] = []
    real = LeastRecentlyUsed._write_anew
    monkeypatch.setattr(LeastRecentlyUsed, "_write_anew", lambda self, room: (passes.append(room), real(self, room)))
    order = LeastRecentlyUsed()
    made = nodes(300)
    for node in made[:100]:
        order.use(node)
    for node in made[100:]:
        order.put_first(node)
    assert len(passes) == 2
    assert len(order._log) <= 800
    assert order.ahead(3) == [made[299], made[298], made[297]]
    assert numbers(order) == [*range(300, 100, -1), *range(1, 101)]


class OrderMachine(RuleBasedStateMachine):
    """Whatever is used, put, discarded and popped: an order holds exactly what a set would hold."""

    make: Callable[[], Order]

    def __init__(self) -> None:
        super().__init__()
        self.order = type(self).make()
        self.all = nodes(6)
        self.inside: set[int] = set()

    @rule(which=st.integers(0, 5))
    def use(self, which: int) -> None:
        with patch.object(least_recent, "SLACK", 3):
            self.order.use(self.all[which])
        self.inside.add(which)

    @rule(which=st.integers(0, 5))
    def put_first(self, which: int) -> None:
        if which not in self.inside:
            self.order.put_first(self.all[which])
            self.inside.add(which)

    @rule(which=st.integers(0, 5))
    def discard(self, which: int) -> None:
        if which in self.inside:
            self.order.discard(self.all[which])
            self.inside.discard(which)

    @rule(count=st.integers(0, 7), dropped=st.integers(0, 7))
    def drop_some_of_those_ahead(self, count: int, dropped: int) -> None:
        ahead = self.order.ahead(count)
        assert len(ahead) == len(set(ahead)) <= count
        assert not ahead or ahead[0] is self.order.first()
        self.order.drop(ahead[:dropped])
        for node in ahead[:dropped]:
            node.order = None  # it is another node from now on
            self.inside.remove(self.all.index(node))
        for node in ahead[dropped:]:
            assert self.order.pop() is node
            self.inside.remove(self.all.index(node))

    @rule()
    def pop(self) -> None:
        expected = self.order.first()
        node = self.order.pop()
        assert node is expected
        assert (node is None) == (not self.inside)
        if node is not None:
            self.inside.remove(self.all.index(node))

    @invariant()
    def is_a_set(self) -> None:
        found = self.order.nodes()
        assert sorted(self.all.index(node) for node in found) == sorted(self.inside)
        for number, node in enumerate(self.all):
            assert (node.order is self.order) == (number in self.inside)


class LruMachine(OrderMachine):
    make = LeastRecentlyUsed


class SieveMachine(OrderMachine):
    make = Sieve


class WorthMachine(OrderMachine):
    @staticmethod
    def make() -> Order:
        return POLICIES["cost"].make_order()


for machine in (LruMachine, SieveMachine, WorthMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLru, TestSieve, TestWorth = LruMachine.TestCase, SieveMachine.TestCase, WorthMachine.TestCase
