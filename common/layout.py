"""The KV layout: how keys and values lie in an arena. The only module that knows this geometry.

Block-major, so that one block is one contiguous range of bytes whichever layer is read:
`[block][layer][k|v][kv_head][token][head_dim]`. Block 0 is the null block: padded block tables point at it,
no lease ever holds it, and its first bytes carry the arena's nonce.

Where some layers have a window and others read all keys, there are two groups of layers. Blocks hold the layers that
read all; a second pool of window blocks, behind the blocks in the same memory, holds those with a window, and a block
has a window block only while somebody may read it. Window block 0 is null as well.

Every process computes the same fingerprint from the same numbers; an attach with another one is refused.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from common.arena_sizes import ArenaSizes

LAYOUT_VERSION: Final = 1
NULL_BLOCK: Final = 0
NONCE_BYTES: Final = 32
TOKEN_BYTES: Final = 4  # token ids cross every boundary as packed little-endian int32
MAX_BLOCK_TOKENS: Final = 256
MAX_WINDOW_TOKENS: Final = 1 << 30
MAX_LAYERS: Final = 1024
WINDOW_SHARE: Final = 3  # one window block for so many blocks at most


class KvDtype(StrEnum):
    """Element type of stored keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is KvDtype.FLOAT32 else 2


DENSE_DTYPES: Final = ("float32", "bfloat16")
GROUPED_DTYPES: Final = ("int8", "file")
"""Names of the types of weights, as `--dtype` takes them: a number each; or whole numbers in groups with a scale, of 8
bits for every model, or as a GGUF file has them, of 4 and 8 bits."""

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

    window_tokens: so many keys, its own included, are the most that a step reads for a query, in whichever layer that
    has a window; 0 means that no layer has one that counts. Blocks (with groups: window blocks) that lie wholly before
    are not read: they may be anybody's.
    window_layers: the layers in window blocks, ascending, where others read all keys; empty: blocks hold all layers,
    and a window, if there is one, is that of every layer.
    window_share: with window layers, one window block for so many blocks, where that is enough for two sequences; else
    it says nothing.

    Sizes and shapes below are those of blocks; of window blocks they are those of `window_group`.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: KvDtype
    quantization: str = NOT_QUANTIZED
    version: int = LAYOUT_VERSION
    window_tokens: int = 0
    window_layers: tuple[int, ...] = ()
    window_share: int = WINDOW_SHARE

    def __post_init__(self) -> None:
        for name, high in (("num_layers", MAX_LAYERS), ("num_kv_heads", 1024), ("head_dim", 1024)):
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
        if self.window_layers:
            self._check_window_layers()
        if self.version != LAYOUT_VERSION:
            raise ValueError(f"layout version is {self.version}; this build speaks {LAYOUT_VERSION}")
        if self.block_bytes < NONCE_BYTES:
            raise ValueError(f"a block of {self.block_bytes} bytes is smaller than the {NONCE_BYTES}-byte nonce")

    def _check_window_layers(self) -> None:
        layers = self.window_layers
        if not self.window_tokens:
            raise ValueError("window_layers are given and window_tokens is 0; allowed is both or neither")
        if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.num_layers:
            raise ValueError(f"window_layers are {layers}; allowed are ascending numbers in 0..{self.num_layers - 1}")
        if len(layers) == self.num_layers:
            raise ValueError("window_layers are all layers; allowed is none of them where every layer has a window")
        if not 1 <= self.window_share <= WINDOW_SHARE:
            raise ValueError(f"window_share is {self.window_share}; allowed is 1..{WINDOW_SHARE}")

    @classmethod
    def of(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_tokens: int,
        kv_dtype: str,
        window_tokens: int = 0,
        window_layers: tuple[int, ...] = (),
        window_share: int = WINDOW_SHARE,
    ) -> KvLayout:
        """The layout of keys and values stored as `kv_dtype`, one of KV_DTYPES."""
        quantized = kv_dtype in QUANTIZATIONS
        return cls(
            num_layers, num_kv_heads, head_dim, block_tokens, SCALE_DTYPE if quantized else KvDtype(kv_dtype),
            kv_dtype if quantized else NOT_QUANTIZED, window_tokens=window_tokens, window_layers=window_layers,
            window_share=window_share,
        )  # fmt: skip

    @property
    def grouped(self) -> bool:
        """Whether some layers lie in window blocks."""
        return bool(self.window_layers)

    @property
    def full_group(self) -> KvLayout:
        """The layout of blocks as if the layers that read all keys were all; itself, where there are no groups."""
        if not self.grouped:
            return self
        return replace(
            self, num_layers=self.block_layers, window_tokens=0, window_layers=(), window_share=WINDOW_SHARE
        )  # fmt: skip

    @property
    def window_group(self) -> KvLayout:
        """The layout of window blocks as if the layers with a window were all. Raises ValueError without groups."""
        if not self.grouped:
            raise ValueError("the layout has no window blocks")
        return replace(self, num_layers=len(self.window_layers), window_layers=(), window_share=WINDOW_SHARE)

    @property
    def block_layers(self) -> int:
        """Layers in a block."""
        return self.num_layers - len(self.window_layers)

    def place_of(self, layer: int) -> tuple[bool, int]:
        """Whether a layer lies in window blocks, and which one in its block it is, from 0."""
        before = sum(other < layer for other in self.window_layers)
        return (True, before) if layer in self.window_layers else (False, layer - before)

    @property
    def window_reach(self) -> int:
        """The most blocks that the window of a token touches, and one more to write; 0 where none has a window."""
        return (self.window_tokens + self.block_tokens - 2) // self.block_tokens + 2 if self.window_tokens else 0

    def num_window_blocks(self, num_blocks: int) -> int:
        """Usable window blocks beside `num_blocks` usable blocks; the null one comes on top. 0 without groups."""
        if not self.grouped:
            return 0
        return min(num_blocks, max(-(-num_blocks // self.window_share), 2 * self.window_reach))

    def sizes(self, num_blocks: int) -> ArenaSizes:
        """Of an arena with `num_blocks` usable blocks."""
        if not self.grouped:
            return ArenaSizes(num_blocks, self.block_bytes)
        window_blocks = self.num_window_blocks(num_blocks)
        return ArenaSizes(num_blocks, self.block_bytes, window_blocks, self.window_group.block_bytes)

    def window_offset(self, num_blocks: int) -> int:
        """Bytes from the start of an arena to its window blocks, the null one first."""
        return self.sizes(num_blocks).window_offset

    def blocks_in(self, num_bytes: int) -> int:
        """The most usable blocks that lie, with their window blocks, in so many bytes; the null ones come on top."""
        if not self.grouped:
            return num_bytes // self.block_bytes
        window_bytes, low, high = self.window_group.block_bytes, 0, num_bytes // self.block_bytes
        while low < high:
            count = (low + high + 1) // 2
            fits = count * self.block_bytes + self.num_window_blocks(count) * window_bytes <= num_bytes
            low, high = (count, high) if fits else (low, count - 1)
        return low

    @property
    def bytes_per_block(self) -> float:
        """Bytes of a block and of its share of window blocks, on the average of a large arena."""
        return self.block_bytes + (self.window_group.block_bytes / self.window_share if self.grouped else 0)

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
        return self.block_layers * 2 * self.num_kv_heads * self.block_tokens * self.head_dim * self.element_bytes

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block: [layer, k|v, kv_head, token, head_dim]."""
        return (self.block_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim)

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
        """Bytes of keys and values, scales included, that one token takes over all layers, of both groups."""
        return self.num_layers * self._layer_token_bytes

    @property
    def _layer_token_bytes(self) -> int:
        row = self.head_dim * self.element_bytes + (self.dtype.itemsize if self.quantized else 0)
        return 2 * self.num_kv_heads * row

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_layers * self._layer_token_bytes * self.block_tokens

    def arena_bytes(self, num_blocks: int) -> int:
        """Bytes of an arena with `num_blocks` usable blocks, and its window blocks; the null ones come on top."""
        return self.sizes(num_blocks).arena_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def fingerprint(self) -> bytes:
        """16 bytes that are equal exactly when two layouts are equal."""
        fields = struct.pack("<5I", self.version, self.num_layers, self.num_kv_heads, self.head_dim, self.block_tokens)
        window = f"/window {self.window_tokens}" if self.window_tokens else ""
        if self.grouped:
            window += f" of layers {','.join(map(str, self.window_layers))}, 1:{self.window_share}"
        text = f"{self.dtype.value}/{self.quantization}{window}".encode()
        return hashlib.blake2b(fields + text, digest_size=16, person=b"tessera-layout").digest()
