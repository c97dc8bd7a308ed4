"""How many tokens to guess ahead for one sequence. Owns the answer to "is guessing worth it here?".

Invariant: 0 <= length <= the request's bound. It grows where every guess was right, shrinks to what was right, and is 0
for a while where guesses were wrong again and again; each such rest is twice as long as the one before. It changes
when tokens come and never which. Called by the speculator.
"""

from __future__ import annotations

from typing import Final

FIRST_LENGTH: Final = 4
MAX_MISSES: Final = 3  # steps in a row without one right guess
FIRST_REST: Final = 16  # steps
LONGEST_REST: Final = 256


class DraftPace:
    """The pace of one sequence. `bound` is the most tokens that its request allows, >= 1."""

    __slots__ = ("_bound", "_length", "_misses", "_rest", "_resting")

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._length = min(FIRST_LENGTH, bound)
        self._misses = 0
        self._rest = FIRST_REST
        self._resting = 0

    @property
    def length(self) -> int:
        """Tokens to guess in the next step."""
        return 0 if self._resting else self._length

    def passed(self) -> None:
        """A step went by in which nothing was guessed."""
        self._resting = max(0, self._resting - 1)

    def record(self, drafted: int, accepted: int) -> None:
        """Of `drafted` guessed tokens the first `accepted` were right."""
        if accepted:
            self._misses = 0
            self._rest = FIRST_REST
            self._length = min(self._bound, 2 * self._length if accepted == drafted else accepted + 1)
            return
        self._length = max(1, self._length // 2)
        self._misses += 1
        if self._misses >= MAX_MISSES:
            self._misses = 0
            self._resting, self._rest = self._rest, min(LONGEST_REST, 2 * self._rest)
