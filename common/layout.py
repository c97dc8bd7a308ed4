"""The KV layout: how keys and values lie in an arena. The only module that knows this geometry.

Block-major, so that one block is one contiguous range of bytes whichever layer is read:
`[block][layer][k|v][kv_head][token][head_dim]`. Block 0 is the null block: padded block tables point at it,
no lease ever holds it, and its first bytes carry the arena's nonce.

Every process computes the same fingerprint from the same numbers; an attach with another one is refused.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

LAYOUT_VERSION: Final = 1
NULL_BLOCK: Final = 0
NONCE_BYTES: Final = 32
TOKEN_BYTES: Final = 4  # token ids cross every boundary as packed little-endian int32
MAX_BLOCK_TOKENS: Final = 256


class KvDtype(StrEnum):
    """Element type of stored keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is KvDtype.FLOAT32 else 2


def default_kv_dtype(weights: str) -> KvDtype:
    """Type of keys and values that suits weights of type `weights`: as exact as they deserve, in no more bytes."""
    return KvDtype.FLOAT32 if weights == "float32" else KvDtype.FLOAT16


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of one arena. Raises ValueError, naming the field, on a size no kernel can serve."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: KvDtype
    quantization: str = "none"
    version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        for name, high in (("num_layers", 1024), ("num_kv_heads", 1024), ("head_dim", 1024)):
            value = getattr(self, name)
            if not 1 <= value <= high:
                raise ValueError(f"{name} is {value}; allowed is 1..{high}")
        tokens = self.block_tokens
        if not 1 <= tokens <= MAX_BLOCK_TOKENS or tokens & (tokens - 1):
            raise ValueError(f"block_tokens is {tokens}; allowed is a power of two in 1..{MAX_BLOCK_TOKENS}")
        if self.quantization != "none":
            raise ValueError(f"quantization is {self.quantization!r}; allowed is 'none'")
        if self.version != LAYOUT_VERSION:
            raise ValueError(f"layout version is {self.version}; this build speaks {LAYOUT_VERSION}")
        if self.block_bytes < NONCE_BYTES:
            raise ValueError(f"a block of {self.block_bytes} bytes is smaller than the {NONCE_BYTES}-byte nonce")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block: [layer, k|v, kv_head, token, head_dim]."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim)

    @property
    def array_type(self) -> str:
        """Name of the numpy type of an arena; bits of 2-byte types, which numpy has not all."""
        return "float32" if self.dtype is KvDtype.FLOAT32 else "uint16"

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    def arena_bytes(self, num_blocks: int) -> int:
        """Bytes of an arena with `num_blocks` usable blocks; the null block comes on top."""
        return (num_blocks + 1) * self.block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def fingerprint(self) -> bytes:
        """16 bytes that are equal exactly when two layouts are equal."""
        fields = struct.pack("<5I", self.version, self.num_layers, self.num_kv_heads, self.head_dim, self.block_tokens)
        text = f"{self.dtype.value}/{self.quantization}".encode()
        return hashlib.blake2b(fields + text, digest_size=16, person=b"tessera-layout").digest()


def quantized_scale_offset(num_layers: int, num_kv_heads: int, head_dim: int, block_tokens: int) -> int:
    """Bytes of one-byte elements at the start of a quantised block, `[layer][k|v][kv_head][token][head_dim]`.

    The scales follow them, float32 `[layer][k|v][kv_head][token]`, so that a page of elements keeps its power-of-two
    alignment and a block stays one contiguous run. A multiple of 16 for every head size that is.
    """
    return num_layers * 2 * num_kv_heads * block_tokens * head_dim


def quantized_block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, block_tokens: int) -> int:
    """Bytes of a quantised block with its scales: (head_dim + 4) bytes a token, head and plane."""
    return quantized_scale_offset(num_layers, num_kv_heads, head_dim + 4, block_tokens)
