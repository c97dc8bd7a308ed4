"""Loaded by the interpreter of a process under test whose PYTHONPATH has this folder: its wall clock is off by as many
seconds as the file that WALL_CLOCK_OFFSET names says at that moment. Only `time.time_ns` is changed: that is the wall
clock of the cache manager (`cachemgr/clocks.py`), the only process that decides by one."""

from __future__ import annotations

import os
import time
from pathlib import Path

_OFFSET = Path(os.environ["WALL_CLOCK_OFFSET"])
_true_time_ns = time.time_ns


def _time_ns() -> int:
    return _true_time_ns() + int(_OFFSET.read_text() or 0) * 1_000_000_000


time.time_ns = _time_ns
