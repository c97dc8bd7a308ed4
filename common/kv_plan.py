"""How much memory keys and values take: the arithmetic of `tessera plan`. Pure; bytes come from `KvLayout` alone.

The two textbook formulas stand beside the exact count, so that a reader can see what blocks and scales add.
"""

from __future__ import annotations

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


def sequences_that_fit(layout: KvLayout, context: int, pool_bytes: int) -> int:
    """Sequences of `context` tokens, none sharing a block, that `pool_bytes` hold beside the null block."""
    usable = max(0, pool_bytes // layout.block_bytes - 1)
    return usable // layout.blocks_for(context)


def with_kv_heads(layout: KvLayout, num_kv_heads: int) -> KvLayout:
    """The same layout for another number of key and value heads."""
    return replace(layout, num_kv_heads=num_kv_heads)
