"""Which blocks of a sequence no layer with a window reads any more. The decoder's half of `cachemgr/windows.py` and
`groups.py`: pure arithmetic.

Where every layer has a window, the cache manager takes what a sequence has passed; where others read all keys, it
takes the window blocks of it. It says nothing of either: the table, and the mirror of window blocks, name them
still, and no kernel looks at them. Called by the scheduler, and where a decoder presents what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Windows:
    """`tokens` are the most keys that a query reads in a layer with a window, its own included; 0: none has one that
    counts. `grouped`: other layers read all keys, so that blocks stay held, and only window blocks go."""

    tokens: int
    block_tokens: int
    grouped: bool = False

    def passed_by(self, num_computed: int) -> int:
        """Leading blocks of a sequence that no layer with a window reads for a token after the first `num_computed`."""
        # Of what is computed a sequence holds the last whole block; its window block it need not.
        widest = self.tokens if self.grouped else max(self.tokens, self.block_tokens + 1)
        return max(0, num_computed + 1 - widest) // self.block_tokens if self.tokens else 0

    def gone_by(self, num_computed: int) -> int:
        """Leading blocks that a sequence holds no more when it has computed so many tokens."""
        return 0 if self.grouped else self.passed_by(num_computed)

    def fit(self, num_blocks: int) -> bool:
        """Whether a sequence may be longer than a pool of so many blocks: a window, and a block to write, fit."""
        if self.grouped or not self.tokens:
            return False
        return (self.tokens + self.block_tokens - 2) // self.block_tokens + 2 <= num_blocks
