"""Memory for one model's weights, behind a file descriptor: a memfd, or memory of one GPU. One process fills it.

Invariant: until `seal` the fd lets its holder write, after it `fileno` is for reading alone. A memfd is sealed, so that
nobody can write any more, whatever it has open; the driver has no seal: readers of GPU memory map it for reading, as
they promise. This process never maps it. Made by `WeightsPlace`, held by the store.
"""

from __future__ import annotations

import fcntl
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

from cachemgr.arena.cuda import check_import, export_fresh
from cachemgr.arena.maker import ArenaPlace
from common.arena_frames import ArenaKind
from common.cuda_driver import CudaError, Gpu
from common.devices import NO_DEVICE
from common.errors import FailedPrecondition
from common.memory import machine_bytes

_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_READ_SEALS: Final = _SIZE_SEALS | fcntl.F_SEAL_WRITE


class WeightsMemory(ABC):
    """`memory_bytes` bytes."""

    kind: ArenaKind = ArenaKind.HOST
    device_uuid: bytes = NO_DEVICE
    memory_bytes: int
    _fd: int

    def fileno(self) -> int:
        """The fd to hand over. The memory keeps owning it; ValueError after `close`."""
        if self._fd < 0:
            raise ValueError("the memory of weights is closed")
        return self._fd

    @abstractmethod
    def seal(self) -> None:
        """From now on it is read alone. Raises ValueError where a process could still write."""

    def close(self) -> None:
        """Let it go; processes that mapped it keep theirs. Harmless when repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class HostWeights(WeightsMemory):
    """A memfd that cannot be resized, fresh or adopted."""

    def __init__(self, num_bytes: int) -> None:
        self.memory_bytes = num_bytes
        self._fd = os.memfd_create("tessera-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, num_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        except OSError:
            self.close()
            raise

    @classmethod
    def adopt(cls, fd: int, num_bytes: int) -> HostWeights:
        """What a process hands back; `fd` is ours from now on. Raises ValueError where it is not such a memory."""
        memory = cls.__new__(cls)
        memory.memory_bytes, memory._fd = num_bytes, fd
        try:
            seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
            fits = seals & _READ_SEALS == _READ_SEALS and size == num_bytes
            readable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        except OSError:
            fits = readable = False
        if not (fits and readable):
            memory.close()
            raise ValueError("what was handed back is no sealed memory of weights of that size")
        return memory

    def seal(self) -> None:
        """The kernel refuses it while anybody has a mapping to write."""
        fd = self.fileno()
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
            reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"the weights can still be written: {error.strerror}") from error
        self._fd = reading
        os.close(fd)


class CudaWeights(WeightsMemory):
    """Memory of a GPU, exportable from its creation. What `export_fresh` raises; ValueError in `adopt`."""

    kind = ArenaKind.CUDA

    def __init__(self, gpu: Gpu, num_bytes: int) -> None:
        self.device_uuid = gpu.uuid
        self._fd, self.memory_bytes = export_fresh(gpu, num_bytes)

    @classmethod
    def adopt(cls, gpu: Gpu, fd: int, num_bytes: int) -> CudaWeights:
        """What a process hands back; `fd` is ours from now on. That it is the very memory, its header says to each
        process that maps it."""
        memory = cls.__new__(cls)
        memory.device_uuid, memory._fd = gpu.uuid, fd
        try:
            memory.memory_bytes = gpu.rounded(num_bytes)
            check_import(gpu, fd)
        except (CudaError, OSError) as error:
            memory.close()
            raise ValueError(f"what was handed back is no memory of the GPU: {error}") from error
        return memory

    def seal(self) -> None:
        """Nothing that the driver has."""


@dataclass(frozen=True, slots=True)
class WeightsPlace:
    """Where this daemon's weights lie: where its arena does."""

    arena: ArenaPlace

    @property
    def capacity(self) -> int:
        """All bytes of the machine or of the GPU. Raises CudaError."""
        gpu = self.arena.gpu
        return machine_bytes() if gpu is None else gpu.driver.total_bytes(gpu.ordinal)

    def size_of(self, num_bytes: int) -> int:
        """Bytes of the memory for `num_bytes` bytes of weights. Raises CudaError."""
        return num_bytes if self.arena.gpu is None else self.arena.gpu.rounded(num_bytes)

    def make(self, num_bytes: int) -> WeightsMemory:
        """Fresh memory. Raises OSError or CudaError where it is refused, FailedPrecondition where none is shared."""
        if self.arena.gpu is None:
            return HostWeights(num_bytes)
        if self.arena.ipc:
            raise FailedPrecondition("--arena-handles ipc shares no weights", reason="WEIGHTS_NOT_SHARED")
        return CudaWeights(self.arena.gpu, num_bytes)

    def adopt(self, fd: int, num_bytes: int) -> WeightsMemory:
        """What a process hands back; `fd` is ours from now on. Raises ValueError where it does not fit."""
        gpu = self.arena.gpu
        return HostWeights.adopt(fd, num_bytes) if gpu is None else CudaWeights.adopt(gpu, fd, num_bytes)
