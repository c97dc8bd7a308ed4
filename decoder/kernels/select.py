"""Which form of an operation computes: the one place. `<operation>/triton.py` on a GPU, `<operation>/cpu.py` elsewhere.

Both have the same calls. Tokens are sampled on a CPU by `decoder/sampler.py`. The fused step of a CPU (`step.py`) calls
no form: it runs the kernels that the CPU forms run.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch

from common.errors import Internal

OPERATIONS: Final = (
    "kv_write", "paged_prefill", "paged_decode", "block_copy", "block_pack", "block_scrub", "norm", "activation",
)  # fmt: skip


def operation(name: str, device: torch.device, *, interpreted: bool = False) -> Any:
    """The module with the calls of an operation for tensors on `device`; `interpreted` takes Triton's on a CPU (tests).

    Raises Internal for an operation that there is not. Triton is imported only where it is used.
    """
    if name not in OPERATIONS:
        raise Internal(f"there is no operation {name!r}; there are {', '.join(OPERATIONS)}")
    form = "triton" if device.type == "cuda" or interpreted else "cpu"
    return importlib.import_module(f"decoder.kernels.{name}.{form}")
