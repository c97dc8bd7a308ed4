"""Records of the index journal on their way: many are put together in memory that is used again, and stored at once.

Invariant: words of a record that nothing is said of are 0. Called by `journal.py`, which stores them; it knows neither
blocks nor trees by more than their numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cachemgr import records
from cachemgr.ids import BlockRun
from cachemgr.records import Checksums, Rows
from common.layout import TOKEN_BYTES

HEAD: Final = struct.Struct("<QIIIIQ")  # stamp, tree, parent, position, shape, expiry
_HEAD_TYPE: Final = np.dtype(f"V{HEAD.size}")
_FIRST: Final = 64
_PRIORITY_SHIFT: Final = np.uint64(records.PRIORITY_SHIFT)


class RowBuffer:
    """Records of blocks of `block_tokens` tokens. What a method returns is good until the next one is called."""

    def __init__(self, block_tokens: int) -> None:
        self._item = np.dtype(
            {
                "names": ["head", "tokens"],
                "formats": [_HEAD_TYPE, f"V{block_tokens * TOKEN_BYTES}"],
                "offsets": [0, HEAD.size],
                "itemsize": records.row_words(block_tokens) * TOKEN_BYTES,
            }
        )
        self.raw = f"V{self._item.itemsize}"  # numpy copies opaque items faster than structured ones
        self._whole = np.uint64(block_tokens)
        self._reserve(_FIRST)

    def path(self, head: bytes, tokens: bytes, blocks: BlockRun, positions: NDArray[np.uint32]) -> Rows:
        """Of one publication: `head` is that of its first block, each block the parent of the next one."""
        rows = self._take(len(blocks))
        self._heads[: len(blocks)] = np.frombuffer(head, _HEAD_TYPE)
        self._texts[: len(blocks)] = np.frombuffer(tokens, self._texts.dtype)
        rows[1:, records.PARENT] = blocks[:-1]
        rows[:, records.POSITION] = positions
        return rows

    def each(
        self,
        stamp: int,
        trees: Sequence[int],
        parents: BlockRun,
        positions: NDArray[np.int32],
        priorities: Sequence[int],
        expiries: Sequence[int],
        texts: Sequence[bytes | bytearray],
    ) -> Rows:
        """Of one whole block each, with stamps from `stamp` on: a column of each word. `trees` may be one for all."""
        count = len(texts)
        rows = self._take(count)
        pairs = rows.view(np.uint64)
        pairs[:, records.STAMP // 2] = np.arange(stamp, stamp + count, dtype=np.uint64)
        rows[:, records.TREE] = column(trees)
        rows[:, records.PARENT] = parents
        rows[:, records.POSITION] = positions
        rows[:, records.SHAPE] = column(priorities) << _PRIORITY_SHIFT | self._whole
        pairs[:, records.EXPIRY // 2] = column(expiries)
        self._texts[:count] = np.frombuffer(b"".join(texts), self._texts.dtype)
        return rows

    def items(self, count: int) -> NDArray[np.void]:
        """The records that were put together last, as opaque items."""
        return self._items[:count]

    def _take(self, count: int) -> Rows:
        if count > len(self._rows):
            self._reserve(count)
        return self._rows[:count]

    def _reserve(self, count: int) -> None:
        buffer: NDArray[Any] = np.zeros(count, self._item)
        self._heads, self._texts = buffer["head"], buffer["tokens"]
        self._rows: Rows = buffer.view(np.uint32).reshape(count, -1)
        self._items = buffer.view(self.raw)


def column(values: Sequence[int]) -> Checksums:
    """u64, an array of values, of one where all are alike."""
    return np.array(values[:1] if values.count(values[0]) == len(values) else values, np.uint64)
