"""An index journal in ordinary memory, a plain model of what it was told, and a memory that dies between two stores."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachemgr.journal import IndexJournal
from cachemgr.journal_format import JournalIdentity, Sections, write_header
from cachemgr.nodes import Tree
from cachemgr.recovery import Recovered

Entry = tuple[str, bytes, int, int, tuple[int, ...]]  # owner, root, block before, place, tokens


def identity(num_blocks: int, block_tokens: int, num_window_blocks: int = 0) -> JournalIdentity:
    """Of a made-up arena."""
    made_up = JournalIdentity(num_blocks, block_tokens, 4096, b"f" * 16, b"n" * 32, b"b" * 16)
    return replace(made_up, num_window_blocks=num_window_blocks, window_block_bytes=512 * (num_window_blocks > 0))


def make_memory(num_blocks: int, block_tokens: int, num_window_blocks: int = 0) -> NDArray[np.uint8]:
    """The bytes of an empty journal."""
    memory = np.zeros(Sections.of(num_blocks, block_tokens, num_window_blocks).end, np.uint8)
    write_header(memory, identity(num_blocks, block_tokens, num_window_blocks), 7)
    return memory


class Died(Exception):
    """The process was killed here."""


class Mortal(np.ndarray[Any, Any]):
    """Memory whose `lives`-th store is torn: some of its bytes arrive, and then the process is dead."""

    fate: Fate | None = None

    def __array_finalize__(self, parent: Any) -> None:
        """Views share the fate of their memory."""
        self.fate = getattr(parent, "fate", None)

    def __setitem__(self, place: Any, value: Any) -> None:
        """One store."""
        fate = self.fate
        if fate is None:
            super().__setitem__(place, value)
            return
        fate.lives -= 1
        if fate.lives >= 0:
            super().__setitem__(place, value)
            return
        plain = self.view(np.ndarray)
        before = np.array(plain, copy=True)
        plain[place] = value
        after = np.array(plain, copy=True)
        raw, old, new = (np.ascontiguousarray(it).reshape(-1).view(np.uint8) for it in (plain, before, after))
        changed = np.flatnonzero(old != new)
        lost = changed[int(fate.random.random() * (len(changed) + 1)) :]
        raw[lost] = old[lost]
        if not np.shares_memory(raw, plain):
            plain[...] = raw.view(plain.dtype).reshape(plain.shape)
        raise Died


@dataclass(eq=False)
class Fate:
    """How many stores are left."""

    lives: int
    random: random.Random


def mortal(memory: NDArray[np.uint8], fate: Fate) -> NDArray[np.uint8]:
    """The same memory, mortal."""
    view = memory.view(Mortal)
    view.fate = fate
    return view


@dataclass(eq=False)
class World:
    """What an index might do, told to a journal and to a dictionary; `each`: also single blocks of many sequences at
    once."""

    journal: IndexJournal
    random: random.Random
    listed: dict[int, Entry] = field(default_factory=dict)
    next_listed: dict[int, Entry] = field(default_factory=dict)  # what will be listed once the running step is over
    trees: dict[str, Tree] = field(default_factory=dict)
    each: bool = False

    def step(self) -> None:
        """One publication, or one eviction of leaves."""
        if self.each and self.random.random() < 0.3:
            self.publish_each()
        elif self.random.random() < 0.6:
            self.publish()
        else:
            self.unpublish()
        self.listed = dict(self.next_listed)

    def publish(self, owner: str | None = None) -> None:
        """Free blocks go below the root or below any whole block, in the same tree or in a layer below it."""
        size = self.journal.identity.block_tokens
        free = [b for b in range(1, self.journal.identity.num_blocks + 1) if b not in self.listed]
        if not free:
            return
        owner = owner or self.random.choice(("alice", "bob", "@public"))
        above, place, tree = 0, 0, self._tree(owner, 0, 0)
        whole = [b for b, entry in self.listed.items() if len(entry[4]) == size]
        if whole and self.random.random() < 0.7:
            above = self.random.choice(whole)
            name, root, _, place, _ = self.listed[above]
            place += 1
            tree = next(tree for tree in self.trees.values() if tree.root_key == root)
            owner = name
            if name == "@public" and self.random.random() < 0.5:
                owner, tree = "alice", self._tree("alice", place, above)
        blocks = self.random.sample(free, self.random.randint(1, min(4, len(free))))
        if self.random.random() < 0.2:
            blocks, count = blocks[:1], self.random.randint(1, size)
        else:
            count = size * len(blocks)
        tokens = [self.random.randrange(50_000) for _ in range(count)]
        before = above
        for number, block in enumerate(blocks):
            part = tuple(tokens[number * size : (number + 1) * size])
            self.next_listed[block] = (owner, tree.root_key, before, place + number, part)
            before = block
        self.journal.publish(
            owner, tree, place, np.array(tokens, "<i4").tobytes(), np.array(blocks, np.intp), above, priority=50
        )
        self.journal.flush()

    def publish_each(self) -> None:
        """A free block goes below each of some whole blocks, each in the tree of that one."""
        size = self.journal.identity.block_tokens
        free = [b for b in range(1, self.journal.identity.num_blocks + 1) if b not in self.listed]
        whole = [b for b, entry in self.listed.items() if len(entry[4]) == size]
        count = min(len(free), len(whole))
        if not count:
            return
        blocks, above = self.random.sample(free, count), self.random.sample(whole, count)
        names, trees, places, texts = [""], [], [], []
        for block, before in zip(blocks, above, strict=True):
            owner, root, _, place, _ = self.listed[before]
            tree = next(tree for tree in self.trees.values() if tree.root_key == root)
            if owner not in names:
                names.append(owner)
            tree.owner = names.index(owner)
            tokens = tuple(self.random.randrange(50_000) for _ in range(size))
            self.next_listed[block] = (owner, root, before, place + 1, tokens)
            trees.append(tree)
            places.append(place + 1)
            texts.append(np.array(tokens, "<i4").tobytes())
        self.journal.publish_each(
            names,
            trees,
            np.array(places, np.int32),
            texts,
            np.array(blocks, np.intp),
            above,
            priorities=[number % 3 for number in range(count)],
            expiries=[number % 2 for number in range(count)],
        )

    def unpublish(self) -> None:
        """Some leaves go."""
        parents = {entry[2] for entry in self.listed.values()}
        leaves = [block for block in self.listed if block not in parents]
        gone = self.random.sample(leaves, min(len(leaves), self.random.randint(1, 3)))
        for block in gone:
            del self.next_listed[block]
        if gone:
            self.journal.unpublish(np.array(gone, np.intp))

    def check_after_death(self, found: dict[int, Entry], when: str) -> None:
        """What is read after a death inside the running step is, block by block, what stood there before or after it;
        no block lacks its parent, and none that the step did not touch is lost."""
        before, after = self.listed, self.next_listed
        for block, entry in found.items():
            assert entry in (before.get(block), after.get(block)), f"{when}: block {block} is wrong"
            assert entry[2] == 0 or entry[2] in found, f"{when}: block {block} has no parent"
        for block in before.keys() & after.keys():
            assert block in found, f"{when}: block {block} was not touched and is lost"

    def _tree(self, owner: str, start: int, above: int) -> Tree:
        name = f"{owner}/{start}/{above}"
        if name not in self.trees:
            key = name.encode().ljust(32, b".")
            self.trees[name] = Tree(1, key, b"base" * 8 if start else b"", start)
        return self.trees[name]


def entries(found: Recovered, block_tokens: int) -> dict[int, Entry]:
    """What was recovered, block by block."""
    table: dict[int, Entry] = {}
    tokens = np.frombuffer(found.tokens, "<i4").reshape(-1, block_tokens)
    for node in range(found.num_nodes):
        name = found.names[int(found.trees[node])]
        before, place = int(found.parents[node]), int(found.first_places[node])
        for at in range(int(found.starts[node]), int(found.starts[node + 1])):
            block, count = int(found.blocks[at]), int(found.counts[at])
            table[block] = (name.owner, name.root, before, place, tuple(tokens[at, :count].tolist()))
            before, place = block, place + 1
    return table
