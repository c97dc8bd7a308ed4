"""The kernel sets, and what each does: chosen once per model by `decoder/models/llama.py`, compiled in everywhere.

A set is an empty tuple type, so that numba compiles every kernel once per set. The functions below take its numba type
and are called while compiling alone; no kernel branches on a set when it runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Float32Kernels(NamedTuple):
    """float32 weights, keys and values; float32 inputs of products."""

    unused: int = 0


class Bfloat16Kernels(NamedTuple):
    """bfloat16 weights, keys, values and inputs on any CPU."""

    unused: int = 0


class AmxKernels(NamedTuple):
    """bfloat16 weights, keys, values and inputs, products and attention with AMX tiles."""

    unused: int = 0


class WideKernels(NamedTuple):
    """bfloat16 weights, float32 keys, values and inputs on any CPU."""

    unused: int = 0


class AmxWideKernels(NamedTuple):
    """bfloat16 weights, float32 keys and values; products with AMX tiles, their inputs as two bfloat16 parts."""

    unused: int = 0


Kernels = Float32Kernels | Bfloat16Kernels | AmxKernels | WideKernels | AmxWideKernels


def _is(kernels: Any, *sets: type) -> bool:
    return getattr(kernels, "instance_class", None) in sets


def float32_weights(kernels: Any) -> bool:
    """Whether weights are float32; else bfloat16."""
    return _is(kernels, Float32Kernels)


def float32_kv(kernels: Any) -> bool:
    """Whether queries, keys, values, attention and inputs of products are float32, or as exact as the set allows."""
    return _is(kernels, Float32Kernels, WideKernels, AmxWideKernels)


def split_inputs(kernels: Any) -> bool:
    """Whether inputs of products are sums of two bfloat16."""
    return _is(kernels, AmxWideKernels)


def tile_attention(kernels: Any) -> bool:
    """Whether attention is computed with AMX tiles."""
    return _is(kernels, AmxKernels)


def uses_tiles(kernels: Any) -> bool:
    """Whether products with weights are computed with AMX tiles."""
    return _is(kernels, AmxKernels, AmxWideKernels)
