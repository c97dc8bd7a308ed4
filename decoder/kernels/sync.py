"""A team of threads that runs one compiled function together: atomics, a barrier and the team itself.

Invariant: all threads of a team pass the same barriers in the same order. Waiting spins for some microseconds and
then sleeps in the kernel (futex), because other processes share the CPUs. Workers hold no interpreter lock.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,assignment,call-arg,no-untyped-call,no-any-return"

from __future__ import annotations

import platform
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from common.scheduling import prefer_throughput
from decoder.kernels.compiled import entry, intrinsic, kernel

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT_PRIVATE: Final = 128
_FUTEX_WAKE_PRIVATE: Final = 129
_SPINS: Final = 1500  # pauses before sleeping: about 20 to 50 microseconds

# Words of the control array (int32), each on a cache line of its own.
_LINE: Final = 16
GENERATION: Final = 0 * _LINE
STOP: Final = 1 * _LINE
ARRIVED: Final = 2 * _LINE
PHASE: Final = 3 * _LINE
SLEEPERS: Final = 4 * _LINE
CONTROL_WORDS: Final = 5 * _LINE


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _fetch_add(kind: Any, numba_kind: Any) -> Any:
    def declare(typingctx: Any, address: Any, amount: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.atomic_rmw("add", _pointer(builder, args[0], kind), args[1], "seq_cst")

        return numba_kind(types.int64, numba_kind), generate

    return intrinsic(declare)


fetch_add_int32 = _fetch_add(_I32, types.int32)
fetch_add_int64 = _fetch_add(_I64, types.int64)


@intrinsic
def load_atomic(typingctx: Any, address: Any) -> Any:
    """The int32 at an address, sequentially consistent."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0], _I32), "seq_cst", 4)

    return types.int32(types.int64), generate


@intrinsic
def store_atomic(typingctx: Any, address: Any, value: Any) -> Any:
    """Store an int32, sequentially consistent."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0], _I32), "seq_cst", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int32), generate


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the CPU that this is a spin loop."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "x86" in builder.module.triple:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


_syscall: Any = types.ExternalFunction("syscall", types.int64(*([types.int64] * 7)))
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())
_FUTEX: Final = _SYS_FUTEX.get(platform.machine(), -1)


@kernel
def wait_while(address: int, value: int, sleepers: int) -> None:
    """Return once the int32 at `address` differs from `value`. `sleepers` counts who may need a wake-up call."""
    for _ in range(_SPINS):
        if load_atomic(address) != value:
            return
        pause()
    fetch_add_int32(sleepers, np.int32(1))
    while load_atomic(address) == value:
        if _FUTEX < 0:
            _sched_yield()
        else:
            _syscall(_FUTEX, address, _FUTEX_WAIT_PRIVATE, value, 0, 0, 0)
    fetch_add_int32(sleepers, np.int32(-1))


@kernel
def wake_all(address: int, sleepers: int) -> None:
    """Wake the threads asleep on `address`; no system call when there are none."""
    if _FUTEX >= 0 and load_atomic(sleepers) > 0:
        _syscall(_FUTEX, address, _FUTEX_WAKE_PRIVATE, 1 << 30, 0, 0, 0)


@kernel
def barrier(control: int, size: int) -> None:
    """Wait until all `size` threads are here. `control` is the address of the control words."""
    if size == 1:
        return
    phase = load_atomic(control + 4 * PHASE)
    if fetch_add_int32(control + 4 * ARRIVED, np.int32(1)) == size - 1:
        store_atomic(control + 4 * ARRIVED, np.int32(0))
        store_atomic(control + 4 * PHASE, np.int32(phase + 1))
        wake_all(control + 4 * PHASE, control + 4 * SLEEPERS)
    else:
        wait_while(control + 4 * PHASE, phase, control + 4 * SLEEPERS)


@kernel
def await_generation(control: int, seen: int) -> int:
    """Sleep until the generation differs from `seen`; the new generation, or -1 when the team is closed."""
    wait_while(control + 4 * GENERATION, seen, control + 4 * SLEEPERS)
    if load_atomic(control + 4 * STOP) != 0:
        return -1
    return load_atomic(control + 4 * GENERATION)


@entry
def next_generation(control: int) -> None:
    """Release the workers for one run."""
    fetch_add_int32(control + 4 * GENERATION, np.int32(1))
    wake_all(control + 4 * GENERATION, control + 4 * SLEEPERS)


def _compute(work: Callable[[int], None], rank: int) -> None:
    prefer_throughput()
    work(rank)


class Team:
    """`size` threads, the caller's included, that meet at the control words at address `control`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._words = np.zeros(CONTROL_WORDS + _LINE, np.int32)
        self.control: int = self._words.ctypes.data + (-self._words.ctypes.data) % 64
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[int], None]) -> None:
        """Start the workers: `work(rank)` for ranks 1 and up must serve runs until `await_generation` gives -1."""
        for rank in range(1, self.size):
            thread = threading.Thread(target=_compute, args=(work, rank), name=f"tessera-step-{rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the workers. A closed team must not be used again."""
        if self._threads:
            offset = (self.control - self._words.ctypes.data) // 4
            self._words[offset + STOP] = 1
            next_generation(self.control)
            for thread in self._threads:
                thread.join()
            self._threads = []
