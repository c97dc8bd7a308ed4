"""Names of blocks: xxh3-128, chained along the prefix and seeded per root. They name, they never authorise.

Invariant: equal names of different blocks change nothing but a counter. At full width names are computed when somebody
looks; the weak-hash test mode keeps the shortened name of every published block and counts those that collide. Called
by the manager's modules and the views.
"""

from __future__ import annotations

from typing import Final

import xxhash

from cachemgr.ids import BlockRun
from cachemgr.nodes import Node

FULL_BITS: Final = 128
NAME_BYTES: Final = 16


def chain(previous: bytes, tokens: bytes, seed: int) -> bytes:
    """The name (16 bytes) of a block that holds `tokens` after the block named `previous`."""
    return xxhash.xxh3_128_digest(previous + tokens, seed)


def root_seed(root_key: bytes) -> int:
    """The seed of a root's names."""
    return int.from_bytes(root_key[:8], "little")


def node_name(node: Node, block_bytes: int) -> bytes:
    """The name of a node's last block; computed once and kept in the node."""
    path: list[Node] = []
    step: Node | None = node
    while step is not None and not step.name and step.parent is not None:
        path.append(step)
        step = step.parent
    name = step.name if step is not None else b""
    seed = root_seed(node.tree.root_key)
    for step in reversed(path):
        for offset in range(0, len(step.edge), block_bytes):
            name = chain(name, step.edge[offset : offset + block_bytes], seed)
        step.name = name
    return name


class WeakNames:
    """The test mode: names cut to `bits` (1..127) for every published block, and how often one was taken already."""

    def __init__(self, bits: int, block_bytes: int) -> None:
        self.collisions = 0
        self._mask = (1 << bits) - 1
        self._block_bytes = block_bytes
        self._names: dict[int, bytes] = {}
        self._uses: dict[int, int] = {}

    def add(self, root_key: bytes, previous: int, tokens: bytes, blocks: BlockRun) -> None:
        """Names published blocks that hold `tokens` after block `previous` (0 at the start)."""
        seed = root_seed(root_key)
        name = self._names.get(previous, b"")
        for index, block in enumerate(blocks.tolist()):
            name = chain(name, tokens[index * self._block_bytes : (index + 1) * self._block_bytes], seed)
            self._names[block] = name
            weak = self._weaken(name)
            others = self._uses.get(weak, 0)
            self.collisions += others > 0
            self._uses[weak] = others + 1

    def discard(self, blocks: BlockRun) -> None:
        """Forgets blocks that are published no more."""
        for block in blocks.tolist():
            self._uses[self._weaken(self._names.pop(block))] -= 1

    def _weaken(self, name: bytes) -> int:
        return int.from_bytes(name, "little") & self._mask
