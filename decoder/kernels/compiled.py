"""The decorators of the kernels: how a function is compiled is decided here alone.

Kernels run without the interpreter lock, divide without Python's zero check (divisors are sizes), and are callable
from compiled code only, which spares a wrapper per function.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, Final

import numba
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils

from decoder.kernels.linking import KernelCompiler

_made: set[str] = set()
# Functions with equal options share numba's own: `max` of two integers is compiled once.
_OPTIONS: Final[Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": KernelCompiler,
}
_INLINED: Final[Any] = {**_OPTIONS, "forceinline": True}


def kernel(function: Any) -> Any:
    """Compile a function that only compiled code calls. Raises TypeError for one made in a function (`made_kernel`)."""
    if "<locals>" in function.__qualname__:
        raise TypeError(f"{function.__qualname__} is made in a function; give it a name of its own by made_kernel")
    return _compiled(function)


def made_kernel(name: str) -> Callable[[Any], Any]:
    """`kernel` for what a function makes out of its arguments; `name` tells it from all else that is made so.

    Numba names machine code after the function, its argument types and a number that counts the functions of the
    process that compiled it. Two made from one text differ in that number alone; loaded from the caches of two
    processes they can have the same one, and then the first loaded serves the callers of both.
    Raises ValueError for a name that is in use.
    """

    def make(function: Any) -> Any:
        whole = f"{function.__qualname__.replace('.<locals>', '')}_{name}"
        if (known := f"{function.__module__}.{whole}") in _made:
            raise ValueError(f"a kernel {known} was made before")
        _made.add(known)
        function.__qualname__ = whole
        return _compiled(function)

    return make


def _compiled(function: Any, options: dict[str, Any] = _OPTIONS) -> Any:
    dispatcher = numba.njit(**options)(function)
    template = dispatcher.get_call_template

    def of_types(arguments: Any, keywords: Any) -> Any:
        # Numba would compile a copy for each constant that a caller names.
        unliteral: Any = types.unliteral
        return template(tuple(map(unliteral, arguments)), {name: unliteral(kind) for name, kind in keywords.items()})

    dispatcher.get_call_template = of_types
    return dispatcher


def inlined(function: Any) -> Any:
    """Compile a small function into its callers."""
    return _compiled(function, _INLINED)


def entry(function: Any) -> Any:
    """Compile a function that Python calls too."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def cached_entry(function: Any) -> Any:
    """Compile a function that Python calls, and keep the machine code on disk."""
    return numba.njit(nogil=True, error_model="numpy", cache=True)(function)


def cached_entries(function: Any) -> Callable[[Any], Any]:
    """`cached_entry` for each kernel set, the first argument of `function`: gives the entry of a set.

    Each set has files of its own. Numba numbers the machine code of one function in the order in which it is compiled:
    two processes that compile two sets at once may give both the same number, and then a set runs another's code.
    """
    entries: dict[str, Any] = {}

    def of(kernels: Any) -> Any:
        name = f"{type(kernels).__name__}_{type(kernels.storage).__name__}"
        if name not in entries:
            copy = FunctionType(function.__code__, function.__globals__, function.__name__)
            copy.__module__, copy.__qualname__ = function.__module__, f"{function.__qualname__}_{name}"
            entries[name] = cached_entry(copy)
        return entries[name]

    return of


def compile_once(entry: Any, signature: tuple[Any, ...]) -> None:
    """Compile a cached entry for a signature; of processes that want it at once one compiles, and the others load.

    Where the folder of machine code cannot be written or locked, each compiles for itself.
    """
    folder = Path(entry.stats.cache_path)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / "compiling.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        entry.compile(signature)


def intrinsic(function: Any) -> Any:
    """Make a function that emits LLVM code callable from kernels."""
    return extending.intrinsic(function)


def defined(module: ir.Module, name: str, operands: int, emit: Callable[[Any, Any], None]) -> Any:
    """The function of int64 operands in `module` whose code is `emit(builder, operands)`, made once; never inlined.

    So it is optimised once, not with each of its callers again, and all registers are its own.
    """
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * operands)
    callee = cgutils.get_or_insert_function(module, kind, f"tessera_{name}")  # type: ignore[no-untyped-call]
    if callee.is_declaration:
        callee.linkage = "linkonce_odr"
        callee.attributes.add("noinline")
        inside = ir.IRBuilder(callee.append_basic_block())
        emit(inside, callee.args)
        inside.ret_void()
    return callee


def function(name: str, operands: int, emit: Callable[[Any, Any], None]) -> Any:
    """An intrinsic of int64 operands whose code, `emit(builder, operands)`, is a function of its own.

    Of functions of one name in a process the first that is compiled serves all: a name says all that tells them apart.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.call(defined(builder.module, name, operands, emit), args)
        return context.get_dummy_value()

    def declare(typing_context: Any, *arguments: Any) -> Any:
        return types.void(*([types.int64] * operands)), generate

    # Numba reads the number of operands from the signature.
    names = ["typing_context", *(f"operand_{index}" for index in range(operands))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    declare.__signature__ = inspect.Signature([inspect.Parameter(each, kind) for each in names])  # type: ignore[attr-defined]
    return extending.intrinsic(declare)


def variant(function: Any) -> Callable[[Any], Any]:
    """Register the next function as chooser of an implementation of `function` by its argument types."""
    choose: Callable[[Any], Any] = extending.overload(function, strict=False, jit_options=_OPTIONS)
    return choose


def inlined_variant(function: Any) -> Callable[[Any], Any]:
    """As `variant`, for implementations that are compiled into their callers."""
    choose: Callable[[Any], Any] = extending.overload(function, strict=False, jit_options=_INLINED)
    return choose
