"""What an arena is: fd-shaped memory for `num_blocks` blocks and the null block; the daemon exports it, never maps it.

Invariant: the size is fixed for the arena's life, and the null block begins with a nonce that a peer reads back
through its own mapping. Called by the authority (creates it), the hand-off (passes its fd on) and the poison fault
knob. It knows no lease, no tenant and no geometry beyond the size of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray


class Arena(ABC):
    """Memory of `num_blocks` usable blocks of `block_bytes` bytes; block 0, the null block, comes on top."""

    num_blocks: int
    block_bytes: int
    nonce: bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes of the whole memory, the null block included."""
        return (self.num_blocks + 1) * self.block_bytes

    @abstractmethod
    def fileno(self) -> int:
        """The fd to hand over. The arena keeps owning it; ValueError after `close`."""

    @abstractmethod
    def poison(self, blocks: NDArray[np.signedinteger]) -> None:
        """Fill freed `blocks` (integers [n], ids 1..num_blocks) with NaN of every element type. A test knob alone."""

    @abstractmethod
    def close(self) -> None:
        """Let the memory go; peers that mapped it keep theirs. Harmless when repeated."""
