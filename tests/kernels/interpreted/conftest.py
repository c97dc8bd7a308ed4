"""These tests run Triton's kernels, interpreted (TRITON_INTERPRET=1) or on a CUDA device; else the CPU's forms.

The interpreter has to be chosen before triton is imported, so `tests/kernels/test_interpreter.py` starts them in a
process of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent
ONLY_TRITON = [
    "test_bench_work.py", "test_device_adapters.py", "test_device_ahead.py", "test_device_experts.py",
    "test_device_groups.py", "test_device_model.py", "test_device_sharing.py", "test_device_storage.py", "test_lora.py",
    "test_mixture.py", "test_sample.py", "test_shared_prefix_decode.py",
]  # fmt: skip
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ONLY_TRITON


def compute_bfloat16_as_hardware_does() -> None:
    """Mend two things of the interpreter, which keeps bfloat16 as its bits.

    Its matrix product multiplies those bits as integers: widen them first; a float32 product of widened numbers,
    summed in float32, is what the hardware computes. It cuts float32 off to bfloat16: round to even instead.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    product, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(self, widen(a), widen(b), *rest)

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
        return rounded.view(torch.uint16).numpy()

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._convert_float = convert_float


if INTERPRETED:
    compute_bfloat16_as_hardware_does()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The CPU's forms are compiled for each type of keys and values; all but float32 are slow tests."""
    if INTERPRETED or torch.cuda.is_available():
        return
    for item in items:
        if item.path.parent == HERE and any(word in item.name for word in ("quantised", "narrow", "e4m3")):
            item.add_marker(pytest.mark.slow)
