"""The CUDA driver through NVIDIA's `cuda-bindings`. Imported only where a GPU was asked for (`cuda_driver.py`).

Each method is one call of the driver API, or the few that belong together; the class keeps nothing but the primary
contexts that it retained. It has no rules of its own: order and lifetimes are its callers'. Results are named, never
numbered; no error text holds an address or a handle.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from common.cuda_driver import IPC_HANDLE_BYTES, CudaError
from common.errors import FailedPrecondition


class BindingsDriver:
    """A `CudaDriver`. Raises FailedPrecondition where the package or the driver is missing."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise FailedPrecondition(
                "a GPU needs the package cuda-bindings: pip install -c constraints.txt -e '.[gpu]'",
                reason="NO_CUDA_BINDINGS",
            ) from error
        self._cuda: Any = driver
        self._contexts: dict[int, Any] = {}
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # the bindings' own words for a driver library that is not there
            raise FailedPrecondition("the NVIDIA driver is not installed here", reason="NO_CUDA_DRIVER") from error
        except CudaError as error:
            raise FailedPrecondition(f"the NVIDIA driver does not start: {error}", reason="NO_CUDA_DRIVER") from error

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._cuda, name)(*arguments)
        if result != self._cuda.CUresult.CUDA_SUCCESS:
            raise CudaError(name, getattr(result, "name", f"error {int(result)}"))
        return values[0] if values else None

    # ---- devices

    def device_uuids(self) -> list[bytes]:
        # With MIG the second form gives the instance's UUID; newer bindings have it under the first name.
        name = "cuDeviceGetUuid_v2" if hasattr(self._cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        count = self._call("cuDeviceGetCount")
        return [bytes(self._call(name, self._call("cuDeviceGet", index)).bytes) for index in range(count)]

    def _attribute(self, ordinal: int, name: str) -> int:
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return 0 if attribute is None else int(self._call("cuDeviceGetAttribute", attribute, ordinal))

    def can_export(self, ordinal: int) -> bool:
        names = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
        return all(self._attribute(ordinal, name) for name in names)

    def uses_mps(self, ordinal: int) -> bool:
        return bool(self._attribute(ordinal, "MPS_ENABLED"))

    def total_bytes(self, ordinal: int) -> int:
        return int(self._call("cuDeviceTotalMem", self._call("cuDeviceGet", ordinal)))

    # ---- shared memory

    def _properties(self, ordinal: int) -> Any:
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        properties.requestedHandleTypes = self._handle_type
        return properties

    @property
    def _handle_type(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def granularity(self, ordinal: int) -> int:
        smallest = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties(ordinal), smallest))

    def create(self, ordinal: int, num_bytes: int) -> int:
        return int(self._call("cuMemCreate", num_bytes, self._properties(ordinal), 0))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export_fd(self, handle: int) -> int:
        return int(self._call("cuMemExportToShareableHandle", handle, self._handle_type, 0))

    def import_fd(self, fd: int) -> int:
        return int(self._call("cuMemImportFromShareableHandle", fd, self._handle_type))

    def reserve(self, num_bytes: int) -> int:
        return int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def free_address(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)

    def set_access(self, address: int, num_bytes: int, ordinal: int, *, writable: bool) -> None:
        flags = self._cuda.CUmemAccess_flags
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self._call("cuMemSetAccess", address, num_bytes, [access], 1)

    # ---- what needs a context

    def use_device(self, ordinal: int) -> None:
        if ordinal not in self._contexts:
            # Never released: it is the one that torch uses, and it ends with the process.
            self._contexts[ordinal] = self._call("cuDevicePrimaryCtxRetain", ordinal)
        self._call("cuCtxSetCurrent", self._contexts[ordinal])

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def read(self, address: int, num_bytes: int) -> bytes:
        data = ctypes.create_string_buffer(num_bytes)
        self._call("cuMemcpyDtoH", ctypes.addressof(data), address, num_bytes)
        return data.raw

    def write(self, address: int, data: bytes) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        self._call("cuMemcpyHtoD", address, ctypes.addressof(source), len(data))

    def fill(self, address: int, num_bytes: int, value: int) -> None:
        self._call("cuMemsetD8", address, value, num_bytes)

    # ---- the older way to share

    def allocate(self, num_bytes: int) -> int:
        return int(self._call("cuMemAlloc", num_bytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def ipc_handle(self, address: int) -> bytes:
        handle = self._call("cuIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_BYTES)

    def open_ipc(self, handle: bytes) -> int:
        wanted = self._cuda.CUipcMemHandle()
        ctypes.memmove(wanted.getPtr(), handle, IPC_HANDLE_BYTES)
        lazy = self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        try:
            return int(self._call("cuIpcOpenMemHandle", wanted, int(lazy)))
        finally:
            with contextlib.suppress(ValueError):
                ctypes.memset(wanted.getPtr(), 0, IPC_HANDLE_BYTES)

    def close_ipc(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)
