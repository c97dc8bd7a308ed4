"""The arena as the decoder sees it: the daemon's memory, mapped once, as one numpy array without a copy.

Invariant: an array comes out of here only if its layout, size and nonce are the daemon's, the nonce read back through
the mapping itself. The memory lives as long as the array; the fd is kept for a daemon that has lost the memory and
wants it back. Called by the cache client at each attach; it never allocates KV memory and never resizes it.
"""

from __future__ import annotations

import hmac
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.arena_wire import ArenaInfo, fetch_arena, return_arena
from common.errors import FailedPrecondition
from common.layout import NONCE_BYTES, KvDtype, KvLayout
from decoder.cache_api import Arena


@dataclass(slots=True, eq=False)
class MappedArena:
    """`array` is float32, or uint16 for 2-byte types: [num_blocks + 1, layers, 2, kv_heads, block_tokens, head_dim];
    block 0 is the null block."""

    array: Arena
    _fd: int

    def hand_back(self, path: Path, token: bytes) -> None:
        """Give the memory to a new daemon that asked for it with `token`. Raises what `return_arena` raises."""
        return_arena(path, token, self._fd)

    def close(self) -> None:
        """Keep the fd no longer; the array stays good. Harmless when repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def map_arena(path: Path, token: bytes, layout: KvLayout, num_blocks: int) -> MappedArena:
    """Fetch the arena with `token` and map it. Raises FailedPrecondition naming what does not fit, and what
    `fetch_arena` raises."""
    fd, info = fetch_arena(path, token)
    mapped = MappedArena(np.empty(0), fd)
    try:
        mapped.array = _mapped(fd, info, layout, num_blocks)
    except FailedPrecondition:
        mapped.close()
        raise
    return mapped


def _mapped(fd: int, info: ArenaInfo, layout: KvLayout, num_blocks: int) -> Arena:
    _check_info(info, layout, num_blocks)
    try:
        memory = mmap.mmap(fd, info.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise FailedPrecondition("the arena cannot be mapped", reason="ARENA_MAP") from error
    if not hmac.compare_digest(memory[:NONCE_BYTES], info.nonce):
        raise FailedPrecondition("the mapped memory is not the daemon's arena: its nonce differs", reason="ARENA_NONCE")
    kind = np.float32 if layout.dtype is KvDtype.FLOAT32 else np.uint16
    return np.frombuffer(memory, kind).reshape(num_blocks + 1, *layout.block_shape)


def _check_info(info: ArenaInfo, layout: KvLayout, num_blocks: int) -> None:
    if info.layout_fingerprint != layout.fingerprint():
        raise FailedPrecondition("the arena has another KV layout than this decoder", reason="LAYOUT_MISMATCH")
    if info.num_blocks != num_blocks or info.block_bytes != layout.block_bytes:
        raise FailedPrecondition(
            f"the arena has {info.num_blocks} blocks of {info.block_bytes} bytes; "
            f"expected are {num_blocks} of {layout.block_bytes}",
            reason="ARENA_SIZE",
        )
