"""How one claimed sequence could be leased again: which of its blocks are listed, shared, or its own. Changes nothing.

Invariant: a plan exists only where every block of the table is accounted for: listed at its place with these tokens,
sealed with the very content that others claim there too, or in limbo and nobody else's. Called by `claims.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from cachemgr.claimed import Content
from cachemgr.ids import BlockRun, NodeId, TenantId
from cachemgr.layers import NO_MATCH, tail_key, whole_blocks, whole_path
from cachemgr.nodes import Node
from cachemgr.radix import Match
from cachemgr.results import ScopeSpan
from cachemgr.resuming import Held
from cachemgr.state import CacheState
from cachemgr.window_claims import Said, table_agrees
from cachemgr.windows import passed_by
from common.layout import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Claim:
    """One held sequence with whose it is and how it is to be leased; see `CacheManager.acquire` for the rest."""

    held: Held
    tenant: TenantId
    root: bytes
    request_id: str
    sample: int
    no_store: bool = False
    priority: int = 50
    ttl_ns: int = 0
    prefix: ScopeSpan | None = None
    valid: bool = True  # whether it is known whose it is


@dataclass(slots=True, eq=False)
class Plan:
    """A claim that can be granted, before anything is changed."""

    claim: Claim
    owner: int
    table: BlockRun  # as it is leased
    passed: int  # leading null blocks of it
    listed: BlockRun  # leading blocks of the table that the index lists at their place
    committed: int  # tokens of a partly filled block after them that is listed too
    sealed: int  # what its lease is to be raised to; a copy that has not run begins there
    shared: dict[int, Content]
    writable: dict[int, int]  # block -> owner


def plan_claim(
    state: CacheState, item: Claim, limbo: set[int], taken: set[int], shared: dict[int, Content], said: Said
) -> Plan | None:
    """How a claim would be granted, or None. `said` is what its decoder says of window blocks."""
    held, size = item.held, state.block_tokens
    if not item.valid:
        return None
    table = table_of(state, item)
    numbers: list[int] = table.tolist()
    passed = numbers.count(0)
    present = numbers[passed:]
    num_tokens, sealed = len(held.tokens) // TOKEN_BYTES, held.sealed_tokens
    fits = 0 <= sealed <= min(num_tokens, len(table) * size) and num_tokens > 0 and numbers != []
    if not fits or passed > passed_by(state, sealed) or len(set(present)) != len(present):
        return None
    if present and not 1 <= min(present) <= max(present) <= state.pool.num_blocks:
        return None
    if not table_agrees(state, said, held, table):
        return None
    if item.prefix is not None and item.prefix.num_tokens > num_tokens:
        return None
    whole = sealed // size
    if held.copy is not None:
        if held.copy.target not in numbers[: whole + 1] or not 0 < held.copy.num_tokens <= size:
            return None
        whole = numbers.index(held.copy.target)
    listed = listed_part(state, item, table, whole)
    committed = _committed(state, item, table, len(listed)) if len(listed) == whole and held.copy is None else 0
    first = len(listed) + (committed > 0)
    owner = state.owner_of(item.tenant)
    path = Path(state, item)
    sealed = sealed if held.copy is None else whole * size
    plan = Plan(item, owner, table, passed, table[:first], committed, sealed, {}, {})
    for place in range(max(first, passed), len(numbers)):
        block = numbers[place]
        if place >= whole:
            if block not in limbo or block in taken or block in shared:
                return None
            plan.writable[block] = _owner_at(state, item, owner, place)
            continue
        content = (_owner_at(state, item, owner, place), place, path.to(place), path.to(place + 1))
        if (block not in shared and block not in limbo) or block in taken or shared.get(block, content) != content:
            return None
        plan.shared[block] = content
    return plan


def table_of(state: CacheState, item: Claim) -> BlockRun:
    """The table of a claim. What is presented of blocks that its window has passed counts for nothing: they may be
    anybody's by now. There stand null blocks."""
    table = item.held.blocks.astype(np.intp)
    table[: passed_by(state, item.held.sealed_tokens)] = 0
    return table


