"""Conversions of float16 where a CPU has no instruction for them: x86 without F16C, as old ones and plain virtual ones.

LLVM calls functions of the compiler's runtime library there, and address 0 where the process does not have them. They
are made known to it when this is imported, by `simd.py`, before any kernel is compiled or loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import llvmlite.binding as llvm

_NAMES: Final = ("__extendhfsf2", "__truncsfhf2")
_LIBRARIES: Final = ("libgcc_s.so.1",)  # has them from GCC 12 on


def provide_conversions(features: dict[str, bool], libraries: Sequence[str] = _LIBRARIES) -> bool:
    """Whether kernels can convert float16 on a CPU with these LLVM features, with what the process or one of the shared
    `libraries` has; LLVM knows of it from then on."""
    if features.get("f16c") or "sse2" not in features:
        return True
    return all(_provide(name, libraries) for name in _NAMES)


def _provide(name: str, libraries: Sequence[str]) -> bool:
    if llvm.address_of_symbol(name):
        return True
    for library in libraries:
        try:
            found = getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError):
            continue
        llvm.add_symbol(name, ctypes.cast(found, ctypes.c_void_p).value)
        return True
    return False


CONVERTS_FLOAT16: Final = provide_conversions(dict(llvm.get_host_cpu_features()))
