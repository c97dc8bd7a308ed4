"""The names of devices as options write them: `cpu`, `cuda`, `cuda:<UUID>`, `auto`. Pure.

A GPU is chosen by its UUID, as `nvidia-smi -L` prints it, never by a number: numbers differ between processes that see
different devices. Used by the configuration and by everything that opens a device.
"""

from __future__ import annotations

import re
import uuid
from typing import Final

CPU: Final = "cpu"
CUDA: Final = "cuda"
AUTO: Final = "auto"
UUID_BYTES: Final = 16
NO_DEVICE: Final = bytes(UUID_BYTES)  # what stands for a GPU's UUID where the memory is the host's
_GPU_NAME: Final = re.compile(r"(?:GPU-)?([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})")


def parse_device(text: str) -> str:
    """`cpu`, `cuda`, `auto`, or `cuda:GPU-<uuid>` in small letters. Raises ValueError that says what is allowed."""
    kind, colon, name = text.partition(":")
    if not colon and kind in (CPU, CUDA, AUTO):
        return kind
    found = _GPU_NAME.fullmatch(name)
    if kind != CUDA or found is None:
        raise ValueError(f"{text!r} is not cpu, cuda, auto or cuda:<UUID> (nvidia-smi -L prints GPU-...)")
    return f"{CUDA}:{gpu_name(uuid.UUID(found[1]).bytes)}"


def gpu_uuid(device: str) -> bytes | None:
    """The 16 bytes of the UUID that a parsed device names; None where it names none."""
    _, _, name = device.partition(":")
    return uuid.UUID(name.removeprefix("GPU-")).bytes if name else None


def gpu_name(device_uuid: bytes) -> str:
    """A UUID of 16 bytes as `nvidia-smi -L` prints it."""
    return f"GPU-{uuid.UUID(bytes=device_uuid)}"
