"""CudaIpcArena: GPU memory shared by the older IPC handle, for drivers and containers that refuse to export an fd.

It costs what `CudaArena` avoids: this process has a CUDA context, and the memory ends with it, so nobody can adopt it
(a decoder whose daemon dies begins anew). The 64 bytes of the handle are a secret: whoever has them can map the memory.
They exist in a sealed memfd alone, which goes the way of every arena's fd, and in no log, repr or error.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from cachemgr.arena.base import Arena, check_sizes
from common.arena_frames import ArenaKind
from common.arena_sizes import ArenaSizes
from common.cuda_driver import CudaError, Gpu
from common.logs import get_logger

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class CudaIpcArena(Arena):
    """`sizes.arena_bytes` bytes of the GPU's memory, its nonce written.

    Raises ValueError on an impossible size, CudaError where the driver refuses a call, OSError where the system refuses
    the memory file; nothing is left allocated then.
    """

    kind = ArenaKind.CUDA_IPC

    def __init__(self, gpu: Gpu, sizes: ArenaSizes, *, nonce: bytes) -> None:
        check_sizes(sizes, nonce)
        self.sizes, self.nonce = sizes, nonce
        self.device_uuid = gpu.uuid
        self._gpu = gpu
        self._address = 0
        self._fd = -1
        gpu.driver.use_device(gpu.ordinal)
        self._address = gpu.driver.allocate(self.arena_bytes)
        try:
            gpu.driver.write(self._address, nonce)
            self._fd = os.memfd_create("tessera-arena-handle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.write(self._fd, gpu.driver.ipc_handle(self._address))
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except (CudaError, OSError):
            self.close()
            raise

    def fileno(self) -> int:
        if self._fd < 0:
            raise ValueError("the arena is closed")
        return self._fd

    def _fill(self, offset: int, num_bytes: int) -> None:
        self._gpu.driver.use_device(self._gpu.ordinal)
        self._gpu.driver.fill(self._address + offset, num_bytes, 0xFF)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
        address, self._address = self._address, 0
        if address:
            try:
                self._gpu.driver.free(address)
            except CudaError as error:
                get_logger().warning("cuda_cleanup_failed", call=error.call, result=error.result)
