"""A recorder that stands in for a CUDA driver. It is NOT a driver, and passing its tests is not running on a GPU.

It checks the rules that NVIDIA's documentation of the driver API states for each call (raising `BrokenRule`, which
nothing catches), can refuse the n-th call, and keeps books of what is open. Memory is a memfd and addresses are real
ones, so that two processes share bytes through the same calls, an address that is not mapped is no memory, and a
mapping for reading alone faults on a write. What it cannot show: what the real driver does, and what a GPU does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass, field
from typing import Any, Final

from common.cuda_driver import IPC_HANDLE_BYTES, CudaError, Gpu

GRANULARITY: Final = 1 << 21
UUID: Final = bytes.fromhex("0a1b2c3d00001111222233334444555f")
OTHER_UUID: Final = bytes.fromhex("ffffffff00001111222233334444555f")
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class BrokenRule(AssertionError):
    """A caller did what the documentation forbids or leaves undefined."""


@dataclass
class _Range:
    num_bytes: int
    handle: int = 0  # mapped memory
    access: str = ""  # "", "r", "rw"


@dataclass
class Recorder:
    """A `CudaDriver` of one process.

    fail_call:  the number of the call (from 1) that is refused, with `fail_with`; 0: none
    exportable: what `can_export` says
    granularity_bytes: what sizes must be multiples of
    memory: bytes of the device; what is created beyond them, less those that others have taken, is refused
    """

    uuids: tuple[bytes, ...] = (UUID,)
    exportable: bool = True
    mps: bool = False
    granularity_bytes: int = GRANULARITY
    memory: int = 1 << 40
    memory_taken: int = 0
    fail_call: int = 0
    fail_with: str = "CUDA_ERROR_UNKNOWN"
    calls: list[str] = field(default_factory=list)
    context: int | None = None
    _handles: dict[int, int] = field(default_factory=dict)  # handle -> memfd
    _exportable: set[int] = field(default_factory=set)
    _ranges: dict[int, _Range] = field(default_factory=dict)
    _allocated: dict[int, tuple[int, int]] = field(default_factory=dict)  # address -> memfd, bytes
    _opened: dict[int, int] = field(default_factory=dict)  # address of open_ipc -> bytes
    _next: int = 100

    # ---- what tests ask

    def leaks(self) -> dict[str, int]:
        """What is open, by kind; empty where everything was given back."""
        counts = {
            "handles": len(self._handles),
            "ranges": len(self._ranges),
            "mappings": sum(1 for it in self._ranges.values() if it.handle),
            "allocations": len(self._allocated),
            "opened": len(self._opened),
        }
        return {kind: count for kind, count in counts.items() if count}

    def _enter(self, name: str, needs_context: bool = False) -> None:
        if needs_context and self.context is None:
            raise BrokenRule(f"{name} without a current context")
        self.calls.append(name)
        if len(self.calls) == self.fail_call:
            raise CudaError(name, self.fail_with)

    def _rule(self, holds: bool, text: str) -> None:
        if not holds:
            raise BrokenRule(text)

    def _number(self) -> int:
        self._next += 1
        return self._next

    # ---- devices

    def device_uuids(self) -> list[bytes]:
        self._enter("cuDeviceGetUuid")
        return list(self.uuids)

    def can_export(self, ordinal: int) -> bool:
        self._enter("cuDeviceGetAttribute")
        return self.exportable

    def uses_mps(self, ordinal: int) -> bool:
        self._enter("cuDeviceGetAttribute")
        return self.mps

    def total_bytes(self, ordinal: int) -> int:
        self._enter("cuDeviceTotalMem")
        return self.memory

    def granularity(self, ordinal: int) -> int:
        self._enter("cuMemGetAllocationGranularity")
        return self.granularity_bytes

    # ---- shared memory

    def create(self, ordinal: int, num_bytes: int) -> int:
        self._enter("cuMemCreate")
        self._rule(0 <= ordinal < len(self.uuids), "cuMemCreate of a device that is not there")
        self._rule(num_bytes > 0 and num_bytes % self.granularity_bytes == 0, "cuMemCreate: size off the granularity")
        if num_bytes > self.memory - self.memory_taken:
            raise CudaError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")
        fd = os.memfd_create("not-gpu-memory", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        handle = self._number()
        self._handles[handle] = fd
        self._exportable.add(handle)  # the protocol's `create` is of exportable memory alone
        return handle

    def release(self, handle: int) -> None:
        self._enter("cuMemRelease")
        self._rule(handle in self._handles, "cuMemRelease of a handle that is none, or not any more")
        os.close(self._handles.pop(handle))
        self._exportable.discard(handle)

    def export_fd(self, handle: int) -> int:
        self._enter("cuMemExportToShareableHandle")
        self._rule(handle in self._handles, "cuMemExportToShareableHandle of no handle")
        self._rule(handle in self._exportable, "export of memory whose handle type was not asked for at its creation")
        return os.dup(self._handles[handle])

    def import_fd(self, fd: int) -> int:
        self._enter("cuMemImportFromShareableHandle")
        try:
            is_memory = os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:not-gpu-memory")
        except OSError:
            is_memory = False
        if not is_memory:
            raise CudaError("cuMemImportFromShareableHandle", "CUDA_ERROR_INVALID_VALUE")
        handle = self._number()
        self._handles[handle] = os.dup(fd)
        return handle

    def reserve(self, num_bytes: int) -> int:
        self._enter("cuMemAddressReserve")
        self._rule(num_bytes > 0 and num_bytes % self.granularity_bytes == 0, "cuMemAddressReserve: size")
        address = _map(None, num_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._ranges[address] = _Range(num_bytes)
        return address

    def free_address(self, address: int, num_bytes: int) -> None:
        self._enter("cuMemAddressFree")
        found = self._range(address, num_bytes, "cuMemAddressFree")
        self._rule(not found.handle, "cuMemAddressFree of a range that is mapped")
        _libc.munmap(address, num_bytes)
        del self._ranges[address]

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._enter("cuMemMap")
        found = self._range(address, num_bytes, "cuMemMap")
        self._rule(not found.handle, "cuMemMap over a mapping")
        self._rule(handle in self._handles, "cuMemMap of no handle, or a released one")
        if num_bytes > os.fstat(self._handles[handle]).st_size:
            raise CudaError("cuMemMap", "CUDA_ERROR_INVALID_VALUE")
        _map(address, num_bytes, _PROT_NONE, mmap.MAP_SHARED | _MAP_FIXED, self._handles[handle])
        found.handle = handle

    def unmap(self, address: int, num_bytes: int) -> None:
        self._enter("cuMemUnmap")
        found = self._range(address, num_bytes, "cuMemUnmap")
        self._rule(bool(found.handle), "cuMemUnmap of a range that is not mapped")
        # Stricter than the documentation, which lets a handle go while it is mapped: the order we chose.
        self._rule(found.handle in self._handles, "the handle was released before its mapping")
        _map(address, num_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)
        found.handle, found.access = 0, ""

    def set_access(self, address: int, num_bytes: int, ordinal: int, *, writable: bool) -> None:
        self._enter("cuMemSetAccess")
        found = self._range(address, num_bytes, "cuMemSetAccess")
        self._rule(bool(found.handle), "cuMemSetAccess of a range that is not mapped")
        _libc.mprotect(address, num_bytes, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        found.access = "rw" if writable else "r"

    def _range(self, address: int, num_bytes: int, call: str) -> _Range:
        found = self._ranges.get(address)
        self._rule(found is not None, f"{call} of a range that is not reserved, or not any more")
        assert found is not None
        self._rule(found.num_bytes == num_bytes, f"{call} of a part of a range")
        return found

    # ---- what needs a context

    def use_device(self, ordinal: int) -> None:
        self._enter("cuCtxSetCurrent")
        self.context = ordinal

    def synchronize(self) -> None:
        self._enter("cuCtxSynchronize", needs_context=True)

    def read(self, address: int, num_bytes: int) -> bytes:
        self._enter("cuMemcpyDtoH", needs_context=True)
        self._reachable(address, num_bytes, "r")
        return ctypes.string_at(address, num_bytes)

    def write(self, address: int, data: bytes) -> None:
        self._enter("cuMemcpyHtoD", needs_context=True)
        self._reachable(address, len(data), "rw")
        ctypes.memmove(address, data, len(data))

    def fill(self, address: int, num_bytes: int, value: int) -> None:
        self._enter("cuMemsetD8", needs_context=True)
        self._reachable(address, num_bytes, "rw")
        ctypes.memset(address, value, num_bytes)

    def _reachable(self, address: int, num_bytes: int, access: str) -> None:
        ranges = [(start, it.num_bytes, it.access) for start, it in self._ranges.items()]
        ranges += [(start, size, "rw") for start, (_, size) in self._allocated.items()]
        ranges += [(start, size, "rw") for start, size in self._opened.items()]
        reached = any(
            start <= address and address + num_bytes <= start + size and have.startswith(access)
            for start, size, have in ranges
        )
        self._rule(reached, "access to memory that is not mapped for it")

    # ---- the older way: the handle names a memfd of the process that made it

    def allocate(self, num_bytes: int) -> int:
        self._enter("cuMemAlloc", needs_context=True)
        fd = os.memfd_create("not-gpu-memory-ipc", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        address = _map(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
        self._allocated[address] = (fd, num_bytes)
        return address

    def free(self, address: int) -> None:
        self._enter("cuMemFree")
        self._rule(address in self._allocated, "cuMemFree of no allocation, or twice")
        fd, num_bytes = self._allocated.pop(address)
        os.close(fd)
        _libc.munmap(address, num_bytes)

    def ipc_handle(self, address: int) -> bytes:
        self._enter("cuIpcGetMemHandle", needs_context=True)
        self._rule(address in self._allocated, "cuIpcGetMemHandle of no allocation of cuMemAlloc")
        return f"SECRET/{os.getpid()}/{self._allocated[address][0]}/".encode().ljust(IPC_HANDLE_BYTES, b"\0")

    def open_ipc(self, handle: bytes) -> int:
        self._enter("cuIpcOpenMemHandle", needs_context=True)
        self._rule(len(handle) == IPC_HANDLE_BYTES, "cuIpcOpenMemHandle of another length")
        _, process, number, _ = handle.split(b"/")
        self._rule(int(process) != os.getpid(), "cuIpcOpenMemHandle in the process that made it")
        try:
            fd = os.open(f"/proc/{int(process)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            raise CudaError("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_HANDLE") from None
        num_bytes = os.fstat(fd).st_size
        address = _map(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
        os.close(fd)
        self._opened[address] = num_bytes
        return address

    def close_ipc(self, address: int) -> None:
        self._enter("cuIpcCloseMemHandle", needs_context=True)
        self._rule(address in self._opened, "cuIpcCloseMemHandle of no opened address, or twice")
        _libc.munmap(address, self._opened.pop(address))


def _map(address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    found: int | None = _libc.mmap(address, num_bytes, protection, flags, fd, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return found


def gpu_of(recorder: Recorder, uuid: bytes = UUID) -> Gpu:
    """The GPU `uuid` as the process of `recorder` sees it."""
    return Gpu(recorder, recorder.uuids.index(uuid), uuid)


def host_tensor(mapping: Any) -> Any:
    """In the place of `wrap_tensor`: uint8 [num_bytes] over a recorder's mapping, which it keeps alive."""
    import torch

    memory = (ctypes.c_char * mapping.num_bytes).from_address(mapping.address)
    memory.mapping = mapping
    return torch.frombuffer(memory, dtype=torch.uint8)
