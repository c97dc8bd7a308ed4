"""Blocks that the daemon lent ahead of need. Owns which credit blocks are unused and what has been asked for.

Invariant: a block handed to a sequence or returned is never in here again unless granted again; at most one ask is
on its way. Called by the scheduler (take) and the engine (grant, ask, give back); never waits and never sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

SLACK_BLOCKS: Final = 4  # unused blocks above twice the need that are kept, so that need may wobble without messages
AHEAD_STEPS: Final = 8  # steps whose need is asked for ahead
LEAN_STEPS: Final = 64  # steps after a reclaim in which nothing is asked for ahead

_NONE = np.empty(0, np.int32)


class Credit:
    """The session's unused credit."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: the session is new or gone."""
        self._blocks: list[int] = []
        self._asked = 0
        self._asked_in_need = False
        self._strays: list[int] = []  # lent to a sequence that is over: nobody else may take them
        self._reclaim = 0
        self._lean = 0
        self._is_away = False
        self._is_short = False  # the last ask brought less than asked, and nothing came back since
        self.is_refused = False  # so did an ask that was made while a sequence stood still for want of a block

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def is_asking(self) -> bool:
        """Whether an ask is on its way, or cannot be sent while the stream is broken: no reason to preempt anybody."""
        return self._asked > 0 or self._is_away

    @property
    def is_lean(self) -> bool:
        """Whether the daemon wanted blocks back not long ago."""
        return self._lean > 0

    @property
    def ahead_steps(self) -> int:
        """How many steps ahead need is to be counted."""
        return 1 if self._lean else AHEAD_STEPS

    @property
    def blocks(self) -> NDArray[np.int32]:
        """The unused blocks, int32, those that are about to be returned included."""
        return np.array(self._blocks + self._strays, np.int32)

    def leave(self) -> None:
        """The stream is broken: what was asked for is not answered, and nothing can be asked for until `come_back`."""
        self._is_away = True
        self._asked = self._reclaim = 0

    def come_back(self) -> None:
        """The session goes on with the blocks that are here."""
        self._is_away = False
        self.room_changed()

    def take(self) -> int | None:
        """One block for a sequence, or None."""
        return self._blocks.pop() if self._blocks else None

    def grant(self, blocks: Iterable[int]) -> None:
        """Blocks that came with a message."""
        self._blocks.extend(blocks)

    def send_back(self, blocks: Iterable[int]) -> None:
        """Blocks that came for one sequence alone, which is over."""
        self._strays.extend(blocks)

    def answered(self, asked: int, granted: int, *, may_follow: bool = False) -> None:
        """The ask for `asked` blocks (0: none) brought `granted`. `may_follow` says that the next one may bring some
        where this brought none: single sequences were lent theirs, or duplicates go back with it."""
        if asked:
            self._is_short = granted < asked
            self.is_refused = self._is_short and self._asked_in_need and not may_follow
            self._asked = 0

    def room_changed(self) -> None:
        """Blocks went back to the daemon, or time has passed: an ask may succeed again."""
        self._is_short = False
        self.is_refused = False

    def reclaim(self, num_blocks: int) -> None:
        """The daemon wants up to `num_blocks` unused blocks back."""
        self._reclaim += num_blocks
        self._lean = LEAN_STEPS

    def settle(self, need: int, *, in_need: bool) -> tuple[int, NDArray[np.int32]]:
        """How many blocks to ask for now, and which to return (int32); at most one of the two is not empty.

        `need` blocks are wanted soon; `in_need` says that a sequence stands still for want of one.
        """
        self._lean = max(0, self._lean - 1)
        if self._strays:
            returned, self._strays = np.array(self._strays, np.int32), []
            return 0, returned
        give_back = min(self._reclaim, len(self._blocks))
        self._reclaim = 0
        if need == 0:
            give_back = len(self._blocks)
        elif len(self._blocks) > 2 * need + SLACK_BLOCKS:
            give_back = max(give_back, len(self._blocks) - need)
        if give_back:
            keep = len(self._blocks) - give_back
            returned = np.array(self._blocks[keep:], np.int32)
            del self._blocks[keep:]
            return 0, returned
        ask = need - len(self._blocks)
        if ask <= 0 or self._asked or self.is_refused or (self._is_short and not in_need):
            return 0, _NONE
        self._asked, self._asked_in_need = ask, in_need
        return ask, _NONE
