"""The kernel sets, and what each does: chosen once per model by `decoder/models/llama.py`, compiled in everywhere.

A set is a tuple type without content, so that numba compiles every kernel once per set; its only field says how keys
and values are stored. The functions below take its numba type and are called while compiling alone; no kernel branches
on a set when it runs.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple


class Float32Storage(NamedTuple):
    """Keys and values as float32."""

    unused: int = 0


class Bfloat16Storage(NamedTuple):
    """Keys and values as bfloat16."""

    unused: int = 0


class Float16Storage(NamedTuple):
    """Keys and values as float16, finite ones bounded by its largest number."""

    unused: int = 0


class Int8Storage(NamedTuple):
    """Keys and values as int8 with a scale for each token and head."""

    unused: int = 0


class Int8DotStorage(NamedTuple):
    """As Int8Storage; attention by AVX-512's dot products of bytes."""

    unused: int = 0


class Float8DotStorage(NamedTuple):
    """As Float8Storage; attention by AVX-512's dot products of pairs of bfloat16."""

    unused: int = 0


class Float8Storage(NamedTuple):
    """Keys and values as fp8 e4m3 with a scale for each token and head."""

    unused: int = 0


Storage = (
    Float32Storage | Bfloat16Storage | Float16Storage | Int8Storage | Int8DotStorage | Float8Storage | Float8DotStorage
)


class Float32Kernels(NamedTuple):
    """float32 weights and inputs of products."""

    storage: Storage = Float32Storage()


class Bfloat16Kernels(NamedTuple):
    """bfloat16 weights, keys, values and inputs on any CPU."""

    storage: Bfloat16Storage = Bfloat16Storage()


class DotKernels(NamedTuple):
    """bfloat16 weights, keys, values and inputs, products and attention by AVX-512's dot products of pairs."""

    storage: Bfloat16Storage = Bfloat16Storage()


class AmxKernels(NamedTuple):
    """bfloat16 weights, keys, values and inputs, products and attention with AMX tiles."""

    storage: Bfloat16Storage = Bfloat16Storage()


class WideKernels(NamedTuple):
    """bfloat16 weights, float32 inputs on any CPU."""

    storage: Storage = Float32Storage()


class AmxWideKernels(NamedTuple):
    """bfloat16 weights; products with AMX tiles, their inputs as two bfloat16 parts."""

    storage: Storage = Float32Storage()


class GroupedKernels(NamedTuple):
    """Weights as whole numbers in groups (`grouped_weights.py`), float32 inputs on any CPU."""

    storage: Storage = Float32Storage()


_STORED: Final[dict[type, type]] = {Int8DotStorage: Int8Storage, Float8DotStorage: Float8Storage}

Kernels = Float32Kernels | Bfloat16Kernels | DotKernels | AmxKernels | WideKernels | AmxWideKernels | GroupedKernels


def _is(kernels: Any, *sets: type) -> bool:
    return getattr(kernels, "instance_class", None) in sets


def float32_weights(kernels: Any) -> bool:
    """Whether weights are float32."""
    return _is(kernels, Float32Kernels)


def grouped_weights(kernels: Any) -> bool:
    """Whether weights are whole numbers in groups, and inputs of products lie as `grouped_inputs.py` says."""
    return _is(kernels, GroupedKernels)


def float32_inputs(kernels: Any) -> bool:
    """Whether queries, attention and inputs of products are float32, or as exact as the set allows."""
    return _is(kernels, Float32Kernels, WideKernels, AmxWideKernels, GroupedKernels)


def split_inputs(kernels: Any) -> bool:
    """Whether inputs of products are sums of two bfloat16."""
    return _is(kernels, AmxWideKernels)


def pair_inputs(kernels: Any) -> bool:
    """Whether inputs of products are rows of bfloat16, multiplied pair by pair."""
    return _is(kernels, DotKernels)


def tile_attention(kernels: Any) -> bool:
    """Whether attention is computed with AMX tiles."""
    return _is(kernels, AmxKernels)


def dot_attention(kernels: Any) -> bool:
    """Whether attention is computed by dot products of pairs of bfloat16."""
    return _is(kernels, DotKernels)


def byte_attention(kernels: Any) -> bool:
    """Whether attention is computed by dot products of bytes, or of pairs that bytes become in registers."""
    return kernels.types[0].instance_class in (Int8DotStorage, Float8DotStorage)


def uses_tiles(kernels: Any) -> bool:
    """Whether products with weights are computed with AMX tiles."""
    return _is(kernels, AmxKernels, AmxWideKernels)


def storage(kernels: Any) -> type:
    """How keys and values are stored, whatever is computed with them."""
    kind: type = kernels.types[0].instance_class
    return _STORED.get(kind, kind)


def quantized(kernels: Any) -> bool:
    """Whether keys and values are one-byte elements with scales."""
    return storage(kernels) in (Int8Storage, Float8Storage)
