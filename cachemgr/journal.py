"""The index journal: what is published where, in memory that outlives the daemon (a mapped file).

One record a block (`records.py`), a column of window blocks where there are layer groups, a table of trees with one of
their owners, a table of the processes that hold the arena, and a header that binds it all to one arena by its nonce.
Invariants: payload is stored before the checksum that makes it count, so that a death between any two stores leaves
valid records of a moment before, and invalid ones; a record says block, previous block and position, so that splits and
joints of the tree change nothing here; an entry of a window block is one store. Called by `publishing.py`, by
`CacheState` (unpublish) and by the daemon at its start. The header's life, files and clocks are not its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachemgr import records
from cachemgr.ids import BlockRun
from cachemgr.journal_format import (
    HEADER_BYTES,
    HEADER_SLOTS,
    MAX_PROCESSES,
    OWNER_BYTES,
    PROCESS_BYTES,
    TREE_BYTES,
    Sections,
    TreeName,
    pack_header,
    read_header,
)
from cachemgr.journal_rows import HEAD, RowBuffer, column
from cachemgr.journal_table import Table
from cachemgr.keys import ROOT_BYTES
from cachemgr.nodes import Tree
from cachemgr.records import Checksums, RecordHash, Rows
from common.layout import TOKEN_BYTES

_TREE: Final = struct.Struct(f"<{ROOT_BYTES}s{ROOT_BYTES}sII")
_MASK: Final = (1 << 64) - 1
_HOLDER_KEY: Final = 0x9E3779B97F4A7C15  # spreads small numbers, so that a damaged one is none
_HOLDER_INVERSE: Final = pow(_HOLDER_KEY, -1, 1 << 64)
_LOW: Final = np.uint64((1 << 32) - 1)
_SLOTS_AT_ONCE: Final = 256  # a list of all of them would be megabytes
_FEW: Final = 10  # up to so many, one by one is cheaper than numpy's fixed costs
_STAMP: Final = struct.Struct("<Q")


class IndexJournal:
    """A journal in `memory` (u8, `Sections.end` long, its header written): everything below its identity.

    `give_back`: takes the pages of `memory` away from this process where it is a mapped file; the file keeps them.
    """

    def __init__(self, memory: NDArray[np.uint8], give_back: Callable[[], None] | None = None) -> None:
        header = read_header(memory)
        if header is None:
            raise ValueError("no valid header of an index journal")
        self.identity, self._epoch, self._turn = header
        count, tokens = self.identity.num_blocks, self.identity.block_tokens
        at = Sections.of(count, tokens, self.identity.num_window_blocks)
        self._header = Table(memory, 0, HEADER_SLOTS, HEADER_BYTES)
        self.processes = Table(memory, at.processes, MAX_PROCESSES, PROCESS_BYTES)
        self.owners = Table(memory, at.owners, at.num_owners, OWNER_BYTES)
        self.trees = Table(memory, at.trees, at.num_trees, TREE_BYTES)
        self.checksums: Checksums = memory[at.checksums : at.checksums + 8 * (count + 1)].view(np.uint64)
        self._holders: Checksums = memory[at.holders : at.holders + 8 * (count + 1)].view(np.uint64)
        entries = count + 1 if self.identity.num_window_blocks else 0
        self._windows: Checksums = memory[at.windows : at.windows + 8 * entries].view(np.uint64)
        self._buffer = RowBuffer(tokens)
        self._items = memory[at.rows : at.end].view(self._buffer.raw)
        self._row_bytes = memoryview(memory[at.rows : at.end])  # type: ignore[arg-type]  # read at a third of the price
        self._give_back = give_back
        self.rows: Rows = memory[at.rows : at.end].view(np.uint32).reshape(count + 1, -1)
        self._stamps = memory[at.rows : at.end].view(np.uint64).reshape(count + 1, -1)[:, records.STAMP // 2]
        self.hash = RecordHash(tokens)
        self._tokens = tokens
        self._positions = np.arange(count + 1, dtype=np.uint32)
        self._known: dict[tuple[str, bytes], tuple[int, int]] = {}
        self._owner_slots: dict[str, int] = {}
        self._free_trees: list[int] = []
        self._stamp = 1
        self._clear()
        self._load()

    @property
    def epoch(self) -> int:
        """Of the daemon that writes here."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """A new daemon goes on with this journal."""
        self._epoch, self._turn = epoch, self._turn + 1
        self._header.write(self._turn % HEADER_SLOTS, pack_header(self.identity, epoch, self._turn))

    def publish(
        self,
        owner: str,
        tree: Tree,
        first_index: int,
        tokens: bytes,
        blocks: BlockRun,
        previous_block: int,
        *,
        priority: int = 0,
        expires_ns: int = 0,
    ) -> None:
        """Records blocks [n] that hold `tokens` (packed int32; n whole blocks, or a part of one) at places
        `first_index`.. after `previous_block` (0: at the root)."""
        known = self._known.get((owner, tree.root_key)) or self._add_tree(owner, tree)
        count = len(blocks)
        if known is None or not count:
            return
        slot, salt = known
        stamp = self._stamp
        self._stamp = stamp + 1
        per_block = min(len(tokens) // TOKEN_BYTES, self._tokens)
        shape = per_block | priority << records.PRIORITY_SHIFT
        head = HEAD.pack(stamp, slot, previous_block, first_index, shape, expires_ns)
        if count == 1:
            above = self._pending.get(previous_block)
            if above is None:
                above = self._stamp_at(previous_block) if previous_block else 0
            self._pending[blocks.item(0)] = stamp
            self._pending_rows.append(head + tokens)
            self._pending_above.append(above)
            self._pending_salts.append(salt)
            return
        if self._pending:
            self.flush()
        end = first_index + count
        within = end <= len(self._positions)  # a path with gaps may be longer than the pool
        positions = self._positions[first_index:end] if within else np.arange(first_index, end, dtype=np.uint32)
        rows = self._buffer.path(head, tokens, blocks, positions)
        above = self._stamp_at(previous_block) if previous_block else 0
        sums = self.hash.chained(rows, stamp, above, salt)
        self._items[blocks] = self._buffer.items(count)
        self.checksums[blocks] = sums

    def publish_each(
        self,
        names: Sequence[str],
        trees: Sequence[Tree],
        places: NDArray[np.int32],
        texts: Sequence[bytes | bytearray],
        blocks: BlockRun,
        previous_blocks: Sequence[int],
        *,
        priorities: Sequence[int],
        expiries: Sequence[int],
    ) -> None:
        """See Recorder."""
        if self._pending:
            self.flush()
        count = len(blocks)
        few = trees[:1] if trees.count(trees[0]) == count else trees
        known = [entry for tree in few if (entry := self._known.get((names[tree.owner], tree.root_key)))]
        if len(known) < len(few):  # for new ones slots may have to be found, one by one
            owners = [names[tree.owner] for tree in trees]
            columns = zip(owners, trees, places.tolist(), texts, np.split(blocks, count), previous_blocks, strict=True)
            for fields, priority, expires_ns in zip(columns, priorities, expiries, strict=True):
                self.publish(*fields, priority=priority, expires_ns=expires_ns)
            self.flush()
            return
        above, slots = np.array(previous_blocks, np.intp), [slot for slot, _ in known]
        rows = self._buffer.each(self._stamp, slots, above, places, priorities, expiries, texts)
        self._stamp += count
        sums = self.hash.checksums(rows, self._stamps[above], column([salt for _, salt in known]))
        self._items[blocks] = self._buffer.items(count)
        self.checksums[blocks] = sums

    def release(self) -> None:
        """Gives back the memory that the mapping took since the last call. What is used again costs a page fault."""
        if self._give_back is not None:
            self._give_back()

    def flush(self) -> None:
        """Stores what was gathered."""
        if not self._pending:
            return
        row_bytes = self._items.itemsize
        if len(self._pending) <= _FEW:
            pending = zip(self._pending, self._pending_rows, self._pending_above, self._pending_salts, strict=True)
            for block, row, above, salt in pending:
                payload = row.ljust(row_bytes, b"\0")
                self._items[block] = payload
                self.checksums[block] = self.hash.checksum(payload, above, salt)
            self._clear()
            return
        blocks = np.fromiter(self._pending, np.intp, len(self._pending))
        items = np.frombuffer(b"".join([row.ljust(row_bytes, b"\0") for row in self._pending_rows]), self._buffer.raw)
        rows = items.view(np.uint32).reshape(len(blocks), -1)
        sums = self.hash.checksums(
            rows, np.array(self._pending_above, np.uint64), np.array(self._pending_salts, np.uint64)
        )
        self._clear()
        self._items[blocks] = items
        self.checksums[blocks] = sums

    def given(self, blocks: BlockRun, session: int) -> None:
        """Records who may write `blocks` from now on, and nobody else."""
        self._holders[blocks] = (session * _HOLDER_KEY) & _MASK

    def holders(self) -> NDArray[np.int64]:
        """The session that each block was given to last, 0 none; -1 where the record is damaged."""
        numbers = self._holders * np.uint64(_HOLDER_INVERSE)
        return np.where(numbers >> np.uint64(32), -1, numbers.astype(np.int64))

    def has_windows(self, blocks: BlockRun, window_blocks: NDArray[np.int32]) -> None:
        """Records the window block (0: none) of each of these blocks: at once, before anybody else can be given it."""
        entries = window_blocks.astype(np.uint64) << np.uint64(32) | blocks.astype(np.uint64)
        self._windows[blocks] = np.where(window_blocks > 0, entries * np.uint64(_HOLDER_KEY), np.uint64(0))

    def windows(self) -> NDArray[np.int32]:
        """The window block of each block [num_blocks + 1], 0 none; one that several entries name is nobody's. Where
        an entry is damaged it is none."""
        blocks = np.arange(len(self._windows), dtype=np.uint64)
        entries = self._windows * np.uint64(_HOLDER_INVERSE)
        found = entries >> np.uint64(32)
        fits = (self._windows != 0) & (entries & _LOW == blocks) & (found > 0)
        fits &= found <= np.uint64(self.identity.num_window_blocks)
        numbers: NDArray[np.int32] = np.where(fits, found, np.uint64(0)).astype(np.int32)
        twice = np.bincount(numbers, minlength=self.identity.num_window_blocks + 1) > 1
        numbers[twice[numbers]] = 0
        return numbers

    def unpublish(self, blocks: BlockRun) -> None:
        """Forgets blocks."""
        if self._pending:
            self.flush()
        self.checksums[blocks] = 0

    def erase(self, blocks: BlockRun) -> None:
        """Forgets blocks, and what they held."""
        self.unpublish(blocks)
        self.rows[blocks] = 0

    def keep_only(self, blocks: BlockRun) -> None:
        """Forgets all other blocks."""
        drop = np.ones(len(self.checksums), np.bool_)
        drop[blocks] = False
        self.checksums[drop] = 0
        if len(self._windows):
            self._windows[self.windows() == 0] = 0
        self._load()

    def known_trees(self) -> dict[int, TreeName]:
        """Tree number -> name of every valid tree."""
        owners = {slot: _text(data) for slot, data in self.owners.used()}
        found = {}
        for slot, data in self.trees.used():
            root, base, owner, start = _TREE.unpack(data)
            if owner in owners:
                found[slot] = TreeName(owners[owner], root, base, start)
        return found

    def _load(self) -> None:
        used = self.rows[self.checksums != 0]
        self._stamp = 1 + int(records.stamps_of(used).max(initial=0))
        self._known = {(name.owner, name.root): (slot, name.salt()) for slot, name in self.known_trees().items()}
        self._owner_slots = {_text(data): slot for slot, data in self.owners.used()}

    def _stamp_at(self, block: int) -> int:
        stamp: int = _STAMP.unpack_from(self._row_bytes, block * self._items.itemsize)[0]
        return stamp

    def _clear(self) -> None:
        # Publications of one block, gathered: told apart they would cost as much as hundreds of blocks.
        self._pending: dict[int, int] = {}  # block -> stamp
        self._pending_rows: list[bytes] = []
        self._pending_above: list[int] = []
        self._pending_salts: list[int] = []

    def _add_tree(self, owner: str, tree: Tree) -> tuple[int, int] | None:
        """A slot for a tree; None where it cannot be told apart from too many others: it is not recorded then."""
        if not self._free_trees:
            self._free_trees = self.trees.free_slots(_SLOTS_AT_ONCE)
        if not self._free_trees:
            self._recycle()
        owner_slot = self._owner_slot(owner)
        if owner_slot is None or not self._free_trees:
            return None
        slot = self._free_trees.pop()
        name = TreeName(owner, tree.root_key, tree.base_key, tree.root.start)
        self.trees.write(slot, _TREE.pack(name.root, name.base, owner_slot, name.start))
        known = self._known[owner, tree.root_key] = (slot, name.salt())
        return known

    def _owner_slot(self, owner: str) -> int | None:
        slot = self._owner_slots.get(owner)
        if slot is not None:
            return slot
        free = self.owners.free_slots(1)
        if not free:
            self._recycle()
            free = self.owners.free_slots(1)
        name = owner.encode()
        if not free or len(name) > OWNER_BYTES - 8:
            return None
        slot = free[-1]
        self.owners.write(slot, len(name).to_bytes(8, "little") + name)
        self._owner_slots[owner] = slot
        return slot

    def _recycle(self) -> None:
        """Empties the slots of trees with no block, and of owners with no tree."""
        self.flush()  # a block that was merely gathered is one
        in_use = set(np.unique(self.rows[self.checksums != 0, records.TREE]).tolist())
        for name, (slot, _) in list(self._known.items()):
            if slot not in in_use:
                self.trees.erase(slot)
                del self._known[name]
        owners = {owner for owner, _ in self._known}
        for owner in self._owner_slots.keys() - owners:
            self.owners.erase(self._owner_slots.pop(owner))
        self._free_trees = self.trees.free_slots(_SLOTS_AT_ONCE)


def _text(data: bytes) -> str:
    return data[8 : 8 + int.from_bytes(data[:8], "little")].decode()
