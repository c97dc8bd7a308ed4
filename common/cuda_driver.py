"""What this node asks of a CUDA driver, as a thin protocol; what a call's refusal is; which GPU an option means.

Nothing here imports CUDA: the one real implementation (`cuda_bindings.py`) is loaded where a GPU was asked for, and
tests have one that checks the rules of the documentation. The rules that callers keep: memory to be shared asks for
its handle type when it is created; sizes are multiples of the granularity; reserve, map, set access, and back in the
order unmap, release, free address. `create`, `export_fd`, `import_fd` and `release` need no context, so the cache
manager has none. Addresses and handles are numbers of one process and never leave it, nor are they logged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from common.devices import AUTO, CPU, gpu_name, gpu_uuid
from common.errors import FailedPrecondition

IPC_HANDLE_BYTES: Final = 64


class CudaError(Exception):
    """The driver refused `call` with `result`, both by the names of the documentation."""

    def __init__(self, call: str, result: str) -> None:
        super().__init__(f"{call}: {result}")
        self.call = call
        self.result = result


class CudaDriver(Protocol):
    """The calls of one process. Each raises CudaError where the driver refuses; sizes in bytes."""

    def device_uuids(self) -> list[bytes]:
        """UUID (16 bytes) of each device that this process sees, by ordinal."""

    def can_export(self, ordinal: int) -> bool:
        """Whether memory of the device can be shared by file descriptor."""

    def uses_mps(self, ordinal: int) -> bool:
        """Whether contexts of the device are shared through the Multi-Process Service."""

    def total_bytes(self, ordinal: int) -> int:
        """All memory of the device. Needs no context; what of it is free, only a context is told."""

    def granularity(self, ordinal: int) -> int:
        """What sizes of memory and of mappings are multiples of."""

    def create(self, ordinal: int, num_bytes: int) -> int:
        """Physical memory that can be exported as a file descriptor; its handle. Nothing is mapped."""

    def release(self, handle: int) -> None:
        """Give a handle of `create` or `import_fd` back, once. The memory lives while fds or mappings of it do."""

    def export_fd(self, handle: int) -> int:
        """A file descriptor that keeps the memory alive and can be imported by other processes; the caller's."""

    def import_fd(self, fd: int) -> int:
        """A handle of the memory behind `fd`, which stays the caller's."""

    def reserve(self, num_bytes: int) -> int:
        """A range of addresses with nothing behind it."""

    def free_address(self, address: int, num_bytes: int) -> None:
        """Give a range of `reserve` back, whole and unmapped."""

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Put memory behind a reserved range. It cannot be reached before `set_access`."""

    def unmap(self, address: int, num_bytes: int) -> None:
        """Take it away, whole."""

    def set_access(self, address: int, num_bytes: int, ordinal: int, *, writable: bool) -> None:
        """Let the device read, or read and write, a mapped range."""

    def use_device(self, ordinal: int) -> None:
        """Make the device's primary context the calling thread's."""

    def synchronize(self) -> None:
        """Wait for all work of the calling thread's context."""

    def read(self, address: int, num_bytes: int) -> bytes:
        """Bytes of device memory. Needs a context."""

    def write(self, address: int, data: bytes) -> None:
        """Set bytes of device memory. Needs a context."""

    def fill(self, address: int, num_bytes: int, value: int) -> None:
        """Set each byte of a range to `value`. Needs a context."""

    def allocate(self, num_bytes: int) -> int:
        """Memory of the older kind: address and memory in one. Needs a context."""

    def free(self, address: int) -> None:
        """Free what `allocate` gave, once."""

    def ipc_handle(self, address: int) -> bytes:
        """The 64 bytes by which another process opens what `allocate` gave. A secret: whoever has them, has it."""

    def open_ipc(self, handle: bytes) -> int:
        """The address of another process's memory in this one. Needs a context. Not for the process that made it."""

    def close_ipc(self, address: int) -> None:
        """Give an address of `open_ipc` back, once, before its owner frees it."""


LoadDriver = Callable[[], CudaDriver]


def load_bindings() -> CudaDriver:
    """The real driver. Raises FailedPrecondition where bindings or driver are missing."""
    from common.cuda_bindings import BindingsDriver

    return BindingsDriver()


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of this process: the driver, its number here, and the UUID by which every process knows it."""

    driver: CudaDriver = field(repr=False)
    ordinal: int
    uuid: bytes

    @property
    def name(self) -> str:
        """As `nvidia-smi -L` prints it."""
        return gpu_name(self.uuid)

    def rounded(self, num_bytes: int) -> int:
        """`num_bytes` up to the next multiple of the granularity."""
        step = self.driver.granularity(self.ordinal)
        return -(-num_bytes // step) * step


def open_gpu(device: str, load: LoadDriver = load_bindings) -> Gpu | None:
    """The GPU that the option `device` means (a value of `parse_device`); None where it means the CPU.

    `cuda` and `auto` mean the one GPU that this process sees. Raises FailedPrecondition, with the UUIDs that there are,
    where there is none or another one, or several and none is named; `auto` is the CPU where there is no driver or GPU.
    """
    if device == CPU:
        return None
    try:
        driver = load()
        uuids = driver.device_uuids()
    except (FailedPrecondition, CudaError) as error:
        if device == AUTO:
            return None
        if isinstance(error, FailedPrecondition):
            raise
        raise FailedPrecondition(f"--device {device}: {error}", reason="NO_GPU") from error
    if device == AUTO and not uuids:
        return None
    wanted = gpu_uuid(device)
    if wanted is None and len(uuids) == 1:
        wanted = uuids[0]
    if wanted is None or wanted not in uuids:
        seen = ", ".join(f"cuda:{gpu_name(uuid)}" for uuid in uuids) or "none"
        raise FailedPrecondition(
            f"--device {device}: it must name one of the GPUs that this process sees: {seen}", reason="NO_GPU"
        )
    return Gpu(driver, uuids.index(wanted), wanted)
