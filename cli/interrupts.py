"""Signals as a count that loops can ask: the first one asks to drain, the second to hurry."""

from __future__ import annotations

import signal
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """How often somebody asked this process to end. Make one in the main thread."""

    def __init__(self) -> None:
        self._count = 0
        for number in ENDING:
            signal.signal(number, self._receive)

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        self._count += 1

    def stopping(self) -> bool:
        """Whether it should drain."""
        return self._count > 0

    def hurry(self) -> bool:
        """Whether it should not even drain."""
        return self._count > 1
