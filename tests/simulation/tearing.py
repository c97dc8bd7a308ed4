"""A journal in which a daemon may die between any two stores, and in the middle of one over many blocks.

A store that is torn has done its first half; then `Torn` goes up through the core, whose state is lost with the daemon.
What is left is what a kill -9 at that instant leaves. Called by `world.py`, armed by the faults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cachemgr.journal import IndexJournal


class Torn(BaseException):
    """The daemon has died in the middle of an operation. No handler of the core's may catch it."""


class _Watched(np.ndarray[Any, np.dtype[Any]]):
    """A column whose stores are counted; `is_over` says whether the daemon dies in this one."""

    is_over: Callable[[], bool] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.is_over is None or not self.is_over():
            super().__setitem__(key, value)
            return
        places = np.flatnonzero(key) if getattr(key, "dtype", None) == np.bool_ else np.atleast_1d(key)
        half = len(places) // 2
        if half:
            many = isinstance(value, np.ndarray) and value.ndim > 0 and len(value) == len(places)
            super().__setitem__(places[:half], value[:half] if many else value)
        raise Torn


class TearingJournal(IndexJournal):
    """`tear_in(n)`: the daemon dies in the n-th store from now on; 0 never."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        super().__init__(memory)
        self._stores_left = 0
        for name in ("checksums", "_holders", "_windows", "_items", "rows"):
            column = getattr(self, name).view(_Watched)
            column.is_over = self._count
            setattr(self, name, column)

    def tear_in(self, stores: int) -> None:
        """Arms it."""
        self._stores_left = stores

    def _count(self) -> bool:
        if not self._stores_left:
            return False
        self._stores_left -= 1
        return not self._stores_left
