"""What around this process changes what GPU memory does: found at the start, said once in the log. It refuses nothing.

Called by the daemon and by each decoder that was given a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from common.cuda_driver import CudaError, Gpu
from common.logs import get_logger

_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def surroundings(gpu: Gpu, environ: Mapping[str, str]) -> dict[str, str]:
    """Name of each thing found -> what it means."""
    found = {}
    try:
        shared = gpu.driver.uses_mps(gpu.ordinal)
    except CudaError:
        shared = False
    if shared:
        found["gpu_uses_mps"] = (
            "the Multi-Process Service is on: decoders share one server, so that a fault or a kill of one of them may "
            "end the others; that one decoder's death is harmless holds only without it"
        )
    for name in _ALLOCATOR_VARIABLES:
        settings = [part.strip().lower() for part in environ.get(name, "").split(",")]
        if "expandable_segments:true" in settings:
            found["gpu_expandable_segments"] = (
                f"{name} has expandable_segments:True: torch's own memory grows in place and cannot be shared by an "
                "IPC handle; the arena is not torch's and is not affected"
            )
    return found


def report_surroundings(gpu: Gpu, environ: Mapping[str, str]) -> None:
    """Log what was found, as warnings, and the GPU that was chosen."""
    log = get_logger()
    log.info("gpu_chosen", gpu=gpu.name)
    for event, meaning in surroundings(gpu, environ).items():
        log.warning(event, meaning=meaning)
