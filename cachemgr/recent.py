"""The newest admissions, kept so that somebody may ask how well any other cache would have done with them.

Invariant: bounded in bytes of tokens and in number; what is kept are references to immutable tokens that the core was
given, and nothing is computed before somebody asks. They stay in memory and leave it only as names of blocks. Written
by `admission.py`; read by the admin service.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from cachemgr.names import chain, root_seed

MAX_BYTES: Final = 8 * 1024 * 1024
MAX_ADMISSIONS: Final = 16_384


class Admission(NamedTuple):
    """One admitted request: its tree's root, that of the wider tree which its first blocks lie in (empty: none), its
    packed tokens and how many of them needed no computing. `owner` is who asked."""

    owner: int
    root: bytes
    prefix_root: bytes
    prefix_blocks: int
    tokens: bytes
    cached_tokens: int


_TOKENS: Final = 4  # the place of `tokens` in an `Admission`


class RecentAdmissions:
    """A ring of the newest admissions."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_admissions: int = MAX_ADMISSIONS) -> None:
        self._ring: deque[tuple[int, bytes, bytes, int, bytes, int]] = deque()
        self._max_bytes = max_bytes
        self._max_admissions = max_admissions
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._ring)

    def add(
        self, owner: int, root: bytes, prefix_root: bytes, prefix_blocks: int, tokens: bytes, cached_tokens: int
    ) -> None:
        """Appends one, forgetting the oldest where they are too many."""
        ring = self._ring  # of plain tuples: they cost a third of an `Admission`
        ring.append((owner, root, prefix_root, prefix_blocks, tokens, cached_tokens))
        self._bytes += len(tokens)
        while self._bytes > self._max_bytes or len(ring) > self._max_admissions:
            self._bytes -= len(ring.popleft()[_TOKENS])

    def forget(self, owner: int) -> None:
        """Drops what one owner asked."""
        self._ring = deque(item for item in self._ring if item[0] != owner)
        self._bytes = sum(len(item[_TOKENS]) for item in self._ring)

    def copy(self) -> list[Admission]:
        """All of them, the oldest first; what comes later does not change it."""
        return list(map(Admission._make, self._ring))


def block_names(admission: Admission, block_bytes: int) -> list[bytes]:
    """Chained names of the whole blocks of an admission, in order. The last token is never a hit, so it is not counted.

    Two admissions share a leading run of names exactly where they could have shared blocks.
    """
    names = []
    name = b""
    inner, outer = root_seed(admission.root), root_seed(admission.prefix_root)
    tokens = admission.tokens
    for index, offset in enumerate(range(0, len(tokens) - block_bytes + 1, block_bytes)):
        seed = outer if index < admission.prefix_blocks else inner
        name = chain(name, tokens[offset : offset + block_bytes], seed)
        names.append(name)
    return names
