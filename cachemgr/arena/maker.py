"""Where the arena of this daemon lies, as its options say: makes it, and knows one that a decoder hands back.

Invariant: host memory, or memory of one GPU that was found at the start; never another place than the options name.
Called by the daemon (`open_place`) and by the pool owner. It keeps no arena.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cachemgr.arena.base import Arena
from cachemgr.arena.cuda import CudaArena
from cachemgr.arena.cuda_ipc import CudaIpcArena
from cachemgr.arena.host import HostArena
from cachemgr.journal_format import JournalIdentity
from common.arena_sizes import ArenaSizes
from common.config import Options
from common.cuda_checks import report_surroundings
from common.cuda_driver import CudaError, Gpu, LoadDriver, load_bindings, open_gpu
from common.devices import NO_DEVICE
from common.errors import InvalidArgument, ResourceExhausted
from common.layout import NONCE_BYTES
from common.memory import machine_bytes


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """The host's memory, or that of `gpu`; `ipc` shares it by the older handle."""

    gpu: Gpu | None = None
    ipc: bool = False

    def make(self, sizes: ArenaSizes) -> Arena:
        """Fresh memory with a nonce of its own. Raises ResourceExhausted where the machine has less, or where the
        system or the driver refuses it."""
        nonce, needed = secrets.token_bytes(NONCE_BYTES), sizes.arena_bytes
        if self.gpu is None and needed > machine_bytes():
            # The memory file would be sparse: nothing but the books' size would say so before it is full.
            raise ResourceExhausted(
                f"a pool of {sizes.num_blocks} blocks takes {needed} bytes; this machine has {machine_bytes()}",
                subject="arena_bytes",
                needed=needed,
                usable=machine_bytes(),
                reason="NO_MEMORY",
            )
        try:
            if self.gpu is None:
                return HostArena(sizes, nonce=nonce)
            kind = CudaIpcArena if self.ipc else CudaArena
            return kind(self.gpu, sizes, nonce=nonce)
        except (OSError, CudaError) as error:
            cause = error.strerror if isinstance(error, OSError) else str(error)
            raise ResourceExhausted(
                f"the system refuses an arena of {needed} bytes: {cause}",
                subject="arena_bytes",
                needed=needed,
                usable=0,
                reason="NO_MEMORY",
            ) from error

    def adopt(self, fd: int, identity: JournalIdentity) -> Arena:
        """The arena of `identity` behind an fd that a decoder hands back; `fd` is ours from now on.

        Raises ValueError where it is not that memory, or does not lie where this daemon's options say.
        """
        if identity.device_uuid != (NO_DEVICE if self.gpu is None else self.gpu.uuid):
            os.close(fd)
            raise ValueError("the memory that was handed back is not the arena: it lies on another device")
        if self.gpu is None:
            return HostArena.adopt(fd, identity.sizes, nonce=identity.nonce)
        return CudaArena.adopt(self.gpu, fd, identity.sizes, nonce=identity.nonce)


HOST_MEMORY: Final = ArenaPlace()


def open_place(options: Options, environ: Mapping[str, str], load: LoadDriver = load_bindings) -> ArenaPlace:
    """The place that the options name. Raises FailedPrecondition where it is not there, InvalidArgument on a fault
    knob that it cannot serve."""
    gpu = open_gpu(options.device, load)
    if gpu is None:
        return HOST_MEMORY
    ipc = options.arena_handles == "ipc"
    if options.faults.poison_on_free and not ipc:
        raise InvalidArgument("fault", "poison_on_free needs --device cpu: the cache manager writes no GPU memory")
    report_surroundings(gpu, environ)
    return ArenaPlace(gpu, ipc)
