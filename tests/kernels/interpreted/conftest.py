"""These tests need kernels that run: under Triton's interpreter (TRITON_INTERPRET=1), or on a CUDA device.

The interpreter has to be chosen before triton is imported, so `tests/kernels/test_interpreter.py` starts them in a
process of their own.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]


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
