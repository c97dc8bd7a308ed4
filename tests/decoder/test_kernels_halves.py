"""float16 on a CPU that cannot convert it itself: as exact as elsewhere, or refused, and never a call of address 0."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys

import pytest

from common.errors import FailedPrecondition
from decoder.kernels.halves import provide_conversions
from decoder.models import kernel_choice

PLAIN = {"sse2": True, "avx2": False, "f16c": False}

# Takes its CPU for a plain x86-64; with an argument it finds no library.
_PROGRAM = """
import ctypes
import sys

import llvmlite.binding as llvm
import numpy as np

features = llvm.get_host_cpu_features()
features.update((name, name in ("sse", "sse2", "cx8", "fxsr", "cmov", "64bit")) for name in list(features))
llvm.get_host_cpu_features = llvm.targets.get_host_cpu_features = lambda: features
if len(sys.argv) > 1:
    ctypes.CDLL = lambda name: None

from decoder.kernels import simd
from decoder.kernels.compiled import entry

@entry
def there_and_back(source, floats, target):
    for index in range(0, 1 << 16, 16):
        vector = simd.load_f16(source + index * 2)
        simd.store_floats(floats + index * 4, vector)
        simd.store_f16(target + index * 2, vector)

print(simd.CONVERTS_FLOAT16, flush=True)
bits = np.arange(1 << 16, dtype=np.uint16)
floats, again = np.zeros(1 << 16, np.float32), np.zeros(1 << 16, np.uint16)
there_and_back(bits.ctypes.data, floats.ctypes.data, again.ctypes.data)
want = bits.view(np.float16).astype(np.float32)
assert np.array_equal(floats, want, equal_nan=True)
assert np.array_equal(again[np.isfinite(want)], bits[np.isfinite(want)])
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs convert float16 themselves")
def test_every_float16_is_converted_on_a_plain_cpu() -> None:
    """All finite numbers there and back, infinities and NaN there. Where nothing has the conversions it is known."""
    if not provide_conversions(PLAIN):
        pytest.skip("no libgcc_s of GCC 12 or later here")
    done = _run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    control = _run("without")
    assert (control.returncode, control.stdout) == (-signal.SIGSEGV, "False\n")


def test_who_lacks_the_conversions_is_told_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types that need no float16 go on; a CPU that converts, or is no x86, needs no library."""
    for features in ({"sse2": True, "f16c": True}, {"neon": True}):
        assert provide_conversions(features, ())
    monkeypatch.setattr(kernel_choice, "CONVERTS_FLOAT16", False)
    for kv_dtype, grouped in (("float16", False), ("fp8_e4m3", False), ("float32", True)):
        with pytest.raises(FailedPrecondition, match=r"F16C.*--kv-dtype bfloat16"):
            kernel_choice.choose_kernels(kv_dtype, bfloat16=True, grouped=grouped, head_dim=64)
    for kv_dtype in ("float32", "bfloat16", "int8"):
        kernel_choice.choose_kernels(kv_dtype, bfloat16=True, head_dim=64)
