"""What an arena is: fd-shaped memory for blocks, and window blocks behind them; the daemon exports it, never maps it.

Invariant: the size is fixed for the arena's life, and the null block begins with a nonce that a peer reads back
through its own mapping; where the daemon cannot write (`nonce_written`), the first peer that maps it does. Called by
the authority (creates it), the hand-off (passes its fd on) and the poison fault knob. It knows no lease, no tenant and
no geometry beyond the sizes of blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from common.arena_frames import ArenaInfo, ArenaKind
from common.arena_sizes import ArenaSizes
from common.devices import NO_DEVICE
from common.layout import NONCE_BYTES


class Arena(ABC):
    """Memory of blocks and window blocks as `sizes` says; both null blocks come on top."""

    sizes: ArenaSizes
    nonce: bytes
    kind: ArenaKind = ArenaKind.HOST
    device_uuid: bytes = NO_DEVICE
    nonce_written: bool = True  # GPU memory: by the first decoder that maps it

    @property
    def num_blocks(self) -> int:
        """Usable blocks."""
        return self.sizes.num_blocks

    @property
    def arena_bytes(self) -> int:
        """Bytes of the whole memory, the null blocks included."""
        return self.sizes.arena_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of the memory behind the fd."""
        return self.arena_bytes

    def info(self, layout_fingerprint: bytes) -> ArenaInfo:
        """What goes with the fd."""
        return ArenaInfo(
            self.sizes.num_blocks,
            self.sizes.block_bytes,
            self.arena_bytes,
            layout_fingerprint,
            self.nonce,
            self.kind,
            self.memory_bytes,
            self.device_uuid,
            not self.nonce_written,
            self.sizes.num_window_blocks,
            self.sizes.window_block_bytes,
        )

    @abstractmethod
    def fileno(self) -> int:
        """The fd to hand over. The arena keeps owning it; ValueError after `close`."""

    @abstractmethod
    def _fill(self, offset: int, num_bytes: int) -> None:
        """Set all bits of `num_bytes` bytes at `offset`: a NaN in every element type. ValueError where it cannot."""

    def poison(self, blocks: NDArray[np.signedinteger]) -> None:
        """Fill freed `blocks` (integers [n], ids 1..num_blocks) with NaN of every element type. A test knob alone."""
        sizes = self.sizes
        for block in blocks.tolist():
            if not 1 <= block <= sizes.num_blocks:
                raise ValueError(f"block {block} is not in 1..{sizes.num_blocks}")
            self._fill(block * sizes.block_bytes, sizes.block_bytes)

    def poison_windows(self, window_blocks: NDArray[np.signedinteger]) -> None:
        """As `poison`, for window blocks (ids 1..num_window_blocks)."""
        sizes = self.sizes
        for block in window_blocks.tolist():
            if not 1 <= block <= sizes.num_window_blocks:
                raise ValueError(f"window block {block} is not in 1..{sizes.num_window_blocks}")
            self._fill(sizes.window_offset + block * sizes.window_block_bytes, sizes.window_block_bytes)

    @abstractmethod
    def close(self) -> None:
        """Let the memory go; peers that mapped it keep theirs. Harmless when repeated."""


def check_sizes(sizes: ArenaSizes, nonce: bytes) -> None:
    """Raises ValueError that names what is impossible."""
    if sizes.num_blocks < 1:
        raise ValueError(f"num_blocks is {sizes.num_blocks}; allowed is 1 and more")
    if sizes.block_bytes < NONCE_BYTES:
        raise ValueError(f"block_bytes is {sizes.block_bytes}; allowed is {NONCE_BYTES} and more")
    if sizes.num_window_blocks < 0 or (sizes.num_window_blocks > 0) != (sizes.window_block_bytes > 0):
        raise ValueError(
            f"num_window_blocks is {sizes.num_window_blocks} and window_block_bytes {sizes.window_block_bytes}; "
            "allowed is 0 and 0, or both above"
        )
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"the nonce has {len(nonce)} bytes; it needs {NONCE_BYTES}")
