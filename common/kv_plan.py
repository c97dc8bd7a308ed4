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
    """What one sequence of `context` tokens takes with one layout, while it runs. All figures are bytes, but `blocks`
    and `window_blocks`, those that hold a key which its next token sees; 0 where the layout has no groups."""

    token_bytes: float
    blocks: int
    window_blocks: int
    sequence_bytes: int
    rounding_bytes: int


def sequence_cost(layout: KvLayout, context: int) -> SequenceCost:
    """The cost of `context` tokens, at least 1: whole blocks, scales of quantised layouts included."""
    if context < 1:
        raise ValueError(f"context is {context}; allowed is 1 or more")
    blocks, windows = layout.blocks_for(context), window_blocks_held(layout, context)
    taken, exact = blocks * layout.block_bytes, context * layout.block_bytes / layout.block_tokens
    if layout.grouped:
        window_bytes = layout.window_group.block_bytes
        taken += windows * window_bytes
        exact += min(context, layout.window_tokens) * window_bytes / layout.block_tokens
    return SequenceCost(layout.token_bytes, blocks, windows, taken, taken - round(exact))


def window_blocks_held(layout: KvLayout, context: int) -> int:
    """The most window blocks that a running sequence of up to `context` tokens reads at once; 0 without groups."""
    return min(layout.blocks_for(context), layout.window_reach - 1) if layout.grouped else 0


def sequences_that_fit(layout: KvLayout, context: int, pool_bytes: int) -> int:
    """Sequences of `context` tokens, none sharing a block, that `pool_bytes` hold beside the null blocks."""
    usable = usable_blocks(layout, pool_bytes)
    fit = usable // layout.blocks_for(context)
    if layout.grouped and usable:
        fit = min(fit, layout.num_window_blocks(usable) // window_blocks_held(layout, context))
    return fit


def tokens_that_fit(layout: KvLayout, pool_bytes: int) -> int:
    """Tokens of the longest sequence that `pool_bytes` hold beside the null blocks."""
    return usable_blocks(layout, pool_bytes) * layout.block_tokens


def usable_blocks(layout: KvLayout, pool_bytes: int) -> int:
    """Blocks of the largest arena that takes no more than `pool_bytes`, null blocks included; at least 0."""
    count = layout.blocks_in(max(0, pool_bytes))
    # A null block of each kind, and where window blocks begin: that is less than three blocks more.
    while count > 0 and layout.arena_bytes(count) > pool_bytes:
        count -= 1
    return count


def bytes_for_one(layout: KvLayout, context: int) -> int:
    """Bytes of the smallest arena that holds a sequence of `context` tokens."""
    return layout.arena_bytes(layout.blocks_for(context))


def with_kv_heads(layout: KvLayout, num_kv_heads: int) -> KvLayout:
    """The same layout for another number of key and value heads."""
    return replace(layout, num_kv_heads=num_kv_heads)
