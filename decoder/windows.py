"""Which blocks of a sequence no layer reads any more. The decoder's half of `cachemgr/windows.py`: pure arithmetic.

The cache manager takes what a sequence has passed, and says nothing of it: the table of the sequence names those blocks
still, and no kernel looks at them. Called by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Windows:
    """`tokens` are the most keys that a query reads, its own included; 0 means all."""

    tokens: int
    block_tokens: int

    def passed_by(self, num_computed: int) -> int:
        """Leading blocks of a sequence that no token after the first `num_computed` reads."""
        return max(0, num_computed + 1 - self.tokens) // self.block_tokens if self.tokens else 0

    def fit(self, num_blocks: int) -> bool:
        """Whether a sequence may be longer than a pool of so many blocks: a window, and a block to write, fit."""
        return self.tokens > 0 and (self.tokens + self.block_tokens - 2) // self.block_tokens + 2 <= num_blocks
