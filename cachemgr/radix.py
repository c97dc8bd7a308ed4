"""The prefix index: one compressed radix tree over tokens for each (owner, cache key root).

Invariants: a node's parent is present; node tokens are what its blocks hold; a block is in at most one node; nodes are
split at block boundaries only; a partly filled block is a leaf of its own. Matching compares tokens, one memcmp an
edge, and never a hash. Called by the manager's modules, which move the pool's blocks in the same step. It never holds,
frees or allocates a block, and never drops one that is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachemgr.eviction import count_idle_tail
from cachemgr.forest import Forest
from cachemgr.ids import BlockRun
from cachemgr.nodes import NEVER, NO_BLOCKS, Node, Tree, common_tokens, join_runs
from cachemgr.policies import DEFAULT_POLICY, POLICIES, Policy
from cachemgr.reclaim import Reclaimer
from common.layout import TOKEN_BYTES

MAX_GROWN_BLOCKS = 256  # a node that grows block by block is copied each time; beyond this a child is begun


class Match(NamedTuple):  # a third of the cost of a frozen dataclass
    """The longest cached prefix: whole `blocks`, then `num_tail_tokens` leading tokens of `source` (0 means none).

    `node` is the deepest node that was met, for `touch`. `lacking`: what a longer one would have needed whole, where
    that is why it ends here (`groups.py`), `cut_tokens` before its end.
    """

    blocks: BlockRun
    source: int
    num_tail_tokens: int
    node: Node | None
    lacking: BlockRun | None = None
    cut_tokens: int = 0


class PrefixIndex:
    """What is cached, by tokens. `references` is the pool's column: at 1, nobody but the index has the block."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        references: NDArray[np.int32],
        policy: Policy = POLICIES[DEFAULT_POLICY],
    ) -> None:
        self.forest = Forest(num_blocks, block_tokens, references, policy)
        self._reclaimer = Reclaimer(self.forest, references)
        self.block_tokens = block_tokens
        self.block_bytes = block_tokens * TOKEN_BYTES
        self.references = references

    def match(self, tree: Tree, tokens: bytes, num_tokens: int) -> Match:
        """The longest cached prefix of the first `num_tokens` of `tokens`, in a layered tree of those after its start.
        Changes nothing."""
        limit, size = num_tokens * TOKEN_BYTES, self.block_bytes
        runs: list[BlockRun] = []
        node = tree.root
        offset = node.start * size
        while offset < limit:
            key = tokens[offset : min(offset + size, limit)]
            child = node.children.get(key) if len(key) == size else None
            if child is not None:
                node = child
                edge = node.edge
                reach = limit - offset
                if tokens.startswith(edge, offset):
                    if len(edge) <= reach:
                        runs.append(node.blocks)
                        offset += len(edge)
                        continue
                    shared = reach // TOKEN_BYTES
                else:
                    shared = common_tokens(edge, tokens[offset:limit])
                whole, rest = divmod(shared, self.block_tokens)
                runs.append(node.blocks[:whole])
                return Match(join_runs(runs), node.blocks.item(whole) if rest else 0, rest, node)
            best, shared = None, 0
            for beside in node.children.around(key):
                if beside is not None:
                    length = common_tokens(beside.edge, key)
                    if length > shared:
                        best, shared = beside, length
            if best is not None:
                return Match(join_runs(runs), best.blocks.item(0), shared, best)
            break
        return Match(join_runs(runs), 0, 0, node)

    def path(self, tree: Tree, tokens: bytes, num_tokens: int) -> Match:
        """As `match`, of one tree of two that a prefix lies in: `usable` is asked about both together."""
        return self.match(tree, tokens, num_tokens)

    def usable(self, found: Match) -> Match:
        """What of a path can be begun with: all of it, where it has no gaps (`gaps.py`)."""
        return found

    def fill(
        self, node: Node, depth: int, tokens: bytes, own: BlockRun, existing: BlockRun
    ) -> tuple[BlockRun, list[int]]:
        """Puts `own` blocks that were computed anew where an insertion, of the same cursor and tokens, found gaps among
        the `existing` ones; these with those, and their places. Here there are none."""
        return existing, []

    def take_idle(self, node: Node) -> tuple[BlockRun, bool]:
        """Unlists what of a node could be evicted now; returns it, and whether the node is there still."""
        is_leaf = not node.children and not node.anchored
        idle = count_idle_tail(node.blocks, self.references) if is_leaf else 0
        blocks = node.blocks[len(node.blocks) - idle :]
        if idle == len(node.blocks):
            self.forest.remove(node)
            return blocks, False
        if idle:
            self.forest.trim(node, len(node.blocks) - idle)
        return blocks, True

    def use(self, found: Match, priority: int, expires_ns: int = NEVER) -> None:
        """A use of what was found, as `touch`. A node that goes on after it is left as it is: what is not used there
        grows no younger, and the rest is held until its sequence ends, which touches it."""
        node = found.node
        if node is not None and len(found.blocks) < node.end and not node.tail:
            node = node.parent
        if node is not None:
            self.touch(node, priority, expires_ns)

    def touch(self, node: Node, priority: int, expires_ns: int = NEVER) -> None:
        """A use of a path, also through the wider tree that it hangs below: its nodes become the most recently used;
        their priority rises to `priority`, their expiry to `expires_ns`."""
        forest = self.forest
        forest.uses += 1
        uses = forest.uses
        step: Node | None = node
        while step is not None:
            if step.parent is None:
                step = step.tree.anchor
                continue
            step.last_use = uses
            if step.expires_ns < expires_ns:
                step.expires_ns = expires_ns
            if step.order is None or step.priority < priority:
                step.priority = max(step.priority, priority)
                forest.queue.use(step)
            else:
                step.order.use(step)
            step = step.parent

    def cursor(self, tree: Tree, table: BlockRun, depth: int) -> Node:
        """The node that lists block `depth` - 1 of a sequence whose first `depth` table blocks are published; the root
        of `tree` where that block lies before it."""
        if depth <= tree.root.start:
            return tree.root
        return self.forest.node_at(table.item(depth - 1))

    def hang(self, tree: Tree, table: BlockRun) -> None:
        """Before anything is listed in a layered tree: hangs it at the end of its prefix, whose blocks `table` begins
        with; they are published."""
        if tree.root.start and tree.anchor is None:
            above = self.forest.node_at(table.item(tree.root.start - 1))
            self.forest.anchor(tree, above)

    def insert(
        self,
        node: Node,
        depth: int,
        tokens: bytes,
        blocks: BlockRun,
        *,
        priority: int,
        grow: bool,
        expires_ns: int = NEVER,
    ) -> tuple[BlockRun, BlockRun]:
        """Lists whole `blocks` that hold `tokens`, below the first `depth` blocks of the path to `node` (a cursor).

        `grow` lets them lengthen a leaf; else they become a child. Returns the blocks that stood there already, for as
        many leading ones of `blocks` as is the case, and the tails that the new ones supersede: those are unlisted.
        """
        size = self.block_bytes
        found: list[BlockRun] = []
        offset, inside = 0, depth - node.start
        while offset < len(tokens):
            if inside < len(node.blocks):
                start, left = inside * size, len(tokens) - offset
                shared = common_tokens(node.edge[start : start + left], tokens[offset:]) // self.block_tokens
                found.append(node.blocks[inside : inside + shared])
                offset += shared * size
                inside += shared
                if offset < len(tokens) and inside < len(node.blocks):
                    node = self.forest.split(node, inside)
                continue
            key = tokens[offset : offset + size]
            child = node.children.get(key)
            if child is not None:
                node, inside = child, 0
                continue
            existing = join_runs(found)
            new = blocks[len(existing) :] if found else blocks  # a view would be one object more for each node
            superseded = self.forest.drop_tails(node, key)
            is_leaf = not node.children and not node.anchored
            if grow and not found and is_leaf and 0 < len(node.blocks) < MAX_GROWN_BLOCKS:
                self.forest.extend(node, tokens[offset:], new, expires_ns)
            else:
                self.forest.add_child(node, tokens[offset:], new, priority, tail=False, expires_ns=expires_ns)
            return existing, superseded
        return join_runs(found), NO_BLOCKS

    def insert_tail(
        self, node: Node, depth: int, tokens: bytes, block: BlockRun, *, priority: int, expires_ns: int = NEVER
    ) -> tuple[Node | None, BlockRun]:
        """Lists one partly filled block (int [1]) at a cursor, unless the tree covers its `tokens` there already.

        Returns its node, or None where it is covered; and the tails that it supersedes: those are unlisted.
        """
        inside = depth - node.start
        if inside < len(node.blocks):
            if node.edge.startswith(tokens, inside * self.block_bytes):
                return None, NO_BLOCKS
            node = self.forest.split(node, inside)
        after, _ = node.children.around(tokens)
        if after is not None and after.edge.startswith(tokens):
            return None, NO_BLOCKS
        superseded = self.forest.drop_tails(node, tokens)
        child = self.forest.add_child(node, tokens, block, priority, tail=True, expires_ns=expires_ns)
        return child, superseded

    def requeue(self, block: int) -> None:
        """Tells the eviction queue that a published block may have lost its last holder."""
        node = self.forest.node_or_none(block)
        if node is not None:
            self.forest.queue.push(node)

    def drop_superseded(self, block: int) -> BlockRun:
        """Unlists the tail in `block` if nobody holds it and a longer sibling covers it; returns what was unlisted."""
        node = self.forest.node_or_none(block)
        if node is None or not node.tail or node.parent is None or self.references[block] > 1:
            return NO_BLOCKS
        after, _ = node.parent.children.around(node.edge + b"\0")
        if after is None or not after.edge.startswith(node.edge):
            return NO_BLOCKS
        self.forest.remove(node)
        self.forest.node_of[block] = 0
        return node.blocks

    def evict(self, budgets: Mapping[int, int], count: int) -> BlockRun:
        """Unlists up to `count` blocks that nobody holds, of each owner number at most its budget, in the order of the
        queue; returns them."""
        evicted = join_runs(self._reclaimer.take(budgets, count))
        self.forest.node_of[evicted] = 0
        return evicted

    def remove_owner(self, owner: int) -> tuple[BlockRun, list[Tree]]:
        """Unlists everything of an owner, held or not, and what others have hung below it; the blocks and the trees."""
        trees = self.forest.trees.values()
        dropped = [tree for tree in trees if tree.owner == owner]
        below = [tree for tree in trees if tree.anchor is not None and tree.anchor.tree.owner == owner != tree.owner]
        dropped = below + dropped  # what hangs below goes first: its anchors are still in their trees
        runs = []
        for tree in dropped:
            stack = list(tree.root.children)
            while stack:
                node = stack.pop()
                stack += node.children
                runs.append(node.blocks)
                self.forest.forget_node(node)
            self.forest.drop_tree(tree)
        blocks = join_runs(runs)
        self.forest.node_of[blocks] = 0
        return blocks[blocks > 0], dropped
