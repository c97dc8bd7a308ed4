"""Reading an index journal: which of its records count, and the nodes of the tree that they make.

Invariant: a record counts only if its checksum fits, its tree is known and every block before it counts too: so what
comes out is a set of whole paths, each a state that the index had, or a part of one. Vectorised over all blocks: paths
are followed by pointer doubling, in as many passes as the logarithm of the longest. Pure; called at the daemon's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cachemgr import records
from cachemgr.ids import BlockRun
from cachemgr.journal import IndexJournal
from cachemgr.journal_format import TreeName
from cachemgr.records import HEAD_WORDS, Rows

_T = TypeVar("_T", bound=np.generic)
Mask = NDArray[np.bool_]  # [num_blocks + 1]
Column = NDArray[np.intp]  # [num_blocks + 1]


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """Blocks [n] in the order of their nodes, a node's parent before it; node i has blocks `starts[i]`..`starts[i+1]`.

    parents, first_places: of the first block of each node: the block before it (0: at the root), its index
    tails:                 whether a node is one partly filled block
    trees:                 tree number of each node, a key of `names`, which gives its owner and key
    stamps, priorities:    the highest of a node's blocks;  expiries: the latest, 0 never
    holders:               session that each block [num_blocks + 1] was given to last, 0 none, -1 not known
    windows:               window block that each block [num_blocks + 1], listed or not, has, 0 none; [0] without groups
    tokens:                packed int32, `block_tokens` a block, zeros after the end of a partly filled one
    """

    blocks: BlockRun
    starts: NDArray[np.intp]
    counts: NDArray[np.intp]
    parents: NDArray[np.intp]
    first_places: NDArray[np.intp]
    tails: Mask
    trees: NDArray[np.intp]
    stamps: NDArray[np.uint64]
    priorities: NDArray[np.intp]
    expiries: NDArray[np.int64]
    tokens: bytes
    holders: NDArray[np.int64]
    windows: NDArray[np.int32]
    names: dict[int, TreeName]

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return len(self.parents)


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """The records by block; what is not `ok` has no meaning."""

    ok: Mask
    tree: Column
    parent: Column
    position: Column
    count: Column
    foreign: Mask  # the block before it is of another tree


def recover(journal: IndexJournal) -> Recovered:
    """What `journal` says of the index. Changes nothing."""
    names = journal.known_trees()
    columns = _read(journal, names)
    ok = columns.ok
    num_children = np.bincount(columns.parent[ok], minlength=len(ok))
    is_tail = columns.count < journal.identity.block_tokens
    head = ok & ((columns.parent == 0) | columns.foreign | (num_children[columns.parent] != 1) | is_tail)
    leader = np.where(head, np.arange(len(ok)), columns.parent)
    leader[~ok] = 0
    leader = _to_the_end(leader)
    blocks = np.flatnonzero(ok)
    lead = leader[blocks]
    order = np.lexsort((columns.position[blocks], lead, columns.position[lead]))
    blocks, lead = blocks[order], lead[order]
    starts = np.flatnonzero(np.diff(lead, prepend=0))
    first = blocks[starts]
    rows: Rows = journal.rows[blocks]
    return Recovered(
        blocks=blocks,
        starts=np.append(starts, len(blocks)),
        counts=columns.count[blocks],
        parents=columns.parent[first],
        first_places=columns.position[first],
        tails=is_tail[first],
        trees=columns.tree[first],
        stamps=_highest(records.stamps_of(rows), starts),
        priorities=_highest((rows[:, records.SHAPE] >> records.PRIORITY_SHIFT).astype(np.intp), starts),
        expiries=_latest(records.expiries_of(rows), starts),
        tokens=rows[:, HEAD_WORDS : HEAD_WORDS + journal.identity.block_tokens].tobytes(),
        holders=journal.holders(),
        windows=journal.windows(),
        names=names,
    )


def _read(journal: IndexJournal, names: dict[int, TreeName]) -> _Columns:
    total, size = len(journal.checksums), journal.identity.block_tokens
    listed = np.flatnonzero(journal.checksums)
    listed = listed[listed > 0]
    rows = journal.rows[listed]
    tree, parent = rows[:, records.TREE].astype(np.intp), rows[:, records.PARENT].astype(np.intp)
    position = rows[:, records.POSITION].astype(np.intp)
    count = (rows[:, records.SHAPE] & records.COUNT_MASK).astype(np.intp)
    salts = np.zeros(journal.trees.num_slots, np.uint64)
    layers = np.zeros(len(salts), np.intp)
    for slot, name in names.items():
        salts[slot], layers[slot] = name.salt(), name.start
    inside = (tree < len(salts)) & (parent < total)
    tree[~inside], parent[~inside] = 0, 0
    above = np.where(parent > 0, records.stamps_of(journal.rows[parent]), np.uint64(0))
    sums = journal.hash.checksums(rows, above, salts[tree])
    valid = inside & (sums == journal.checksums[listed]) & (salts[tree] != 0)
    valid &= (count >= 1) & (count <= size) & ((parent == 0) == (position == 0))

    def spread(values: NDArray[np.intp]) -> Column:
        column = np.zeros(total, np.intp)
        column[listed] = values
        return column

    ok = np.zeros(total, np.bool_)
    ok[listed] = valid
    trees, parents, positions, counts = spread(tree), spread(parent), spread(position), spread(count)
    follows = ok[parents] & (positions[parents] == positions - 1) & (counts[parents] == size)
    ok &= (parents == 0) | follows
    foreign = ok & (parents > 0) & (trees[parents] != trees)
    ok &= (positions >= layers[trees]) & (foreign == ((positions == layers[trees]) & (positions > 0)))
    ok &= ~_ill_hung(trees, parents, foreign & ok, len(salts))
    return _Columns(_with_ancestors(ok, parents), trees, parents, positions, counts, foreign & ok)


def _ill_hung(trees: Column, parents: Column, foreign: Mask, num_trees: int) -> Mask:
    """Blocks below another tree, where others of their own tree hang elsewhere: a layered tree has one place."""
    place = np.zeros(num_trees, np.intp)
    blocks = np.flatnonzero(foreign)
    place[trees[blocks]] = parents[blocks]
    wrong: Mask = foreign & (place[trees] != parents)
    return wrong


def _with_ancestors(ok: Mask, parents: Column) -> Mask:
    """Those of `ok` whose every ancestor is ok too. A cycle cannot be among them: positions fall along the parents."""
    whole = ok.copy()
    whole[0] = True
    above = np.where(ok, parents, 0)
    while above.any():
        whole &= whole[above]
        above = above[above]
    whole[0] = False
    return whole


def _to_the_end(pointers: Column) -> Column:
    while True:
        further = pointers[pointers]
        if np.array_equal(further, pointers):
            return pointers
        pointers = further


def _highest(values: NDArray[_T], starts: NDArray[np.intp]) -> NDArray[_T]:
    return np.maximum.reduceat(values, starts) if len(starts) else values


def _latest(expiries: NDArray[np.int64], starts: NDArray[np.intp]) -> NDArray[np.int64]:
    never = np.iinfo(np.int64).max
    latest = _highest(np.where(expiries == 0, never, expiries), starts)
    return np.where(latest == never, 0, latest)
