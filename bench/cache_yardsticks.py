"""Two plain managers to measure ours beside: a chain of hashes in a dictionary, and a radix tree of pages.

They are written the way the two common engines keep their own prefix caches, in plain Python, with nothing left out
that those do on the same call and nothing added: match, pin, allocate, evict the least recently used, publish,
release. Invariant: a block is free, cached or held, and what they answer is right (tests compare with a naive search).
They know no tenants, no sequences that stop inside a block, no sessions. `bench/core.py` alone uses them.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


class HashChainCache:
    """Blocks by the SHA-256 of (hash of the block before, tokens); free blocks in least recently used order.

    A cached block that nobody holds stays in the free queue until it is taken for something else; a hit takes it out.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """The chained hash of each whole block."""
        size, previous, found = self._block_tokens, b"", []
        for start in range(0, len(tokens) - size + 1, size):
            digest = hashlib.sha256(previous)
            digest.update(array("q", tokens[start : start + size]))
            previous = digest.digest()
            found.append(previous)
        return found

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix."""
        blocks = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def cycle(self, tokens: Sequence[int]) -> int:
        """A request's whole life in the cache: match, pin, allocate, publish, release. Returns the cached tokens."""
        names = self.hashes(tokens)
        cached = self.match(names[: (len(tokens) - 1) // self._block_tokens])
        for block in cached:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1
        table = list(cached)
        for _ in range(-(-len(tokens) // self._block_tokens) - len(cached)):
            block, _ = self._free.popitem(last=False)
            old = self._hash_of[block]
            if old is not None:
                del self._block_of[old]
                self._hash_of[block] = None
            self._references[block] = 1
            table.append(block)
        for block, name in zip(table[len(cached) :], names[len(cached) :], strict=False):
            if name not in self._block_of:
                self._block_of[name] = block
                self._hash_of[block] = name
        for block in reversed(table):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
        return len(cached) * self._block_tokens


@dataclass(eq=False, slots=True)
class _Node:
    parent: _Node | None
    key: list[int]
    blocks: list[int]
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    locks: int = 0
    last_use: int = 0

    def __lt__(self, other: _Node) -> bool:
        return self.last_use < other.last_use


class RadixPageCache:
    """A radix tree over lists of token ids, children by their first page; leaves go in least recently used order."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._page = block_tokens
        self._root = _Node(None, [], [])
        self._free = list(range(num_blocks))
        self._leaves: set[_Node] = set()
        self._uses = 0

    def match(self, tokens: Sequence[int]) -> tuple[list[int], _Node]:
        """Blocks of the longest cached prefix, in whole pages, and the node where it ends; splits that node."""
        self._uses += 1
        key, node, blocks = list(tokens), self._root, list[int]()
        while len(key) >= self._page:
            child = node.children.get(tuple(key[: self._page]))
            if child is None:
                break
            child.last_use = self._uses
            shared = self._common(child.key, key)
            if shared < len(child.key):
                child = self._split(child, shared)
                blocks += child.blocks
                return blocks, child
            blocks += child.blocks
            node, key = child, key[shared:]
        return blocks, node

    def cycle(self, tokens: Sequence[int]) -> int:
        """A request's whole life in the cache: match, lock, allocate, insert, unlock. Returns the cached tokens."""
        whole = (len(tokens) - 1) // self._page * self._page
        cached, node = self.match(tokens[:whole])
        self._lock(node, 1)
        missing = -(-len(tokens) // self._page) - len(cached)
        if missing > len(self._free):
            self.evict(missing - len(self._free))
        table = cached + [self._free.pop() for _ in range(missing)]
        self._insert(list(tokens[: len(tokens) // self._page * self._page]), table, len(cached))
        self._lock(node, -1)
        return len(cached) * self._page

    def evict(self, count: int) -> int:
        """Frees at least `count` blocks of leaves that nobody locks, if there are so many."""
        heap, freed = [leaf for leaf in self._leaves if not leaf.locks], 0
        heapq.heapify(heap)
        while heap and freed < count:
            leaf = heapq.heappop(heap)
            self._free += leaf.blocks
            freed += len(leaf.blocks)
            parent = leaf.parent
            self._leaves.discard(leaf)
            if parent is None:
                continue
            del parent.children[tuple(leaf.key[: self._page])]
            if not parent.children and parent.parent is not None:
                self._leaves.add(parent)
                if not parent.locks:
                    heapq.heappush(heap, parent)
        return freed

    def _common(self, left: list[int], right: list[int]) -> int:
        size, end = self._page, min(len(left), len(right))
        place = 0
        while place + size <= end and left[place : place + size] == right[place : place + size]:
            place += size
        return place

    def _split(self, lower: _Node, shared: int) -> _Node:
        parent, count = lower.parent, shared // self._page
        upper = _Node(parent, lower.key[:shared], lower.blocks[:count], locks=lower.locks, last_use=lower.last_use)
        lower.parent, lower.key, lower.blocks = upper, lower.key[shared:], lower.blocks[count:]
        upper.children[tuple(lower.key[: self._page])] = lower
        if parent is not None:
            parent.children[tuple(upper.key[: self._page])] = upper
        return upper

    def _insert(self, key: list[int], table: list[int], cached: int) -> None:
        node = self._root
        blocks = table
        while key:
            child = node.children.get(tuple(key[: self._page]))
            if child is None:
                leaf = _Node(node, key, blocks[: len(key) // self._page], last_use=self._uses)
                node.children[tuple(key[: self._page])] = leaf
                self._leaves.discard(node)
                self._leaves.add(leaf)
                self._free += blocks[len(leaf.blocks) :]
                return
            shared = self._common(child.key, key)
            if shared < len(child.key):
                child = self._split(child, shared)
            count = shared // self._page
            # What the tree had already and this request computed again goes back.
            self._free += blocks[max(cached, 0) : count]
            node, key, blocks, cached = child, key[shared:], blocks[count:], cached - count
        self._free += blocks

    def _lock(self, node: _Node, change: int) -> None:
        step: _Node | None = node
        while step is not None:
            step.locks += change
            step = step.parent
