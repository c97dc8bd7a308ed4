"""The two clocks of the daemon, so that tests can pass their own. Made in `__main__`; nothing else reads the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """`steady_ns` never jumps and is shared by all processes of the node; `wall_ns` counts from 1970."""

    steady_ns: Callable[[], int] = time.monotonic_ns
    wall_ns: Callable[[], int] = time.time_ns
