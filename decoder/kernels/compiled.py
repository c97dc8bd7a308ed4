"""The decorators of the kernels: how a function is compiled is decided here alone.

Kernels run without the interpreter lock, divide without Python's zero check (divisors are sizes), and are callable
from compiled code only, which spares a wrapper per function.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba
from numba import extending


def kernel(function: Any) -> Any:
    """Compile a function that only compiled code calls."""
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "no_cpython_wrapper": True,
        "no_cfunc_wrapper": True,
    }
    return numba.njit(**options)(function)


def inlined(function: Any) -> Any:
    """Compile a small function into its callers."""
    return numba.njit(nogil=True, error_model="numpy", inline="always")(function)


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


def intrinsic(function: Any) -> Any:
    """Make a function that emits LLVM code callable from kernels."""
    return extending.intrinsic(function)


def variant(function: Any) -> Callable[[Any], Any]:
    """Register the next function as chooser of an implementation of `function` by its argument types."""
    choose: Callable[[Any], Any] = extending.overload(function, strict=False)
    return choose


def inlined_variant(function: Any) -> Callable[[Any], Any]:
    """As `variant`, for implementations that are compiled into their callers."""
    choose: Callable[[Any], Any] = extending.overload(function, strict=False, inline="always")
    return choose
