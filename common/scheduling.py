"""What a thread asks of the kernel's scheduler: to run soon when it wakes, or to run long once it runs.

Several processes share the cores with compute threads that never sleep for long. A thread that only passes messages on
asks for a short slice: since Linux 6.12 such a thread preempts one with a longer slice when it wakes (EEVDF; Zijlstra,
"sched/eevdf: Allow shorter slices to wakeup-preempt"), at no cost in fairness. Needs no privilege. Elsewhere nothing
changes. Called at the start of a process or thread; threads inherit it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Final

SHORT_SLICE_NS: Final = 100_000  # the least that the kernel grants
DEFAULT_SLICE: Final = 0
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
_SCHED_ATTR: Final = struct.Struct("=IIQiIQQQII")  # size, policy, flags, nice, priority, 3 times, 2 clamps


def prefer_latency() -> bool:
    """Ask for a short slice for this thread and those it starts; whether the kernel took it."""
    return _set_slice(SHORT_SLICE_NS)


def prefer_throughput() -> bool:
    """Ask for the ordinary slice for this thread; whether the kernel took it."""
    return _set_slice(DEFAULT_SLICE)


def _set_slice(nanoseconds: int) -> bool:
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    return int(libc.syscall(number, 0, buffer, 0)) == 0
