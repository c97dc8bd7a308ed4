"""The record of one published block in the index journal, and the checksum that makes it count.

A record is a row of little-endian u32 words: eight of a head, then one a token of a block (unused ones are 0), and a 0
where that makes them even. Its checksum stands in a column of its own and is a multilinear hash mod 2^64 (Lemire and
Kaser, "Strongly universal string hashing is fast", 2014) over pairs of words, the stamp of the parent's record and the
salt of its tree. The keys are odd, so that a change of one pair does not cancel; changes of several pairs in their
highest bits alone are seen less surely, which is the price of half as many products. Invariant: the checksum of a valid
record is odd and that of an invalid one 0, so that one aligned store of 8 bytes lists a block or unlists it. Pure
arithmetic on arrays; called by `journal.py` for writing and `recovery.py` for reading. It finds torn and damaged
records, not forged ones: whoever can write the file owns the node.
"""

from __future__ import annotations

import hashlib
import struct
from operator import mul
from typing import Final

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint32]  # [records, row_words]
Checksums = NDArray[np.uint64]

# Words of the head. The stamp tells publications apart: a block that is published again has another one.
STAMP: Final = 0  # two words
TREE: Final = 2
PARENT: Final = 3  # block before this one in the sequence, 0 none
POSITION: Final = 4  # index of the block in the sequence
SHAPE: Final = 5  # number of tokens, and above them the priority
EXPIRY: Final = 6  # two words: ns on the node's monotonic clock, 0 never
HEAD_WORDS: Final = 8
PRIORITY_SHIFT: Final = 16
COUNT_MASK: Final = (1 << PRIORITY_SHIFT) - 1

_MASK: Final = (1 << 64) - 1
_SEED: Final = 0x7E55E7A
_LIST: Final = np.uint64(1)


def row_words(block_tokens: int) -> int:
    """Words of a record, an even number."""
    return HEAD_WORDS + block_tokens + block_tokens % 2


class RecordHash:
    """The fixed keys of the hash for blocks of `block_tokens` tokens."""

    def __init__(self, block_tokens: int) -> None:
        # The keys are the same in every process: another version of them would invalidate every journal.
        count = row_words(block_tokens) // 2 + 2
        raw = hashlib.shake_256(_SEED.to_bytes(8, "little")).digest(8 * count)
        keys = np.frombuffer(raw, "<u8") | np.uint64(1)
        self._words: Checksums = keys[:-2].copy()
        self._parent_key, self._salt_key = keys[-2], keys[-1]
        self._parent_stamp, self._salt = int(keys[-2]), int(keys[-1])
        self._numbers = tuple(keys[:-2].tolist())
        self._unpack = struct.Struct(f"<{len(self._numbers)}Q").unpack

    def checksums(self, rows: Rows, parent_stamps: Checksums, salts: Checksums) -> Checksums:
        """u64 [records], all odd, of records in any order; the rows lie one after the other. `salts` may be one for
        all, u64 [1]."""
        sums: Checksums = np.dot(rows.view(np.uint64), self._words)  # half of the cost of "@" for a few rows
        sums += parent_stamps * self._parent_key
        sums += salts * self._salt_key
        sums |= _LIST
        return sums

    def checksum(self, row: bytes, parent_stamp: int, salt: int) -> int:
        """As `checksums`, of one record."""
        words: int = sum(map(mul, self._unpack(row), self._numbers))
        return (words + parent_stamp * self._parent_stamp + salt * self._salt) & _MASK | 1

    def chained(self, rows: Rows, stamp: int, stamp_above: int, salt: int) -> Checksums:
        """The same for records of one publication, each the parent of the next; `stamp_above` is of the first's."""
        sums: Checksums = rows.view(np.uint64) @ self._words
        common = salt * self._salt
        first = np.uint64((int(sums[0]) + common + stamp_above * self._parent_stamp) & _MASK)
        sums += np.uint64((common + stamp * self._parent_stamp) & _MASK)
        sums[0] = first
        sums |= _LIST
        return sums


def stamps_of(rows: Rows) -> Checksums:
    """The stamps of records, u64."""
    return rows[:, STAMP].astype(np.uint64) | (rows[:, STAMP + 1].astype(np.uint64) << np.uint64(32))


def expiries_of(rows: Rows) -> NDArray[np.int64]:
    """When the blocks expire, ns; 0 never."""
    low, high = rows[:, EXPIRY].astype(np.int64), rows[:, EXPIRY + 1].astype(np.int64)
    return low | (high << 32)


def digest_of(*parts: bytes) -> int:
    """64 bits over parts that cannot run into one another; odd, so that it is never 0."""
    hasher = hashlib.blake2b(digest_size=8, person=b"tessera-journal")
    for part in parts:
        hasher.update(len(part).to_bytes(4, "little"))
        hasher.update(part)
    return int.from_bytes(hasher.digest(), "little") | 1
