"""The sorted children against a sorted list."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cachemgr import children as module
from cachemgr.children import Children
from cachemgr.ids import NodeId
from cachemgr.nodes import NO_BLOCKS, Node, Tree

KEYS = st.binary(min_size=1, max_size=2)


def make_node(number: int) -> Node:
    tree = Tree(1, b"r" * 32)
    return Node(NodeId(number), tree, tree.root, b"", NO_BLOCKS, 0)


class ChildrenMachine(RuleBasedStateMachine):
    """Chunks of two to four keys behave as one sorted list."""

    def __init__(self) -> None:
        super().__init__()
        self.children = Children()
        self.model: dict[bytes, Node] = {}
        self.count = 0

    @rule(keys=st.lists(KEYS, max_size=6))
    def add(self, keys: list[bytes]) -> None:
        for key in keys:
            self.count += 1
            node = make_node(self.count)
            with patch.object(module, "CHUNK", 2):
                if key in self.model:
                    with pytest.raises(ValueError, match="already"):
                        self.children.add(key, node)
                    continue
                self.children.add(key, node)
            self.model[key] = node

    @rule(data=st.data(), count=st.integers(1, 4))
    def remove(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.model))):
            key = data.draw(st.sampled_from(sorted(self.model)))
            with patch.object(module, "SWEEP", 5), patch.object(module, "SLACK", 2):
                self.children.remove(key)
            del self.model[key]

    @rule(key=KEYS)
    def replace_or_miss(self, key: bytes) -> None:
        node = make_node(0)
        if key in self.model:
            self.children.replace(key, node)
            self.model[key] = node
        else:
            for call in (lambda: self.children.replace(key, node), lambda: self.children.remove(key)):
                with pytest.raises(KeyError):
                    call()

    @rule(key=KEYS)
    def look(self, key: bytes) -> None:
        ordered = sorted(self.model)
        after = next((self.model[other] for other in ordered if other >= key), None)
        before = next((self.model[other] for other in reversed(ordered) if other < key), None)
        assert self.children.around(key) == (after, before)
        assert self.children.get(key) is self.model.get(key)

    @invariant()
    def is_the_sorted_model(self) -> None:
        assert self.children.keys() == sorted(self.model)
        assert list(self.children) == [self.model[key] for key in sorted(self.model)]
        assert len(self.children) == len(self.model)
        assert bool(self.children) == bool(self.model)


ChildrenMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestChildrenMachine = ChildrenMachine.TestCase


def test_keys_of_removed_children_do_not_pile_up() -> None:
    """Whatever comes and goes, the keys that are kept are a bounded part more than the children."""
    children = Children()
    for number in range(50_000):
        children.add(number.to_bytes(4, "big"), make_node(number))
        if number >= 2000:
            children.remove((number - 2000).to_bytes(4, "big"))
    assert len(children) == 2000
    assert sum(map(len, children._keys)) <= 4 * len(children)
    assert children.around(bytes(4)) == (children.get((48_000).to_bytes(4, "big")), None)
