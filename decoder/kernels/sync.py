"""A team of threads that runs one compiled function together: atomics, phases of tasks, a barrier and the team itself.

A step is a row of phases. Tasks of a phase are taken from a counter by whoever is there, and the phase is over when all
are done: a thread that lost its core between two tasks, or has not woken yet, keeps nobody waiting. Phases whose work
is divided beforehand end at a barrier, which waits for every thread. Invariants: all threads pass the same phases and
barriers in the same order; a step's memory is not touched by a thread that comes after its end. Waiting spins for some
microseconds and then sleeps in the kernel (futex), because other processes share the CPUs. Workers hold no interpreter
lock.
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
INSIDE: Final = 5 * _LINE  # workers in a step
CONTROL_WORDS: Final = 6 * _LINE

_FROM_BACK: Final = 1 << 32  # a counter of tasks taken: those from the front, and those from the back in the upper half
_DONE: Final = 8  # bytes from a phase's counter of tasks taken, int64, to that of tasks done, int32


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _fetch_add(kind: Any, numba_kind: Any) -> Any:
    def declare(typingctx: Any, address: Any, amount: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.atomic_rmw("add", _pointer(builder, args[0], kind), args[1], "seq_cst")

        return numba_kind(types.int64, numba_kind), generate

    return intrinsic(declare)


def _load_atomic(kind: Any, numba_kind: Any) -> Any:
    def declare(typingctx: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load_atomic(_pointer(builder, args[0], kind), "seq_cst", kind.width // 8)

        return numba_kind(types.int64), generate

    return intrinsic(declare)


# Of the number at an address, sequentially consistent.
fetch_add_int32 = _fetch_add(_I32, types.int32)
fetch_add_int64 = _fetch_add(_I64, types.int64)
load_atomic = _load_atomic(_I32, types.int32)
_load_atomic_int64 = _load_atomic(_I64, types.int64)


@intrinsic
def _exchange_if(typingctx: Any, address: Any, expected: Any, value: Any) -> Any:
    """Put `value` in place of `expected` at an address; whether that was there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = builder.cmpxchg(_pointer(builder, args[0], _I64), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


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
def _sleep(address: int, value: int) -> None:
    """Until woken, unless the int32 at `address` differs from `value`; may return early."""
    if _FUTEX < 0:
        _sched_yield()
    else:
        _syscall(_FUTEX, address, _FUTEX_WAIT_PRIVATE, value, 0, 0, 0)


@kernel
def wait_while(address: int, value: int, sleepers: int) -> None:
    """Return once the int32 at `address` differs from `value`. `sleepers` counts who may need a wake-up call."""
    for _ in range(_SPINS):
        if load_atomic(address) != value:
            return
        pause()
    fetch_add_int32(sleepers, np.int32(1))
    while load_atomic(address) == value:
        _sleep(address, value)
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
def take_next(counter: int) -> int:
    """The number of the next task of the phase whose counters are at `counter`; past the last there are more."""
    return fetch_add_int64(counter, 1)


@kernel
def take_tasks(counter: int, tasks: int, size: int, rank: int) -> tuple[int, int]:
    """Tasks of the phase whose counters are at `counter`: the first and the one after the last; none where they are
    equal, for none is left.

    Many at first and single ones in the end (guided self-scheduling: Polychronopoulos and Kuck 1987), since a counter
    that another core wrote last takes as long as a small task. Even ranks take them from the front and odd ones from
    the back, so that neighbours mostly have one thread: what it reads is one stream, and few cache lines are written
    by two.
    """
    while True:
        taken = _load_atomic_int64(counter)
        front, back = taken & (_FROM_BACK - 1), taken >> 32
        left = tasks - front - back
        if left <= 0:
            return tasks, tasks
        count = max(1, left // (2 * size))
        if rank & 1:
            if _exchange_if(counter, taken, taken + count * _FROM_BACK):
                return tasks - back - count, tasks - back
        elif _exchange_if(counter, taken, taken + count):
            return front, front + count


@kernel
def end_phase(control: int, counter: int, mine: int, tasks: int) -> None:
    """Say that this thread has done `mine` of a phase's `tasks` tasks, and return when all of them are done."""
    done, sleepers = counter + _DONE, control + 4 * SLEEPERS
    if mine > 0 and fetch_add_int32(done, np.int32(mine)) + mine == tasks:
        wake_all(done, sleepers)
        return
    for _ in range(_SPINS):
        if load_atomic(done) == tasks:
            return
        pause()
    fetch_add_int32(sleepers, np.int32(1))
    while True:
        seen = load_atomic(done)
        if seen == tasks:
            break
        _sleep(done, seen)
    fetch_add_int32(sleepers, np.int32(-1))


@kernel
def open_step(control: int) -> None:
    """Let the workers in: the generation is odd from now on."""
    next_generation(control)


@kernel
def close_step(control: int) -> None:
    """Let no worker in any more, and return when all are out. Its counters may be reset then."""
    fetch_add_int32(control + 4 * GENERATION, np.int32(1))
    while True:
        inside = load_atomic(control + 4 * INSIDE)
        if inside == 0:
            return
        wait_while(control + 4 * INSIDE, inside, control + 4 * SLEEPERS)


@kernel
def enter_step(control: int, generation: int) -> bool:
    """Go into the step of that generation; False where it is over. Who went in must `leave_step`."""
    if generation & 1 == 0:
        return False
    fetch_add_int32(control + 4 * INSIDE, np.int32(1))
    if load_atomic(control + 4 * GENERATION) == generation:
        return True
    leave_step(control)
    return False


@kernel
def leave_step(control: int) -> None:
    """Say that this worker touches nothing of the step any more."""
    fetch_add_int32(control + 4 * INSIDE, np.int32(-1))
    wake_all(control + 4 * INSIDE, control + 4 * SLEEPERS)


@kernel
def await_generation(control: int, seen: int) -> int:
    """Sleep until the generation differs from `seen`; the new generation, or -1 when the team is closed."""
    wait_while(control + 4 * GENERATION, seen, control + 4 * SLEEPERS)
    if load_atomic(control + 4 * STOP) != 0:
        return -1
    return load_atomic(control + 4 * GENERATION)


@entry
def next_generation(control: int) -> None:
    """Make the generation another one, and wake who waits for that."""
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
        """Start the workers: `work(rank)` for ranks 1 and up must serve steps until `await_generation` gives -1."""
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
