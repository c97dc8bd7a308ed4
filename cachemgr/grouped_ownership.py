"""Whose content window blocks hold, told along with that of the blocks that have them.

Invariant: what is learnt of the content of a block is learnt of its window block in the same step. Takes the place of
`Ownership` in a pool whose blocks have window blocks.
"""

from __future__ import annotations

from cachemgr.ids import BlockRun
from cachemgr.ownership import ANYONE, CLEAN, NO_OWNER, Ownership
from cachemgr.window_blocks import WindowBlocks


class GroupedOwnership(Ownership):
    """As Ownership; `begin` leaves the window blocks to `WindowBlocks.attach`."""

    def __init__(self, num_blocks: int, windows: WindowBlocks) -> None:
        super().__init__(num_blocks)
        self._windows = windows

    def give(self, blocks: BlockRun | list[int], owner: int) -> None:
        """See Ownership."""
        super().give(blocks, owner)
        self._windows.written_by(blocks, owner)

    def claim(self, blocks: BlockRun, owner: int) -> None:
        """See Ownership."""
        super().claim(blocks, owner)
        self._windows.written_by(blocks, owner if owner != NO_OWNER else ANYONE)

    def untouched(self, blocks: BlockRun) -> None:
        """See Ownership."""
        super().untouched(blocks)
        self._windows.written_by(blocks, CLEAN)

    def taint(self, blocks: BlockRun) -> None:
        """See Ownership."""
        super().taint(blocks)
        self._windows.taint(blocks)

    def taint_owner(self, owner: int) -> None:
        """See Ownership."""
        super().taint_owner(owner)
        self._windows.taint_owner(owner)

    def disown(self, blocks: BlockRun) -> None:
        """See Ownership."""
        super().disown(blocks)
        self._windows.taint(blocks)
