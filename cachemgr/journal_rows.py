"""How records come into the file of an index journal: through its mapping, or by writes of whole runs.

A page that is stored into through a mapping counts to this process, and costs a fault where it is new or was given
back. So a run of records goes by one write to the file; the kernel keeps one copy of a page for both, and it outlives
the process in both. Invariant: when `store` has returned True all records are there, so that their checksums may
follow. Called by `journal.py`; the file is `journal_file.py`'s.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cachemgr.ids import BlockRun

LEAST_RUN: Final = 16  # records in a row that are worth a write of their own
Items = NDArray[np.void]  # [records], opaque


class Backing(Protocol):
    """The file that a journal's memory maps: what is written to one of them is in the other."""

    def write(self, offset: int, data: memoryview) -> bool:
        """Stores bytes from `offset` on; False where they may not all be there."""

    def release(self) -> None:
        """Gives the memory of the mapping back; the file keeps what is in it."""


def store(backing: Backing | None, offset: int, mapped: Items, blocks: BlockRun, items: Items) -> bool:
    """Puts `items` at the places `blocks` of `mapped`, which lies at byte `offset` of the file. Returns whether they
    are all there."""
    if backing is not None and len(blocks) >= LEAST_RUN:
        places, rows = blocks, items
        if places[0] > places[-1]:  # what was evicted together is used again from its end on
            places, rows = blocks[::-1], np.ascontiguousarray(items[::-1])
        cuts = np.flatnonzero(np.diff(places) != 1) + 1
        if (len(cuts) + 1) * LEAST_RUN <= len(places):
            return _write(backing, offset, places, rows, cuts)
    mapped[blocks] = items
    return True


def _write(backing: Backing, offset: int, places: BlockRun, rows: Items, cuts: NDArray[np.intp]) -> bool:
    data, size = memoryview(rows.view(np.uint8)), rows.itemsize  # type: ignore[arg-type]
    begin = 0
    for end in (*cuts.tolist(), len(places)):
        if not backing.write(offset + places.item(begin) * size, data[begin * size : end * size]):
            return False
        begin = end
    return True
