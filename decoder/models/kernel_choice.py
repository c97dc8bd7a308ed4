"""Which kernel set a model runs with on this CPU. Called by `llama.py` once per model, and by `bench/products.py`."""

from __future__ import annotations

from typing import Final

from common.errors import FailedPrecondition
from decoder.kernels import amx, byte_dots, byte_pairs, dots, sets
from decoder.kernels.halves import CONVERTS_FLOAT16

KERNEL_SETS: Final = ("auto", "portable")
_STORAGE: Final[dict[str, sets.Storage]] = {
    "float32": sets.Float32Storage(),
    "bfloat16": sets.Bfloat16Storage(),
    "float16": sets.Float16Storage(),
    "int8": sets.Int8Storage(),
    "fp8_e4m3": sets.Float8Storage(),
}


def choose_kernels(
    kv_dtype: str, *, bfloat16: bool, grouped: bool = False, head_dim: int, kernels: str = "auto"
) -> sets.Kernels:
    """The set for keys and values stored as `kv_dtype` and weights that are bfloat16, in groups, or else float32.

    `kernels` is "auto" (the fastest the CPU has) or "portable"; `head_dim` is the size of a head. Raises ValueError
    where `kernels` is neither, and FailedPrecondition (NO_FLOAT16) for weights in groups, and for keys and values as
    float16 or fp8, where nothing converts float16.
    """
    if kernels not in KERNEL_SETS:
        raise ValueError(f"kernels is {kernels!r}; allowed is one of {KERNEL_SETS}")
    storage = _STORAGE[kv_dtype]
    if not CONVERTS_FLOAT16 and (grouped or isinstance(storage, sets.Float16Storage | sets.Float8Storage)):
        raise FailedPrecondition(
            "this CPU has no F16C, and no libgcc_s of GCC 12 or later does it instead: give --kv-dtype bfloat16, and "
            "--dtype bfloat16 or float32",
            reason="NO_FLOAT16",
        )
    if not bfloat16 and not grouped:
        return sets.Float32Kernels(storage)
    if kernels == "auto":
        storage = _by_dots(storage)
    if grouped:
        return sets.GroupedKernels(storage)
    tiles = kernels == "auto" and amx.available()
    if not isinstance(storage, sets.Bfloat16Storage):
        return sets.AmxWideKernels(storage) if tiles else sets.WideKernels(storage)
    # A head narrower than a tile would waste most of it.
    if tiles and head_dim % 32 == 0:
        return sets.AmxKernels()
    return sets.DotKernels() if kernels == "auto" and dots.HAS_DOTS else sets.Bfloat16Kernels()


def _by_dots(storage: sets.Storage) -> sets.Storage:
    """`storage` with products of one-byte elements by dot products, where the CPU has what they take."""
    if isinstance(storage, sets.Int8Storage) and byte_dots.HAS_BYTE_DOTS:
        return sets.Int8DotStorage()
    if isinstance(storage, sets.Float8Storage) and byte_pairs.HAS_TABLES and dots.HAS_DOTS:
        return sets.Float8DotStorage()
    return storage
