"""How fast the queue moves: the times of the last admissions, and when a refused request may try again.

A pure function of the times that it is given; called by the intake. The hint is the time in which, at the rate of the
last `WINDOW` admissions up to now, half of what waits now is admitted: then there is room, and not only for one.
"""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW: Final = 32
FEW: Final = 8
UNKNOWN_SECONDS: Final = 1.0  # at least so long while fewer than FEW were admitted
LEAST_SECONDS: Final = 0.1
MOST_SECONDS: Final = 60.0


class ServiceRate:
    """The last admissions of one decoder."""

    def __init__(self) -> None:
        self._times: deque[int] = deque(maxlen=WINDOW)

    def admitted(self, now_ns: int) -> None:
        """A request was admitted for the first time."""
        self._times.append(now_ns)

    def retry_seconds(self, waiting: int, now_ns: int) -> float:
        """When to try again, with so many requests waiting; between LEAST_SECONDS and MOST_SECONDS."""
        if not self._times:
            return UNKNOWN_SECONDS
        least = LEAST_SECONDS if len(self._times) >= FEW else UNKNOWN_SECONDS
        seconds_each = (now_ns - self._times[0]) / 1e9 / len(self._times)
        return min(max(seconds_each * waiting / 2, least), MOST_SECONDS)
