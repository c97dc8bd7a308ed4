"""A small table of fixed slots in the index journal: bytes with a digest each. Trees, owners, processes and the header.

Invariant: a slot counts only if its digest fits its number and its bytes. It is written in the order: digest to 0,
bytes, digest; so that whoever stops in between leaves an empty slot, never half a one. Called by `journal.py`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cachemgr.records import digest_of

_DIGEST_BYTES: Final = 8


class Table:
    """`num_slots` slots of `num_bytes` bytes (a multiple of 8) at `offset` of `memory` (u8)."""

    def __init__(self, memory: NDArray[np.uint8], offset: int, num_slots: int, num_bytes: int) -> None:
        end = offset + num_slots * _DIGEST_BYTES
        self._digests: NDArray[np.uint64] = memory[offset:end].view(np.uint64)
        self._bytes = memory[end : end + num_slots * num_bytes].reshape(num_slots, num_bytes)
        self.num_slots = num_slots
        self.num_bytes = num_bytes

    @staticmethod
    def size(num_slots: int, num_bytes: int) -> int:
        """Bytes that a table takes."""
        return num_slots * (_DIGEST_BYTES + num_bytes)

    def write(self, slot: int, data: bytes) -> None:
        """Puts `data` into a slot, padded with zeros. Raises ValueError where it is too long."""
        if len(data) > self.num_bytes:
            raise ValueError(f"{len(data)} bytes do not fit a slot of {self.num_bytes}")
        padded = data.ljust(self.num_bytes, b"\0")
        self._digests[slot] = 0
        self._bytes[slot] = np.frombuffer(padded, np.uint8)
        self._digests[slot] = digest_of(slot.to_bytes(8, "little"), padded)

    def read(self, slot: int) -> bytes | None:
        """The padded bytes of a slot; None where nothing valid is in it."""
        digest = int(self._digests[slot])
        if not digest:
            return None
        data = self._bytes[slot].tobytes()
        return data if digest == digest_of(slot.to_bytes(8, "little"), data) else None

    def erase(self, slot: int) -> None:
        """Empties a slot."""
        self._digests[slot] = 0

    def used(self) -> list[tuple[int, bytes]]:
        """Slots with something valid in them."""
        slots: list[Any] = np.flatnonzero(self._digests).tolist()
        return [(slot, data) for slot in slots if (data := self.read(slot)) is not None]

    def free_slots(self, limit: int) -> list[int]:
        """The lowest slots with nothing in them, at most `limit`, the lowest last."""
        slots: list[int] = np.flatnonzero(self._digests == 0)[:limit][::-1].tolist()
        return slots
