"""The shadow memory: what every slot of every block holds, whatever the cache manager believes.

A cell names everything that the keys and values of a token depend on, the root of its tree and all tokens up to it, and
whose it is. So a wrong share, a stale block, a lost copy or a block that was freed too early is seen as a wrong cell by
whoever reads it. What a tenant had in a wider scope becomes its own by a copy, or where its sequence is cut inside the
prefix: its own blocks may hold such cells. 0 is a zeroed slot, a negative cell is one whose block was freed since.
Called by decoders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cachemgr.ids import BlockRun
from tests.simulation.kernel import Violation

PUBLIC, TEAM = SCOPES = (60, 61)
TEAM_MEMBERS = (1, 2)
_OWNER_BITS = 6
_MASK = (1 << 58) - 1


def root_cell(owner: int, root: bytes) -> int:
    """What stands before the first token of a root of `owner` (1..63)."""
    return extend(int.from_bytes(root[:7], "little") << _OWNER_BITS | owner, -1)


def extend(cell: int, token: int) -> int:
    """The cell of `token` after `cell`."""
    mixed = ((cell >> _OWNER_BITS) * 6364136223846793005 + 2 * token + 1442695040888963407) & _MASK
    return (mixed ^ mixed >> 31) << _OWNER_BITS | cell & (1 << _OWNER_BITS) - 1


def cells_of(cell: int, tokens: Iterable[int]) -> list[int]:
    """The cells of `tokens` after `cell`."""
    cells = []
    for token in tokens:
        cell = extend(cell, token)
        cells.append(cell)
    return cells


def labelled(cell: int, owner: int) -> int:
    """The same content, of another owner."""
    return cell >> _OWNER_BITS << _OWNER_BITS | owner


def may_hold(owner: int) -> set[int]:
    """Whose content the blocks of an owner may hold beside its own."""
    return set() if owner in SCOPES else {PUBLIC, TEAM} if owner in TEAM_MEMBERS else {PUBLIC}


def fits(found: int, wanted: int) -> bool:
    """Whether a cell may stand where another is wanted."""
    return found == wanted or (
        found > 0 and found >> _OWNER_BITS == wanted >> _OWNER_BITS and owner_of(found) in may_hold(owner_of(wanted))
    )


def owner_of(cell: int) -> int:
    """Whose content a cell is, freed or not; 0 for a zeroed slot."""
    return abs(cell) & (1 << _OWNER_BITS) - 1


class Memory:
    """Blocks 1..num_blocks of `block_tokens` slots."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.blocks: list[list[int]] = [[0] * block_tokens for _ in range(num_blocks + 1)]

    def freed(self, blocks: BlockRun) -> None:
        """The manager has freed these: their content is nobody's from now on."""
        for block in blocks.tolist():
            self.blocks[block] = [-abs(cell) for cell in self.blocks[block]]

    def read(self, table: Sequence[int], cells: Sequence[int], begin: int, end: int, who: str) -> None:
        """Reads tokens `begin`..`end` through a table; raises Violation unless they are `cells`."""
        size, blocks = self.block_tokens, self.blocks
        for start in range(begin - begin % size, end, size):
            first, count = max(0, begin - start), min(size, end - start)
            found = blocks[table[start // size]]
            if found[first:count] == cells[start + first : start + count]:
                continue
            slot = next((slot for slot in range(first, count) if not fits(found[slot], cells[start + slot])), None)
            if slot is not None:
                raise Violation(
                    f"{who} reads wrong content at token {start + slot}, block {table[start // size]}: "
                    f"{self._describe(found[slot], cells[start + slot])}"
                )

    def write(self, block: int, slot: int, cell: int) -> None:
        """Writes one slot."""
        self.blocks[block][slot] = cell

    def copy(self, source: int, target: int, count: int) -> None:
        """The first `count` slots of `source` go to `target`."""
        self.blocks[target][:count] = self.blocks[source][:count]

    def scrub(self, blocks: Iterable[int]) -> None:
        """Zeroes blocks."""
        for block in blocks:
            self.blocks[block] = [0] * self.block_tokens

    def strangers(self, block: int, owner: int) -> set[int]:
        """Other owners whose content is in a block that `owner` begins to use."""
        return {owner_of(cell) for cell in self.blocks[block]} - {0, owner} - may_hold(owner)

    @staticmethod
    def _describe(found: int, wanted: int) -> str:
        if not found:
            return "never written"
        state = "freed content" if found < 0 else "content"
        return f"{state} of owner {owner_of(found)}, wanted is owner {owner_of(wanted)}'s"
