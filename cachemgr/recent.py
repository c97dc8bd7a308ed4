"""The newest admissions, kept so that somebody may ask how well any other cache would have done with them.

Invariant: bounded in bytes and in number. What is kept of an admission for long are the names of its blocks, 8 bytes
each; its tokens are kept for a short while only, references to what the core was given, because naming them may wait:
`make_compact` is called as time passes, and what is more than `MAX_UNNAMED_BYTES` until then is named at once. Written
by `admission.py`; read by the admin service.
"""

from __future__ import annotations

import hashlib
from collections import deque
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachemgr.names import root_seed
from common.layout import TOKEN_BYTES

MAX_BLOCKS: Final = 192 * 1024
MAX_ADMISSIONS: Final = 16_384
MAX_UNNAMED_BYTES: Final = 1024 * 1024

Names = NDArray[np.uint64]  # [blocks]
_HIGH, _MIDDLE, _MIX = np.uint64(29), np.uint64(32), np.uint64(0xBF58476D1CE4E5B9)
_MASK: Final = (1 << 64) - 1
_SEED_KEY: Final = 0x9E3779B97F4A7C15


class Admission(NamedTuple):
    """One admitted request: who asked, how many tokens, how many of them needed no computing, and the names of its
    whole blocks in order."""

    owner: int
    num_tokens: int
    cached_tokens: int
    names: Names


class RecentAdmissions:
    """A ring of the newest admissions of sequences in blocks of `block_tokens` tokens."""

    def __init__(
        self,
        block_tokens: int,
        max_blocks: int = MAX_BLOCKS,
        max_admissions: int = MAX_ADMISSIONS,
        max_unnamed_bytes: int = MAX_UNNAMED_BYTES,
    ) -> None:
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._max_admissions = max_admissions
        self._max_unnamed_bytes = max_unnamed_bytes
        self._named: deque[tuple[int, int, int, bytes]] = deque()
        self._num_blocks = 0
        self._unnamed: deque[tuple[int, bytes, bytes, int, bytes, int]] = deque()
        self._unnamed_bytes = 0

    def __len__(self) -> int:
        return len(self._named) + len(self._unnamed)

    def add(
        self, owner: int, root: bytes, prefix_root: bytes, prefix_blocks: int, tokens: bytes, cached_tokens: int
    ) -> None:
        """Appends one, forgetting the oldest where they are too many: packed tokens below `root`, of which the first
        `prefix_blocks` blocks lie below the wider `prefix_root` (empty: none)."""
        self._unnamed.append((owner, root, prefix_root, prefix_blocks, tokens, cached_tokens))
        self._unnamed_bytes += len(tokens)
        while self._unnamed_bytes > self._max_unnamed_bytes:
            self._name_one()
        while len(self._named) + len(self._unnamed) > self._max_admissions:
            self._drop_one()

    def make_compact(self) -> None:
        """Names what is not named yet, and lets its tokens go. Costs about 10 µs for each 8,192 tokens."""
        while self._unnamed:
            self._name_one()

    def forget(self, owner: int) -> None:
        """Drops what one owner asked."""
        self.make_compact()
        self._named = deque(item for item in self._named if item[0] != owner)
        self._num_blocks = sum(_blocks_of(item) for item in self._named)

    def copy(self) -> list[Admission]:
        """All of them, the oldest first; what comes later does not change it."""
        self.make_compact()
        return [Admission(*item[:3], np.frombuffer(item[3], np.uint64)) for item in self._named]

    def _name_one(self) -> None:
        owner, root, prefix_root, prefix_blocks, tokens, cached_tokens = self._unnamed.popleft()
        self._unnamed_bytes -= len(tokens)
        names = block_names(tokens, self._block_tokens, root, prefix_root, prefix_blocks)
        self._named.append((owner, len(tokens) // TOKEN_BYTES, cached_tokens, names.tobytes()))
        self._num_blocks += len(names)
        while self._num_blocks > self._max_blocks:
            self._drop_one()

    def _drop_one(self) -> None:
        if self._named:
            self._num_blocks -= _blocks_of(self._named.popleft())
        else:
            self._unnamed_bytes -= len(self._unnamed.popleft()[4])


def block_names(
    tokens: bytes, block_tokens: int, root: bytes, prefix_root: bytes = b"", prefix_blocks: int = 0
) -> Names:
    """Chained names of the whole blocks of a sequence of packed tokens, in order.

    Two sequences share a leading run of names exactly where they could have shared blocks, up to collisions of 64 bits:
    a name is the sum over all blocks so far of a number that a block, its place and its root give, mixed between a
    multilinear hash of its tokens and a factor of its place. It names for statistics and authorises nothing.
    """
    count = len(tokens) // (block_tokens * TOKEN_BYTES)
    if not count:
        return np.zeros(0, np.uint64)
    words = np.frombuffer(tokens, np.uint32, count * block_tokens)
    wide = words.astype(np.uint64) if block_tokens % 2 else words.view(np.uint64)
    rows = wide.reshape(count, -1)
    names: Names = rows @ _keys(rows.shape[1])
    names[:prefix_blocks] += _seed(prefix_root)
    names[prefix_blocks:] += _seed(root)
    names ^= names >> _HIGH
    names *= _MIX
    names ^= names >> _MIDDLE
    names *= _keys(1 << (count - 1).bit_length())[:count]
    return np.add.accumulate(names, out=names)


@lru_cache(maxsize=32)
def _keys(count: int) -> Names:
    """Fixed odd numbers."""
    raw = hashlib.shake_256(b"recent %d" % count).digest(8 * count)
    return np.frombuffer(raw, "<u8") | np.uint64(1)


def _seed(root: bytes) -> np.uint64:
    return np.uint64(root_seed(root) * _SEED_KEY & _MASK)


def _blocks_of(item: tuple[int, int, int, bytes]) -> int:
    return len(item[3]) // 8
