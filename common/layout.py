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
MAX_WINDOW_TOKENS: Final = 1 << 30


class KvDtype(StrEnum):
    """Element type of stored keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is KvDtype.FLOAT32 else 2


NOT_QUANTIZED: Final = "none"
QUANTIZATIONS: Final = ("int8", "fp8_e4m3")
"""One-byte elements with a scale for each token and head; the layout's dtype is then the type of the scales."""
SCALE_DTYPE: Final = KvDtype.BFLOAT16
KV_DTYPES: Final = (*(kind.value for kind in KvDtype), *QUANTIZATIONS)
"""Names of the ways to store keys and values, as `--kv-dtype` takes them."""


def default_kv_dtype(weights: str) -> str:
    """How keys and values are stored beside weights of type `weights`: as exact as they deserve, in no more bytes."""
    return KvDtype.FLOAT32.value if weights == "float32" else KvDtype.FLOAT16.value


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of one arena. Raises ValueError, naming the field, on a size no kernel can serve.

    A quantised block is its one-byte elements in the usual order, and behind them the scales, bfloat16
    `[layer][k|v][kv_head][token]`: so a page of elements keeps its power-of-two alignment and a block stays one run.

    window_tokens: so many keys, its own included, are the most that a step reads for a query, in whichever layer; 0
    means that some layer reads all of them. Blocks that lie wholly before are not read: they may be anybody's.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: KvDtype
    quantization: str = NOT_QUANTIZED
    version: int = LAYOUT_VERSION
    window_tokens: int = 0

    def __post_init__(self) -> None:
        for name, high in (("num_layers", 1024), ("num_kv_heads", 1024), ("head_dim", 1024)):
            value = getattr(self, name)
            if not 1 <= value <= high:
                raise ValueError(f"{name} is {value}; allowed is 1..{high}")
        tokens = self.block_tokens
        if not 1 <= tokens <= MAX_BLOCK_TOKENS or tokens & (tokens - 1):
            raise ValueError(f"block_tokens is {tokens}; allowed is a power of two in 1..{MAX_BLOCK_TOKENS}")
        if self.quantization not in (NOT_QUANTIZED, *QUANTIZATIONS):
            allowed = ", ".join(repr(name) for name in (NOT_QUANTIZED, *QUANTIZATIONS))
            raise ValueError(f"quantization is {self.quantization!r}; allowed is one of {allowed}")
        if self.quantized and self.dtype is not SCALE_DTYPE:
            raise ValueError(f"dtype is {self.dtype.value}; beside {self.quantization} scales are {SCALE_DTYPE.value}")
        if not 0 <= self.window_tokens <= MAX_WINDOW_TOKENS:
            raise ValueError(f"window_tokens is {self.window_tokens}; allowed is 0..{MAX_WINDOW_TOKENS}")
        if self.version != LAYOUT_VERSION:
            raise ValueError(f"layout version is {self.version}; this build speaks {LAYOUT_VERSION}")
        if self.block_bytes < NONCE_BYTES:
            raise ValueError(f"a block of {self.block_bytes} bytes is smaller than the {NONCE_BYTES}-byte nonce")

    @classmethod
    def of(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_tokens: int,
        kv_dtype: str,
        window_tokens: int = 0,
    ) -> KvLayout:
        """The layout of keys and values stored as `kv_dtype`, one of KV_DTYPES."""
        quantized = kv_dtype in QUANTIZATIONS
        return cls(
            num_layers, num_kv_heads, head_dim, block_tokens, SCALE_DTYPE if quantized else KvDtype(kv_dtype),
            kv_dtype if quantized else NOT_QUANTIZED, window_tokens=window_tokens,
        )  # fmt: skip

    @property
    def quantized(self) -> bool:
        """Whether elements are one byte and have scales."""
        return self.quantization != NOT_QUANTIZED

    @property
    def kv_dtype(self) -> str:
        """How keys and values are stored: one of KV_DTYPES."""
        return self.quantization if self.quantized else self.dtype.value

    @property
    def element_bytes(self) -> int:
        """Bytes of a stored number, without scales."""
        return 1 if self.quantized else self.dtype.itemsize

    @property
    def scales_offset(self) -> int:
        """Bytes from the start of a block to its scales; without scales, all of them."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_tokens * self.head_dim * self.element_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block: [layer, k|v, kv_head, token, head_dim]."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim)

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Shape of one block in an arena's array: `block_shape`, or its bytes where it has scales."""
        return (self.block_bytes,) if self.quantized else self.block_shape

    @property
    def array_type(self) -> str:
        """Name of the numpy type of an arena: bits of 2-byte types, which numpy has not all, bytes where quantised."""
        if self.quantized:
            return "uint8"
        return "float32" if self.dtype is KvDtype.FLOAT32 else "uint16"

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values, scales included, that one token takes over all layers."""
        row = self.head_dim * self.element_bytes + (self.dtype.itemsize if self.quantized else 0)
        return self.num_layers * 2 * self.num_kv_heads * row

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
        window = f"/window {self.window_tokens}" if self.window_tokens else ""
        text = f"{self.dtype.value}/{self.quantization}{window}".encode()
        return hashlib.blake2b(fields + text, digest_size=16, person=b"tessera-layout").digest()
