"""How many vector registers this CPU has: what decides the shape of a register tile.

A vector is sixteen float32 lanes (`simd.py`): one register with AVX-512, two with AVX2, four with NEON. Shapes never
change the order of a sum, so a result never depends on them. Read while kernels are compiled.
"""

from __future__ import annotations

from typing import Final

import llvmlite.binding as llvm


def count_vectors(features: dict[str, bool]) -> int:
    """Vectors of sixteen float32 that the registers of a CPU with these LLVM features hold at once."""
    return 32 if features.get("avx512f") else 8


VECTORS: Final = count_vectors(dict(llvm.get_host_cpu_features()))
