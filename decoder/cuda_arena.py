"""The arena in GPU memory as the decoder sees it: the fd of the daemon, imported, mapped and checked.

Invariant: an array comes out of here only if kind, GPU and size are those of the reply and the nonce was read back
through the mapping; of fresh memory this process wrote it first, and said so. Called by `arena_view.py`.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from typing import Any

import torch

from common.arena_frames import ArenaInfo, ArenaKind
from common.cuda_driver import IPC_HANDLE_BYTES, CudaError, Gpu
from common.devices import gpu_name
from common.errors import FailedPrecondition
from common.layout import NONCE_BYTES, KvDtype, KvLayout
from decoder.cuda_mapping import CudaMapping, map_fd, open_ipc
from decoder.grouped_arena import GroupedArena

_TORCH_TYPES = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
}
Wrap = Callable[[CudaMapping], torch.Tensor]


def wrap_tensor(mapping: CudaMapping) -> torch.Tensor:
    """uint8 [num_bytes] over the mapping, without a copy; it keeps the mapping alive."""
    return torch.as_tensor(mapping, device=f"cuda:{mapping.gpu.ordinal}")


def check_device(info: ArenaInfo, gpu: Gpu | None) -> None:
    """Raises FailedPrecondition where the memory lies elsewhere than this decoder computes."""
    have = gpu_name(info.device_uuid) if info.kind is not ArenaKind.HOST else "host memory"
    want = "host memory" if gpu is None else gpu.name
    if have != want:
        raise FailedPrecondition(
            f"the arena is in {have}, this decoder computes in {want}: give both processes the same --device",
            reason="DEVICE_MISMATCH",
            metadata={"want": want, "have": have},
        )


def map_cuda(fd: int, info: ArenaInfo, gpu: Gpu, *, writable: bool = True) -> CudaMapping:
    """The memory behind `fd`, which stays the caller's, with its nonce in place.

    Raises FailedPrecondition: ARENA_SIZE, ARENA_MAP (with the driver's call and result), ARENA_NONCE. Nothing stays
    mapped then.
    """
    try:
        _check_size(info, gpu)
        if info.kind is ArenaKind.CUDA_IPC:
            mapping = open_ipc(gpu, os.pread(fd, IPC_HANDLE_BYTES, 0), info.memory_bytes)
        else:
            mapping = map_fd(gpu, fd, info.memory_bytes, writable=writable)
    except (CudaError, OSError) as error:
        raise _cannot_map(error) from None
    try:
        if info.nonce_wanted:
            mapping.write(info.nonce)
        found = mapping.read(NONCE_BYTES)
    except CudaError as error:
        mapping.close()
        raise _cannot_map(error) from None
    if not hmac.compare_digest(found, info.nonce):
        mapping.close()
        raise FailedPrecondition("the mapped memory is not the daemon's arena: its nonce differs", reason="ARENA_NONCE")
    return mapping


def arena_tensor(mapping: CudaMapping, layout: KvLayout, num_blocks: int, wrap: Wrap = wrap_tensor) -> Any:
    """[num_blocks + 1, ...] over the mapping, as `KvLayout.array_shape` has it: the layout's type, or bytes. With
    groups a GroupedArena, its window blocks as those of `KvLayout.window_group`."""
    sizes, memory = layout.sizes(num_blocks), wrap(mapping)
    blocks = _shaped(memory[: sizes.blocks_bytes], layout)
    if not layout.grouped:
        return blocks
    return GroupedArena.over(blocks, _shaped(memory[sizes.window_offset : sizes.arena_bytes], layout.window_group))


def _shaped(memory: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    dtype = torch.uint8 if layout.quantized else _TORCH_TYPES[layout.dtype]
    shaped: Any = memory.view(dtype).view(-1, *layout.array_shape)
    tensor: torch.Tensor = shaped
    return tensor


def _check_size(info: ArenaInfo, gpu: Gpu) -> None:
    exact = info.kind is ArenaKind.CUDA_IPC
    wanted = info.arena_bytes if exact else gpu.rounded(info.arena_bytes)
    if info.memory_bytes != wanted:
        raise FailedPrecondition(
            f"the arena has {info.memory_bytes} bytes of GPU memory; {info.arena_bytes} bytes of blocks need {wanted}",
            reason="ARENA_SIZE",
        )


def _cannot_map(error: Exception) -> FailedPrecondition:
    # An OSError's own words could hold a path.
    why = str(error) if isinstance(error, CudaError) else "its handle cannot be read"
    return FailedPrecondition(f"the arena cannot be mapped: {why}", reason="ARENA_MAP")
