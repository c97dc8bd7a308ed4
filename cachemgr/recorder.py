"""What the core tells of its index, so that a daemon after this one can know it. The core never asks anything back.

The implementation is `journal.py`; tests pass their own. Called by `state.py` and `publishing.py` in the same step that
changes the index, so that whoever is told of a block afterwards is told after the record of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cachemgr.ids import BlockRun
from cachemgr.nodes import Tree


class Recorder(Protocol):
    """What the core tells of its index; it never asks."""

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
        """`blocks` hold `tokens` (packed int32) and stand in a tree of `owner` from place `first_index` on, after
        `previous_block`, which may be of the tree above (0: none). `expires_ns` 0 means never."""

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
        """As `publish` of each of these blocks, whole ones, an entry of each column for one: none of them is among the
        `previous_blocks`. `names` are of owners, by their numbers."""

    def given(self, blocks: BlockRun, session: int) -> None:
        """A session may write `blocks` from now on, and nobody else: told before it is."""

    def has_windows(self, blocks: BlockRun, window_blocks: NDArray[np.int32]) -> None:
        """Blocks, distinct, have these window blocks from now on (0: none), and nobody else has: told before what has
        gone is given on, and before the end of the step."""

    def unpublish(self, blocks: BlockRun) -> None:
        """The index lists these no more. Told before anybody else can be given them."""

    def erase(self, blocks: BlockRun) -> None:
        """As `unpublish`, and nothing of what they held stays on record."""

    def flush(self) -> None:
        """The step is over: what was gathered of it is recorded now."""
