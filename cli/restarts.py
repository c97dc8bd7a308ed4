"""When a process that died may start again: a longer wait after each crash, and an end after too many in a short time.

Pure: the time is passed in. The supervisor keeps one policy object per child.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """first_delay_seconds doubles with each crash up to max_delay_seconds; more than max_crashes within window_seconds
    is the end. A child that lived longer than window_seconds starts afresh."""

    first_delay_seconds: float = 0.25
    max_delay_seconds: float = 8.0
    max_crashes: int = 5
    window_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Refuse limits that mean nothing."""
        if (
            not 0 < self.first_delay_seconds <= self.max_delay_seconds
            or self.max_crashes < 0
            or self.window_seconds <= 0
        ):
            raise ValueError(f"restart limits make no sense: {self}")


@dataclass(slots=True)
class RestartHistory:
    """The recent crashes of one child."""

    limits: RestartLimits
    _crashes: deque[float] = field(default_factory=deque)

    def next_delay(self, now_seconds: float) -> float | None:
        """Record a crash; the seconds to wait before the next start, or None if it has crashed too often."""
        while self._crashes and now_seconds - self._crashes[0] > self.limits.window_seconds:
            self._crashes.popleft()
        self._crashes.append(now_seconds)
        if len(self._crashes) > self.limits.max_crashes:
            return None
        doubled: float = self.limits.first_delay_seconds * 2.0 ** (len(self._crashes) - 1)
        return min(doubled, self.limits.max_delay_seconds)
