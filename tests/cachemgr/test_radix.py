"""The prefix index against a dictionary of token prefixes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cachemgr import reclaim
from cachemgr.forest import Forest
from cachemgr.nodes import Tree, common_tokens
from cachemgr.radix import PrefixIndex
from tests.cachemgr.core_rig import pack

BLOCK_TOKENS = 4
NUM_BLOCKS = 40
TOKENS = st.lists(st.integers(0, 1), max_size=22)
ROOTS = st.sampled_from([(1, b"x" * 32), (1, b"y" * 32), (2, b"x" * 32)])


class IndexMachine(RuleBasedStateMachine):
    """Any history of inserts, holds and evictions matches exactly what a dictionary of prefixes would.

    Model: for each (owner, root) the prefixes at which a block ends, whole or partly filled, and their block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.references = np.zeros(NUM_BLOCKS + 1, np.int32)
        self.index = PrefixIndex(NUM_BLOCKS, BLOCK_TOKENS, self.references)
        self.model: dict[tuple[int, bytes], dict[tuple[int, ...], int]] = {}
        self.used: dict[tuple[tuple[int, bytes], tuple[int, ...]], int] = {}
        self.spare = list(range(1, NUM_BLOCKS + 1))
        self.held: list[list[int]] = []

    def _tree(self, root: tuple[int, bytes]) -> Tree:
        return self.index.forest.tree(*root)

    def _path(self, root: tuple[int, bytes], tokens: list[int]) -> list[int]:
        """Blocks of the whole cached prefix."""
        known, path = self.model.get(root, {}), []
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            block = known.get(tuple(tokens[:end]))
            if block is None:
                break
            path.append(block)
        return path

    def _forget(self, blocks: list[int]) -> None:
        for known in self.model.values():
            for prefix in [prefix for prefix, block in known.items() if block in blocks]:
                del known[prefix]
        self.references[blocks] = 0
        self.spare += blocks

    @rule(root=ROOTS, tokens=TOKENS, split=st.integers(0, 5), grow=st.booleans(), priority=st.integers(0, 1))
    def insert(self, root: tuple[int, bytes], tokens: list[int], split: int, grow: bool, priority: int) -> None:
        """Inserts whole blocks in two pieces, the second at the cursor that the first left."""
        tree = self._tree(root)
        count = min(len(tokens) // BLOCK_TOKENS, len(self.spare))
        table = np.array(self.spare[:count], np.intp)
        del self.spare[:count]
        known = self.model.setdefault(root, {})
        for first, end in ((0, min(split, count)), (min(split, count), count)):
            part = pack(tokens[first * BLOCK_TOKENS : end * BLOCK_TOKENS])
            path = self._path(root, tokens[: end * BLOCK_TOKENS])
            cursor = self.index.cursor(tree, table, first)
            existing, superseded = self.index.insert(
                cursor, first, part, table[first:end].copy(), priority=priority, grow=grow and first > 0
            )
            assert existing.tolist() == path[first:]
            own = table[first : first + len(existing)].tolist()
            self.spare += own
            table[first : first + len(existing)] = existing
            for place in range(first + len(existing), end):
                known[tuple(tokens[: (place + 1) * BLOCK_TOKENS])] = int(table[place])
                self.references[table[place]] = 1
            dropped = superseded.tolist()
            gone = {prefix for prefix, block in known.items() if block in dropped}
            assert all(len(prefix) % BLOCK_TOKENS and prefix == tuple(tokens[: len(prefix)]) for prefix in gone)
            self._forget(dropped)
        self.index.touch(self.index.cursor(tree, table, count), 0)
        if count:
            self.index.requeue(int(table[count - 1]))

    @rule(root=ROOTS, tokens=TOKENS)
    def insert_tail(self, root: tuple[int, bytes], tokens: list[int]) -> None:
        path = self._path(root, tokens)
        depth, rest = divmod(len(tokens), BLOCK_TOKENS)
        if not rest or len(path) < depth or not self.spare:
            return
        tree, known = self._tree(root), self.model.setdefault(root, {})
        covered = any(prefix[: len(tokens)] == tuple(tokens) for prefix in known)
        table = np.array([*path, self.spare[0]], np.intp)
        node, superseded = self.index.insert_tail(
            self.index.cursor(tree, table, depth), depth, pack(tokens[depth * BLOCK_TOKENS :]), table[-1:], priority=0
        )
        assert (node is None) == covered
        if node is not None:
            block = self.spare.pop(0)
            known[tuple(tokens)] = block
            self.references[block] = 1
            self.index.requeue(block)
        shorter = {
            known[tuple(tokens[:end])]
            for end in range(depth * BLOCK_TOKENS + 1, len(tokens))
            if self.references[known.get(tuple(tokens[:end]), 0)] == 1
        }
        assert set(superseded.tolist()) == (set() if covered else shorter)
        self._forget(superseded.tolist())

    @rule(root=ROOTS, tokens=TOKENS, touch=st.booleans())
    def match(self, root: tuple[int, bytes], tokens: list[int], touch: bool) -> None:
        tree, known = self._tree(root), self.model.get(root, {})
        match = self.index.match(tree, pack(tokens), len(tokens))
        path = self._path(root, tokens)
        assert match.blocks.tolist() == path
        whole = len(path) * BLOCK_TOKENS
        reach = max(
            (common_tokens(pack(prefix), pack(tokens)) for prefix in known if len(prefix) > whole), default=whole
        )
        assert whole + match.num_tail_tokens == max(reach, whole)
        if match.source:
            prefix = next(prefix for prefix, block in known.items() if block == match.source)
            assert prefix[: whole + match.num_tail_tokens] == tuple(tokens[: whole + match.num_tail_tokens])
        if touch and match.node is not None:
            self.index.touch(match.node, 1)

    @rule(root=ROOTS, tokens=TOKENS)
    def hold(self, root: tuple[int, bytes], tokens: list[int]) -> None:
        path = self._path(root, tokens)
        if path:
            self.references[path] += 1
            self.held.append(path)

    @rule(which=st.integers(0, 5))
    def let_go(self, which: int) -> None:
        if which < len(self.held):
            path = self.held.pop(which)
            self.references[path] -= 1
            self.index.requeue(path[-1])

    @rule(count=st.integers(1, 6), owner=st.sampled_from([None, 1, 2]))
    def evict(self, count: int, owner: int | None) -> None:
        """Exactly as many go as can; no held one; and never a prefix of one that stays."""
        idle = {
            block
            for root, known in self.model.items()
            for block in known.values()
            if self.references[block] == 1 and owner in (None, root[0])
        }
        evicted = self.index.evict(dict.fromkeys((1, 2) if owner is None else (owner,), count), count).tolist()
        assert len(set(evicted)) == len(evicted) == min(count, len(idle))
        assert set(evicted) <= idle
        self._forget(evicted)
        for known in self.model.values():
            for prefix in known:
                depth = (len(prefix) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                assert not depth or prefix[:depth] in known

    @rule(owner=st.integers(1, 2))
    def remove_owner(self, owner: int) -> None:
        gone = {block for root, known in self.model.items() if root[0] == owner for block in known.values()}
        blocks, _ = self.index.remove_owner(owner)
        assert set(blocks.tolist()) == gone
        self.held = [path for path in self.held if path[0] not in gone]
        self._forget(sorted(gone))

    @invariant()
    def lists_exactly_the_model(self) -> None:
        listed = {block for known in self.model.values() for block in known.values()}
        assert set(np.flatnonzero(self.index.forest.node_of).tolist()) == listed
        blocks = [block for node in self.index.forest.nodes.values() for block in node.blocks.tolist()]
        assert sorted(blocks) == sorted(listed)
        for node in self.index.forest.nodes.values():
            assert node.children.keys() == sorted(child.edge[: BLOCK_TOKENS * 4] for child in node.children)


IndexMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase


@given(st.lists(st.integers(-1, 1), max_size=300), st.lists(st.integers(-1, 1), max_size=300), st.integers(0, 300))
def test_common_tokens_is_the_first_difference(left: list[int], right: list[int], shared: int) -> None:
    """Short and long strings, and any mix, share as many tokens as a loop over them finds."""
    right = left[:shared] + right
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_tokens(pack(left), pack(right)) == expected


def test_root_cannot_be_split_and_inner_nodes_not_removed() -> None:
    """Misuse of the forest is an error, not a broken tree."""
    index = PrefixIndex(8, BLOCK_TOKENS, np.ones(9, np.int32))
    tree = index.forest.tree(1, b"r" * 32)
    with pytest.raises(ValueError, match="root"):
        index.forest.split(tree.root, 1)
    with pytest.raises(ValueError, match="leaf"):
        index.forest.remove(tree.root)


def test_touch_raises_priority_and_never_lowers_it() -> None:
    """A prefix keeps the highest priority it was used with."""
    index = PrefixIndex(8, BLOCK_TOKENS, np.ones(9, np.int32))
    tree = index.forest.tree(1, b"r" * 32)
    index.insert(tree.root, 0, pack(range(8)), np.array([1, 2]), priority=5, grow=False)
    node = index.forest.nodes[index.cursor(tree, np.array([1, 2]), 2).node_id]
    index.touch(node, 3)
    assert node.priority == 5
    index.touch(node, 9)
    assert node.priority == 9


def test_only_its_own_leaf_is_lengthened() -> None:
    """New blocks lengthen a leaf that the same sequence made; below another one they become a child."""
    index = PrefixIndex(8, BLOCK_TOKENS, np.ones(9, np.int32))
    tree = index.forest.tree(1, b"r" * 32)
    index.insert(tree.root, 0, pack(range(4)), np.array([1]), priority=0, grow=False)
    index.insert(index.cursor(tree, np.array([1]), 1), 1, pack(range(4, 8)), np.array([2]), priority=0, grow=True)
    assert [node.blocks.tolist() for node in index.forest.nodes.values()] == [[1, 2]]
    table = np.array([3, 4, 5])
    existing, _ = index.insert(tree.root, 0, pack(range(12)), table, priority=0, grow=True)
    assert existing.tolist() == [1, 2]
    assert [node.blocks.tolist() for node in index.forest.nodes.values()] == [[1, 2], [5]]


def _grown(seed: int) -> PrefixIndex:
    """An index of many leaves below few parents, of two owners and priorities, some of them held."""
    rng = random.Random(seed)
    references = np.ones(401, np.int32)
    index = PrefixIndex(400, BLOCK_TOKENS, references)
    spare = list(range(1, 401))
    while len(spare) > 8:
        tree = index.forest.tree(rng.choice((1, 1, 1, 2)), b"r" * 32)
        shared = [rng.randrange(2)] * BLOCK_TOKENS if rng.random() < 0.3 else []
        tokens = shared + [rng.randrange(9) for _ in range(BLOCK_TOKENS * rng.randrange(1, 3))]
        blocks = np.array([spare.pop() for _ in range(len(tokens) // BLOCK_TOKENS)])
        existing, _ = index.insert(tree.root, 0, pack(tokens), blocks, priority=rng.choice((0, 0, 7)), grow=False)
        table = np.concatenate((existing, blocks[len(existing) :]))
        spare += blocks[: len(existing)].tolist()
        index.touch(index.cursor(tree, table, len(table)), 0)
        if rng.random() < 0.02:
            references[table] += 1
    return index


def test_leaves_before_one_that_is_held_go_many_at_a_time() -> None:
    """The pass ends at a leaf that somebody holds, which stays; those after it go as well."""
    references = np.ones(41, np.int32)
    index = PrefixIndex(40, BLOCK_TOKENS, references)
    tree = index.forest.tree(1, b"r" * 32)
    for number in range(20):
        table = np.array([2 * number + 1, 2 * number + 2])
        index.insert(tree.root, 0, pack([number] * 2 * BLOCK_TOKENS), table, priority=0, grow=False)
        index.touch(index.cursor(tree, table, 2), 0)
    references[[19, 20]] += 1
    assert index.evict({1: 40}, 30).tolist() == [*range(1, 19), *range(21, 33)]
    assert index.evict({1: 40}, 30).tolist() == [*range(33, 41)]
    references[20] -= 1
    index.requeue(20)
    assert index.evict({1: 40}, 30).tolist() == [20], "of a leaf whose end alone is idle, the end goes"


@pytest.mark.parametrize("seed", range(12))
def test_leaves_go_many_at_a_time_in_the_order_of_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking many leaves in one pass takes the very blocks, in the very order, and leaves the very tree."""
    bulk, single = _grown(seed), _grown(seed)
    many: list[int] = []
    real = Forest.remove_leaves
    monkeypatch.setattr(Forest, "remove_leaves", lambda self, *args: (many.append(len(args[0])), real(self, *args)))
    rng = random.Random(seed)
    for _ in range(12):
        budgets, count = {1: rng.randrange(60), 2: rng.randrange(60)}, rng.randrange(1, 80)
        taken = bulk.evict(budgets, count).tolist()
        with monkeypatch.context() as patch:
            patch.setattr(reclaim, "_FEWEST_LEAVES", 10**9)
            assert single.evict(budgets, count).tolist() == taken
        assert bulk.forest.node_of.tolist() == single.forest.node_of.tolist()
        assert [ghost[1:5] for ghost in bulk.forest.ghosts._ring] == [
            ghost[1:5] for ghost in single.forest.ghosts._ring
        ]
    assert many, "nothing went many at a time"
    for tree, other in zip(bulk.forest.trees.values(), single.forest.trees.values(), strict=True):
        assert [child.blocks.tolist() for child in tree.root.children] == [
            child.blocks.tolist() for child in other.root.children
        ]
