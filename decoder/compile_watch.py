"""Tells whether kernels are being compiled, and how many functions of them are: what a user waits for at a first start.

Numba tells of each function that it compiles and of none whose machine code it finds in its cache. Nobody knows
beforehand how many there will be. Used by `loading.py`; the clock is passed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from numba.core import event

_COMPILE: Final = "numba:compile"


class CompileWatch(event.Listener):  # type: ignore[misc,unused-ignore]
    """Watches the compiler while it is entered. `began` is called, on the compiler's thread, when the first function's
    turn comes."""

    def __init__(self, began: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._began = began
        self._clock = clock
        self._since: float | None = None
        self._running = 0
        self._functions = 0

    def __enter__(self) -> CompileWatch:
        event.register(_COMPILE, self)  # type: ignore[no-untyped-call,unused-ignore]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        event.unregister(_COMPILE, self)  # type: ignore[no-untyped-call,unused-ignore]

    def on_start(self, event: Any) -> None:
        """A function's turn; those that it calls have theirs meanwhile."""
        self._running += 1
        if self._since is None:
            self._since = self._clock()
            self._began()

    def on_end(self, event: Any) -> None:
        """It is compiled, or cannot be."""
        self._running -= 1
        self._functions += 1

    def progress(self) -> tuple[int, float] | None:
        """(functions compiled, seconds since the first began); None where nothing is being compiled now."""
        if self._since is None or not self._running:
            return None
        return self._functions, self._clock() - self._since
