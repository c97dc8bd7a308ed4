"""The arena as the decoder sees it: the daemon's memory, mapped once, as an array without a copy, or with groups two.

Invariant: an array comes out of here only if its layout, size, place and nonce are the daemon's, the nonce read back
through the mapping itself. The memory lives as long as an array of it; the fd is kept for a daemon that has lost the
memory and wants it back. Called by the cache client at each attach; it never allocates KV memory and never resizes it.
"""

from __future__ import annotations

import hmac
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.arena_frames import ArenaInfo, ArenaKind
from common.arena_sizes import ArenaSizes
from common.arena_wire import confirm_written, fetch_arena, return_arena
from common.cuda_driver import CudaError, Gpu
from common.errors import FailedPrecondition, PermissionDenied, Unavailable
from common.layout import NONCE_BYTES, KvLayout
from decoder.cache_api import Arena
from decoder.cuda_arena import Wrap, arena_tensor, check_device, map_cuda, wrap_tensor
from decoder.cuda_mapping import CudaMapping
from decoder.grouped_arena import GroupedArena


@dataclass(slots=True, eq=False)
class MappedArena:
    """`array` is [num_blocks + 1, ...] as `KvLayout.array_type` and `array_shape` say; block 0 is the null block.
    In GPU memory it is a torch tensor of the layout's own type. With groups it is a GroupedArena of two such ones."""

    array: Any
    _fd: int
    _mapping: CudaMapping | None = None
    outlives_daemon: bool = True

    def read_nonce(self) -> bytes:
        """The nonce, as it stands in the memory now. Raises FailedPrecondition where GPU memory cannot be read."""
        if self._mapping is None:
            blocks = self.array.blocks if isinstance(self.array, GroupedArena) else self.array
            return bytes(blocks[0].reshape(-1).view(np.uint8)[:NONCE_BYTES])
        try:
            return self._mapping.read(NONCE_BYTES)
        except CudaError as error:
            raise FailedPrecondition(f"the arena cannot be read: {error}", reason="ARENA_MAP") from None

    def hand_back(self, path: Path, token: bytes) -> None:
        """Give the memory to a new daemon that asked for it with `token`. Raises what `return_arena` raises."""
        return_arena(path, token, self._fd)

    def close(self) -> None:
        """Keep the fd no longer; the array stays good. Harmless when repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def map_arena(
    path: Path, token: bytes, layout: KvLayout, num_blocks: int, gpu: Gpu | None = None, wrap: Wrap = wrap_tensor
) -> MappedArena:
    """Fetch the arena with `token` and map it: memory of `gpu`, or the host's. Raises FailedPrecondition naming what
    does not fit, and what `fetch_arena` and `confirm_written` raise."""
    fd, info = fetch_arena(path, token)
    mapped = MappedArena(np.empty(0), fd)
    try:
        _check_info(info, layout, num_blocks)
        check_device(info, gpu)
        if gpu is None:
            mapped.array = _mapped(fd, info, layout)
            return mapped
        mapping = map_cuda(fd, info, gpu)
        mapped.array, mapped._mapping = arena_tensor(mapping, layout, num_blocks, wrap), mapping
        if info.nonce_wanted:
            confirm_written(path, token, info.nonce)
    except (FailedPrecondition, PermissionDenied, Unavailable):
        mapped.close()
        if mapped._mapping is not None:
            mapped._mapping.close()
        raise
    if info.kind is ArenaKind.CUDA_IPC:
        mapped.outlives_daemon = False
        mapped.close()  # what is behind it is a secret, and nothing that could be handed back
    return mapped


def _mapped(fd: int, info: ArenaInfo, layout: KvLayout) -> Arena:
    try:
        memory = mmap.mmap(fd, info.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise FailedPrecondition("the arena cannot be mapped", reason="ARENA_MAP") from error
    if not hmac.compare_digest(memory[:NONCE_BYTES], info.nonce):
        raise FailedPrecondition("the mapped memory is not the daemon's arena: its nonce differs", reason="ARENA_NONCE")
    return _arrays(np.frombuffer(memory, np.uint8), layout, info.sizes)


def _arrays(memory: NDArray[np.uint8], layout: KvLayout, sizes: ArenaSizes) -> Arena:
    """The blocks and the window blocks of an arena in `memory` (u8, its bytes)."""
    blocks = memory[: sizes.blocks_bytes].view(layout.array_type)
    array = blocks.reshape(sizes.num_blocks + 1, *layout.array_shape)
    if not layout.grouped:
        return array
    windows = memory[sizes.window_offset : sizes.arena_bytes].view(layout.array_type)
    return GroupedArena.over(array, windows.reshape(sizes.num_window_blocks + 1, *layout.window_group.array_shape))


def _check_info(info: ArenaInfo, layout: KvLayout, num_blocks: int) -> None:
    if info.layout_fingerprint != layout.fingerprint():
        raise FailedPrecondition("the arena has another KV layout than this decoder", reason="LAYOUT_MISMATCH")
    wanted = layout.sizes(num_blocks)
    if info.sizes != wanted:
        raise FailedPrecondition(f"the arena has {info.sizes}; expected are {wanted}", reason="ARENA_SIZE")
