"""GPU memory of the daemon, mapped into this process: its addresses, for as long as anything looks at them.

Invariants: what was opened is closed once, in the order unmap, release handle, free addresses, after the GPU's work
is done; where a step of opening fails, those before it are undone and the first error is raised. A mapping lives as
long as the object; arrays over it hold it (`__cuda_array_interface__`). Called by `cuda_arena.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from common.cuda_driver import CudaError, Gpu
from common.logs import get_logger


class Undo:
    """Steps back, last first. A step's own failure is logged and hides no other error; those that were pushed as
    `clean` are left out from then on."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[[], None], bool]] = []

    def push(self, step: Callable[[], None], *, clean: bool = False) -> None:
        """What to do before all that was pushed until now."""
        self._steps.append((step, clean))

    def run(self) -> None:
        """Do it, once."""
        failed = False
        while self._steps:
            step, clean = self._steps.pop()
            if failed and clean:
                continue
            try:
                step()
            except CudaError as error:
                failed = True
                get_logger().warning("cuda_cleanup_failed", call=error.call, result=error.result)


class CudaMapping:
    """`num_bytes` bytes of GPU memory at `address`. Made by `map_fd` and `open_ipc`."""

    def __init__(self, gpu: Gpu, address: int, num_bytes: int, undo: Undo) -> None:
        self.gpu = gpu
        self.address = address
        self.num_bytes = num_bytes
        self._finalizer = weakref.finalize(self, _close, gpu, undo)
        self._finalizer.atexit = False  # the process's end frees it, and the driver may be gone by then

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # uint8 [num_bytes]. Said to be writable, since torch takes nothing else; the hardware refuses writes to a
        # mapping that is for reading alone.
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def read(self, num_bytes: int) -> bytes:
        """The first bytes, through the mapping. Raises CudaError."""
        self.gpu.driver.use_device(self.gpu.ordinal)
        return self.gpu.driver.read(self.address, num_bytes)

    def write(self, data: bytes) -> None:
        """Set the first bytes, through the mapping. Raises CudaError."""
        self.gpu.driver.use_device(self.gpu.ordinal)
        self.gpu.driver.write(self.address, data)
        self.gpu.driver.synchronize()

    def close(self) -> None:
        """Let the memory go. Nothing may look at it any more. Harmless when repeated."""
        self._finalizer()


def map_fd(gpu: Gpu, fd: int, num_bytes: int, *, writable: bool = True) -> CudaMapping:
    """Map all `num_bytes` bytes (a multiple of the granularity) of the memory behind `fd`, which stays the caller's.

    Raises CudaError, of the call that failed; nothing stays open then.
    """
    driver, undo = gpu.driver, Undo()
    driver.use_device(gpu.ordinal)
    try:
        address = driver.reserve(num_bytes)
        # Addresses with memory behind them, because an unmap failed, cannot be given back.
        undo.push(partial(driver.free_address, address, num_bytes), clean=True)
        handle = driver.import_fd(fd)
        undo.push(partial(driver.release, handle))
        driver.map(address, num_bytes, handle)
        undo.push(partial(driver.unmap, address, num_bytes))
        driver.set_access(address, num_bytes, gpu.ordinal, writable=writable)
    except CudaError:
        undo.run()
        raise
    return CudaMapping(gpu, address, num_bytes, undo)


def open_ipc(gpu: Gpu, handle: bytes, num_bytes: int) -> CudaMapping:
    """Open memory of the daemon by its IPC handle, a secret. Raises CudaError; nothing stays open then."""
    driver, undo = gpu.driver, Undo()
    driver.use_device(gpu.ordinal)
    address = driver.open_ipc(handle)
    undo.push(partial(driver.close_ipc, address))
    return CudaMapping(gpu, address, num_bytes, undo)


def _close(gpu: Gpu, undo: Undo) -> None:
    """Runs in whatever thread drops the last reference."""
    try:
        gpu.driver.use_device(gpu.ordinal)
        gpu.driver.synchronize()
    except CudaError as error:  # a context that is broken has no work left; its memory is still to be let go
        get_logger().warning("cuda_cleanup_failed", call=error.call, result=error.result)
    undo.run()
