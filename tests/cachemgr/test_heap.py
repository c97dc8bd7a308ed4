"""Where large arrays of the daemon lie."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import numpy as np
from cachemgr.heap import give_large_arrays_back
if sys.argv[1] == "set":
    give_large_arrays_back()
once = np.empty(16 << 20, np.uint8)
del once  # now the C library would take smaller ones from its heap
array = np.empty(8 << 20, np.uint8)  # more than any room that the heap has by now
address = array.ctypes.data
for line in open("/proc/self/maps"):
    low, high = (int(part, 16) for part in line.split()[0].split("-"))
    if low <= address < high:
        print("heap" if "[heap]" in line else "own")
"""


@pytest.mark.parametrize(("argument", "place"), [("set", "own"), ("not", "heap")])
def test_large_arrays_lie_outside_the_heap(argument: str, place: str) -> None:
    """Also after one of them was freed; without the setting they would not, which is the control."""
    if "glibc" not in " ".join(platform.libc_ver()):
        pytest.skip("another C library decides otherwise")
    done = subprocess.run([sys.executable, "-c", PROGRAM, argument], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [place], done.stderr
