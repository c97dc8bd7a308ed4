"""What published blocks hold, looked up when a subscriber asks: nothing of it is kept in the event log.

Invariant: the answer is about the very blocks that the event published, or there is none: the last of them is still
listed, with the generation that it had then, and of whatever is listed the tokens of all before it are known. Changes
nothing but cached names of nodes. Called by `CacheManager` for the admin service.
"""

from __future__ import annotations

from dataclasses import dataclass

from cachemgr.events import Event
from cachemgr.ids import NodeId
from cachemgr.names import chain, node_name, root_seed
from cachemgr.nodes import Node
from cachemgr.state import CacheState


@dataclass(frozen=True, slots=True)
class PublishedBlocks:
    """`name` of the last block, lower-case hexadecimal; packed int32 `tokens` of all."""

    name: str
    tokens: bytes


def published_blocks(state: CacheState, event: Event) -> PublishedBlocks | None:
    """See `CacheManager.published_blocks`."""
    if not len(event.blocks):
        return None
    last = int(event.blocks[-1])
    if not state.pool.published[last] or int(state.pool.generation[last]) != event.generation:
        return None
    size, forest = state.index.block_bytes, state.index.forest
    node = forest.nodes[NodeId(int(forest.node_of[last]))]
    place = int(forest.position[last]) - node.start
    name = _name_in(node, place, size)
    return PublishedBlocks(name.hex(), _tokens_before(node, place + 1, len(event.blocks), size))


def _tokens_before(node: Node, end: int, count: int, size: int) -> bytes:
    """Those of `count` blocks of a path, up to the block before place `end` of a node."""
    pieces: list[bytes] = []
    step: Node | None = node
    while count > 0 and step is not None:
        taken = min(count, end)
        pieces.append(step.edge[(end - taken) * size : end * size])
        count -= taken
        step = step.parent
        end = 0 if step is None else len(step.blocks)
    return b"".join(reversed(pieces))


def _name_in(node: Node, place: int, size: int) -> bytes:
    """The name of the block at `place` of a node."""
    if place == len(node.blocks) - 1:
        return node_name(node, size)
    name = b"" if node.parent is None else node_name(node.parent, size)
    seed = root_seed(node.tree.root_key)
    for offset in range(0, (place + 1) * size, size):
        name = chain(name, node.edge[offset : offset + size], seed)
    return name
