"""What an arena is: fd-shaped memory for `num_blocks` blocks and the null block; the daemon exports it, never maps it.

Invariant: the size is fixed for the arena's life, and the null block begins with a nonce that a peer reads back
through its own mapping; where the daemon cannot write (`nonce_written`), the first peer that maps it does. Called by
the authority (creates it), the hand-off (passes its fd on) and the poison fault knob. It knows no lease, no tenant and
no geometry beyond the size of a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from common.arena_frames import ArenaInfo, ArenaKind
from common.devices import NO_DEVICE
from common.layout import NONCE_BYTES


class Arena(ABC):
    """Memory of `num_blocks` usable blocks of `block_bytes` bytes; block 0, the null block, comes on top."""

    num_blocks: int
    block_bytes: int
    nonce: bytes
    kind: ArenaKind = ArenaKind.HOST
    device_uuid: bytes = NO_DEVICE
    nonce_written: bool = True  # GPU memory: by the first decoder that maps it

    @property
    def arena_bytes(self) -> int:
        """Bytes of the whole memory, the null block included."""
        return (self.num_blocks + 1) * self.block_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the memory behind the fd."""
        return self.arena_bytes

    def info(self, layout_fingerprint: bytes) -> ArenaInfo:
        """What goes with the fd."""
        return ArenaInfo(
            self.num_blocks,
            self.block_bytes,
            self.arena_bytes,
            layout_fingerprint,
            self.nonce,
            self.kind,
            self.memory_bytes,
            self.device_uuid,
            not self.nonce_written,
        )

    @abstractmethod
    def fileno(self) -> int:
        """The fd to hand over. The arena keeps owning it; ValueError after `close`."""

    @abstractmethod
    def poison(self, blocks: NDArray[np.signedinteger]) -> None:
        """Fill freed `blocks` (integers [n], ids 1..num_blocks) with NaN of every element type. A test knob alone."""

    @abstractmethod
    def close(self) -> None:
        """Let the memory go; peers that mapped it keep theirs. Harmless when repeated."""


def check_sizes(num_blocks: int, block_bytes: int, nonce: bytes) -> None:
    """Raises ValueError that names what is impossible."""
    if num_blocks < 1:
        raise ValueError(f"num_blocks is {num_blocks}; allowed is 1 and more")
    if block_bytes < NONCE_BYTES:
        raise ValueError(f"block_bytes is {block_bytes}; allowed is {NONCE_BYTES} and more")
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"the nonce has {len(nonce)} bytes; it needs {NONCE_BYTES}")