def listed_part(state: CacheState, item: Claim, table: BlockRun, whole: int) -> BlockRun:
    """The leading blocks of a table that the index lists at that place with these tokens; those that were passed come
    before them, and there are none where nothing comes after."""
    found = _found(state, item, min(whole * state.block_tokens, len(item.held.tokens) // TOKEN_BYTES))
    passed = len(table) - int(np.count_nonzero(table))
    count = min(len(found.blocks), len(table))
    unequal = np.flatnonzero(found.blocks[passed:count] != table[passed:count])
    end = passed + int(unequal[0]) if len(unequal) else count
    return table[: end if end > passed else 0]


def _found(state: CacheState, item: Claim, limit: int) -> Match:
    """What the index lists of the first `limit` tokens of a claim, also what nobody could begin with."""
    span, tokens = item.prefix, item.held.tokens
    above = whole_blocks(state, span)
    if span is not None and above:
        return whole_path(
            state, item.tenant, tail_key(state, item.root, span, above, tokens), span, above, tokens, limit
        )
    tree = state.index.forest.trees.get((state.known_owner(item.tenant), item.root))
    return NO_MATCH if tree is None else state.index.path(tree, tokens, limit)


def _committed(state: CacheState, item: Claim, table: BlockRun, place: int) -> int:
    """How many tokens of the block at `place` are listed, where that is a partly filled block of this very path."""
    if place >= len(table):
        return 0
    forest, size = state.index.forest, state.index.block_bytes
    node = forest.nodes.get(NodeId(int(forest.node_of[table[place]])))
    if node is None or not node.tail or node.tree.owner != state.known_owner(item.tenant):
        return 0
    if not _follows(state, int(table[place]), table[:place]):
        return 0
    return len(node.edge) // TOKEN_BYTES if item.held.tokens.startswith(node.edge, place * size) else 0


def _follows(state: CacheState, block: int, path: BlockRun) -> bool:
    """Whether a listed block stands right after `path`, a listed one."""
    forest = state.index.forest
    node = forest.nodes[NodeId(int(forest.node_of[block]))]
    inside = int(forest.position[block]) - node.start
    if inside:
        before: Node | None = node
        last = int(node.blocks[inside - 1])
    else:
        before = node.parent
        if before is not None and before.parent is None:
            before = node.tree.anchor
        last = int(before.blocks[-1]) if before is not None else 0
    return last == (int(path[-1]) if len(path) else 0)


@dataclass(slots=True)
class Sources:
    """Unlisted blocks that may be copied from: those in the tables of sequences that are claimed.

    shared:  whole blocks;  heads: the tenant of each first block of this claim's tables
    partial: (place, digest of the path before it, its tokens) of each block that is sealed in part
    """

    shared: dict[int, Content]
    heads: dict[int, TenantId] = field(default_factory=dict)
    partial: dict[int, tuple[int, bytes, bytes]] = field(default_factory=dict)

    def add(self, state: CacheState, plan: Plan) -> None:
        """What a plan's table holds."""
        held, size = plan.claim.held, state.block_tokens
        self.shared.update(plan.shared)
        self.heads[int(plan.table[0])] = plan.claim.tenant
        place, rest = divmod(held.sealed_tokens, size)
        if held.copy is None and rest:
            tokens = held.tokens[place * state.index.block_bytes : held.sealed_tokens * TOKEN_BYTES]
            self.partial[int(plan.table[place])] = (place, Path(state, plan.claim).to(place), tokens)


def source_fits(state: CacheState, plan: Plan, sources: Sources) -> bool:
    """Whether the source of a copy that has not run is where it was: listed after the same path, or in the table of a
    sequence that is claimed. What is in any other block that is not listed, and whose it is, nobody can tell."""
    copy = plan.claim.held.copy
    if copy is None:
        return True
    if 0 < copy.source <= state.pool.num_blocks and state.pool.published[copy.source]:
        return len(plan.listed) * state.block_tokens == plan.sealed and _follows(state, copy.source, plan.listed)
    # Both must stand after the same blocks: a listed block is held by no more than those that hold the one before it.
    place = plan.sealed // state.block_tokens
    before = (place, Path(state, plan.claim).to(place))
    is_own_head = place == 0 and sources.heads.get(copy.source) == plan.claim.tenant  # a branch may have left the scope
    whole, part = sources.shared.get(copy.source), sources.partial.get(copy.source)
    if whole is not None:
        return is_own_head or whole[1:3] == before
    wanted = plan.claim.held.tokens[place * state.index.block_bytes :][: copy.num_tokens * TOKEN_BYTES]
    return part is not None and (is_own_head or part[:2] == before) and part[2].startswith(wanted)


class Path:
    """Digests of the first blocks of a claimed sequence, and of the root of the tree that the last one of them would be
    listed in. What is never listed is told apart."""

    def __init__(self, state: CacheState, item: Claim) -> None:
        self._state, self._item = state, item
        self._size = state.index.block_bytes
        self._border = whole_blocks(state, item.prefix)
        root = item.root if item.prefix is None or not self._border else item.prefix.root
        self._begin(root, 0)

    def _begin(self, root: bytes, place: int) -> None:
        flag = bytes([self._item.no_store])
        self._hash = hashlib.blake2b(flag, key=root, digest_size=16, person=b"tessera-path")
        self._place, self._is_below = place, place >= self._border

    def to(self, place: int) -> bytes:
        """The digest of the blocks before `place`, which may not be smaller than at the call before."""
        item, tokens = self._item, self._item.held.tokens
        if item.prefix is not None and place > self._border and not self._is_below:
            self._begin(tail_key(self._state, item.root, item.prefix, self._border, tokens), self._border)
        self._hash.update(tokens[self._place * self._size : place * self._size])
        self._place = place
        return self._hash.digest()


def _owner_at(state: CacheState, item: Claim, owner: int, place: int) -> int:
    within = item.prefix is not None and place < whole_blocks(state, item.prefix)
    return state.owner_of(item.prefix.owner) if within and item.prefix is not None else owner
