"""What a GPU kernel is compiled for ahead: one case, the targets, and the names of element types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

TARGETS: Final = ("80", "90", "100", "gfx942")
NAMES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Case:
    """One kernel with one set of compile-time parameters, for one target."""

    target: str
    operation: str
    label: str
    kernel: Any
    constants: dict[str, Any]
    element: str
    stored: str
    warps: int
    stages: int
    registers: int = 0
    """Most registers of a thread; 0 leaves them to the assembler."""

    @property
    def name(self) -> str:
        """A name for a test or a row."""
        return f"{self.operation}-{self.label}-{self.target}"


def capability(target: str) -> int:
    """The number that `choose_config` takes."""
    return int(target) if target.isdigit() else 0
