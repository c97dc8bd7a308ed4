"""How much memory keys and values take: the arithmetic of `tessera plan`. Pure; bytes come from `KvLayout` alone.

The two textbook formulas stand beside the exact count, so that a reader can see what blocks and scales add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.layout import KvLayout


def textbook_bytes(
    batch: int, num_layers: int, positions: int, num_kv_heads: int, head_dim: int, itemsize: float
) -> int:
    """`2 x batch x layers x positions x kv heads x head size x element size` (keys and values; grouped queries)."""
    return round(2 * batch * num_layers * positions * num_kv_heads * head_dim * itemsize)


def textbook_bytes_of_width(batch: int, num_layers: int, positions: int, width: int, itemsize: float) -> int:
    """`2 x batch x layers x positions x model width x element size`: each query head has its own keys and values."""
    return round(2 * batch * num_layers * positions * width * itemsize)


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """What one sequence of `context` tokens takes with one layout. All figures are bytes, but `blocks`."""

    token_bytes: float
    blocks: int
    sequence_bytes: int
    rounding_bytes: int


def sequence_cost(layout: KvLayout, context: int) -> SequenceCost:
    """The cost of `context` tokens, at least 1: whole blocks, scales of quantised layouts included."""
    if context < 1:
        raise ValueError(f"context is {context}; allowed is 1 or more")
    blocks = layout.blocks_for(context)
    taken = blocks * layout.block_bytes
    per_token = layout.block_bytes / layout.block_tokens
    return SequenceCost(per_token, blocks, taken, taken - round(context * per_token))


def blocks_in_window(layout: KvLayout, context: int, window: int | None) -> int:
    """Blocks with a key that the last of `context` tokens sees, of the last `window` ones; None sees all."""
    first = 0 if window is None else max(0, context - window)
    return (context - 1) // layout.block_tokens - first // layout.block_tokens + 1


def grouped_bytes(layout: KvLayout, context: int, windows: Sequence[int | None]) -> int:
    """What a sequence would take if each layer, with its window, kept only the blocks that it can still read.

    No arena is laid out so: it would take a block table for each group of layers.
    """
    per_layer = layout.block_bytes // layout.num_layers
    return sum(blocks_in_window(layout, context, window) * per_layer for window in windows)


def sequences_that_fit(layout: KvLayout, context: int, pool_bytes: int) -> int:
    """Sequences of `context` tokens, none sharing a block, that `pool_bytes` hold beside the null block."""
    return _usable_blocks(layout, pool_bytes) // layout.blocks_for(context)


def tokens_that_fit(layout: KvLayout, pool_bytes: int) -> int:
    """Tokens of the longest sequence that `pool_bytes` hold beside the null block."""
    return _usable_blocks(layout, pool_bytes) * layout.block_tokens


def _usable_blocks(layout: KvLayout, pool_bytes: int) -> int:
    return max(0, pool_bytes // layout.block_bytes - 1)


def with_kv_heads(layout: KvLayout, num_kv_heads: int) -> KvLayout:
    """The same layout for another number of key and value heads."""
    return replace(layout, num_kv_heads=num_kv_heads)
