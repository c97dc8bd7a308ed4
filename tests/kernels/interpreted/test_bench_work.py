"""What the GPU benchmark would time, run once with tiny sizes: every kind of cell builds and computes."""

from __future__ import annotations

import dataclasses

import pytest

from bench.gpu_plan import Cell, cells
from bench.gpu_work import Call, KernelBench
from tests.kernels.rig import DEVICE


class RunOnce:
    """Runs every variant once."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, bool]] = []

    def microseconds(self, calls: list[Call], *, record: bool = True) -> float:
        for call in calls:
            call()
        self.runs.append((len(calls), record))
        return 1.0


SMALL = {
    "copy": {"bytes": 4096},
    "matmul": {"size": 16},
    "decode": {"lengths": [3, 17], "block_tokens": 16, "config": (32, 4, 1, 1)},
    "shared": {"lengths": [258, 257], "shared": 256, "block_tokens": 64},
    "prefill": {"length": 20},
    "step": {"layers": 1, "batch": 1, "hidden": 32, "inner": 32, "vocab": 64, "length": 20, "shared": 0},
}
EXPERT_STEP = {**SMALL["step"], "experts": (4, 2, 32)}
SHARED_STEP = {**SMALL["step"], "batch": 2, "length": 257, "shared": 256}


def small(cell: Cell) -> Cell:
    """The same cell with tiny sizes."""
    changes = SHARED_STEP if "together" in cell.params else SMALL[cell.kind]
    changes = EXPERT_STEP if "experts" in cell.params else changes
    return dataclasses.replace(cell, params={**cell.params, **changes}, bytes_moved=1 << 20)


TOLD_APART = ("stored", "pages", "recorded", "together", "adapters", "experts", "late")
ONE_OF_EACH = {
    (cell.kind, *(cell.params.get(name) for name in TOLD_APART)): cell
    for cell in cells()
    if cell.section not in ("mixed", "pages") and not (cell.kind == "decode" and "shared" in cell.params)
}


@pytest.mark.parametrize("key", list(ONE_OF_EACH), ids=str)
def test_cells_build_and_run(key: tuple[object, ...]) -> None:
    """Each variant computes; variants are as many as the rotation asks for, and steps are not recorded again."""
    if key[3] is False and DEVICE.type == "cpu":
        pytest.skip("without a GPU the step is launched anew in both cells")
    timer = RunOnce()
    cell = small(ONE_OF_EACH[key])
    variants = 2 if key[1] == "bfloat16" else 1
    assert KernelBench(DEVICE, timer, rotated_bytes=variants << 20).measure(cell) == 1.0
    assert timer.runs == [(variants, cell.kind != "step")]
