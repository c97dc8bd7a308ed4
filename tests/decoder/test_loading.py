"""Loading as others see it: what is compiled is told, and the end of the process waits for no compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numba
import pytest

from decoder.compile_watch import CompileWatch

ROOT = Path(__file__).resolve().parents[2]


def test_the_watch_counts_what_is_compiled_and_nothing_else() -> None:
    """It hears of the first function when its turn comes, of callees too, and of nothing that is compiled already."""
    inner = numba.njit(lambda x: x + 1)
    outer = numba.njit(lambda x: inner(x) * 2)
    seen: list[object] = []
    now = [7.0]
    with CompileWatch(began=lambda: seen.append(watch.progress()), clock=lambda: now[0]) as watch:
        assert watch.progress() is None
        assert outer(3) == 8
        assert seen == [(0, 0.0)]
        assert watch.progress() is None  # nothing is being compiled now
        now[0] = 9.5
        assert outer(4) == 10
        assert len(seen) == 1
        watch.on_start(None)  # as the compiler calls it
        assert watch.progress() == (2, 2.5)
        watch.on_end(None)
    numba.njit(lambda x: x - 1)(3)
    watch.on_start(None)
    assert watch.progress() == (3, 2.5)


@pytest.mark.parametrize("loads", [True, False])
def test_a_process_that_still_loads_ends_at_once(loads: bool) -> None:
    """`leave` skips the interpreter's own end, which would wait for what the compiler holds, and keeps the status;
    where nothing is being loaded the end is the usual one."""
    program = (
        "import atexit, sys, threading\n"
        "from decoder.loading import leave\n"
        "atexit.register(lambda: print('usual end'))\n"
        f"if {loads}: threading.Thread(target=threading.Event().wait, name='load', daemon=True).start()\n"
        "print('said before')\n"
        "sys.exit(leave(3))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout.splitlines() == ["said before", *([] if loads else ["usual end"])]
