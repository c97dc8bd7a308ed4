"""CudaArena: an arena in GPU memory, as a file descriptor of the CUDA driver.

Invariant: the memory is created exportable, never mapped and never reached here, so that this process needs no CUDA
context; the fd keeps it alive, here and in each process that has a copy, whoever else dies. Its nonce is written by
the first decoder that maps it (`nonce_written`). The calls that are made (`cuInit`, `cuMemGetAllocationGranularity`,
`cuMemCreate`, `cuMemExportToShareableHandle`, `cuMemImportFromShareableHandle`, `cuMemRelease`) name their device
themselves and none of them returns CUDA_ERROR_INVALID_CONTEXT by the driver's documentation.
"""

from __future__ import annotations

import contextlib
import os

from cachemgr.arena.base import Arena, check_sizes
from common.arena_frames import ArenaKind
from common.arena_sizes import ArenaSizes
from common.cuda_driver import CudaError, Gpu
from common.errors import FailedPrecondition


class CudaArena(Arena):
    """`sizes.arena_bytes` bytes of the GPU's memory, rounded up to its granularity.

    Raises ValueError on an impossible size, FailedPrecondition where the device cannot export its memory, CudaError
    where the driver refuses a call; nothing is left allocated then.
    """

    kind = ArenaKind.CUDA

    def __init__(self, gpu: Gpu, sizes: ArenaSizes, *, nonce: bytes) -> None:
        check_sizes(sizes, nonce)
        self.sizes, self.nonce = sizes, nonce
        self.device_uuid = gpu.uuid
        self.nonce_written = False
        self._fd, self._memory_bytes = export_fresh(gpu, self.arena_bytes)

    @classmethod
    def adopt(cls, gpu: Gpu, fd: int, sizes: ArenaSizes, *, nonce: bytes) -> CudaArena:
        """The arena behind an fd that a peer has handed back; `fd` is ours to close from now on, whatever happens.

        Raises ValueError where the driver knows it for no memory that can be imported. That it is the very memory, the
        nonce says: to the decoder that handed it back, and to each one that maps it from now on.
        """
        arena = cls.__new__(cls)
        arena.sizes, arena.nonce, arena._fd = sizes, nonce, fd
        arena.device_uuid, arena.nonce_written = gpu.uuid, True
        try:
            arena._memory_bytes = gpu.rounded(arena.arena_bytes)
            check_import(gpu, fd)
        except (CudaError, OSError) as error:
            arena.close()
            raise ValueError(f"the memory that was handed back is not the arena: {error}") from error
        return arena

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    def fileno(self) -> int:
        if self._fd < 0:
            raise ValueError("the arena is closed")
        return self._fd

    def _fill(self, offset: int, num_bytes: int) -> None:
        raise ValueError("the cache manager cannot write GPU memory: there is no poison_on_free with --device cuda")

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def export_fresh(gpu: Gpu, num_bytes: int) -> tuple[int, int]:
    """Fresh memory of the GPU for `num_bytes` bytes: its fd, the caller's, and its size, a multiple of the granularity.

    Raises FailedPrecondition where the device cannot export its memory, CudaError where the driver refuses a call;
    nothing is left allocated then.
    """
    driver = gpu.driver
    if not driver.can_export(gpu.ordinal):
        raise FailedPrecondition(
            f"{gpu.name} cannot share memory by file descriptor; --arena-handles ipc takes the older way",
            reason="GPU_NO_EXPORT",
        )
    memory_bytes = gpu.rounded(num_bytes)
    handle = driver.create(gpu.ordinal, memory_bytes)
    fd = -1
    try:
        try:
            fd = driver.export_fd(handle)
            os.set_inheritable(fd, False)
        finally:
            driver.release(handle)  # the fd holds the memory from here on; without one, nothing does
    except CudaError:
        if fd >= 0:
            os.close(fd)
        raise
    return fd, memory_bytes


def check_import(gpu: Gpu, fd: int) -> None:
    """Raises CudaError or OSError where the driver knows `fd`, which stays the caller's, for no memory of its own."""
    gpu.driver.release(gpu.driver.import_fd(fd))
    os.set_inheritable(fd, False)
