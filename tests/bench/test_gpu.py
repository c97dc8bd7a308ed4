"""The GPU benchmark without a GPU: its plan, what it prints and in which order, and what it says that is missing."""

from __future__ import annotations

import pytest
import torch

from bench import gpu
from bench.gpu_plan import PREDICTIONS, Cell, cells, decode_us
from bench.gpu_report import Ceilings, row


class FakeBench:
    """Takes as long as is predicted times `factor`; each cell costs `cost` seconds of `now`."""

    def __init__(self, factor: float = 1.0, cost: float = 1.0, broken: str = "") -> None:
        self.factor, self.cost, self.broken = factor, cost, broken
        self.now = 0.0
        self.measured: list[str] = []

    def measure(self, cell: Cell) -> float:
        self.now += self.cost
        if cell.label == self.broken:
            raise RuntimeError("out of shared memory")
        self.measured.append(cell.label)
        return cell.predicted_us * self.factor


def lines_of(bench: FakeBench, seconds: float = 330.0) -> list[str]:
    lines: list[str] = []
    gpu.run(cells(), bench, seconds, lambda: bench.now, lines.append)
    return lines


def test_the_plan_has_every_section_with_a_prediction() -> None:
    """Sections and predictions match, labels are unique, the floors are those of the bytes."""
    planned = cells()
    assert {cell.section for cell in planned} == set(PREDICTIONS)
    assert len({cell.label for cell in planned}) == len(planned)
    assert all(cell.predicted_us > 0 for cell in planned)
    sweep = {cell.label: cell for cell in planned if cell.section == "decode"}
    assert sweep["B64 L8192 tile64-warps4-stages3-x2"].bytes_moved == 64 * 8192 * 4096
    assert decode_us(64 * 8192 * 4096) == pytest.approx(521, rel=0.01)  # of the published table
    mixed = [cell.bytes_moved for cell in planned if cell.section == "mixed"]
    assert mixed[0] == pytest.approx(mixed[1], rel=0.01)
    assert len(cells(quick=True)) < len(planned)


def test_predictions_come_first_and_every_cell_has_a_row() -> None:
    """Nothing is measured before all predictions are written."""
    bench = FakeBench()
    lines = lines_of(bench)
    assert bench.measured == [cell.label for cell in cells()]
    first_row = next(i for i, line in enumerate(lines) if line.startswith("| ceilings"))
    for cell in cells():
        assert any(f"{cell.label}: {cell.predicted_us:.1f} us" in line for line in lines[:first_row])
    assert sum("as predicted" in line for line in lines) == len(cells())
    assert any("apart over together" in line and "(target >= 4)" in line for line in lines)


def test_results_are_judged_by_the_ceilings_of_the_run() -> None:
    """A chip that copies at half the predicted rate: a decode at that rate reaches the whole ceiling."""
    ceilings = Ceilings()
    copy = cells()[0]
    ceilings.take(copy, copy.predicted_us * 2)
    cell = Cell("decode", "x", "decode", {}, 100.0, bytes_moved=2_150_000_000)
    assert "| 100% | SLOWER |" in row(cell, 1000.0, ceilings)
    assert "| 50% | SLOWER |" in row(cell, 1000.0, Ceilings())
    assert "faster" in row(cell, 50.0, ceilings)


def test_one_failure_hides_nothing_and_time_runs_out_by_name() -> None:
    """A cell that fails has its own row; what there was no time for is named, and comparisons say what they lack."""
    lines = lines_of(FakeBench(broken="matmul"))
    assert any("| matmul |" in line and "FAILED" in line and "out of shared memory" in line for line in lines)
    assert any("fractions are of predicted ones" in line for line in lines)
    assert sum("as predicted" in line for line in lines) == len(cells()) - 1
    short = lines_of(FakeBench(cost=10.0), seconds=45.0)
    assert sum("as predicted" in line for line in short) == 5
    left_out = next(line for line in short if line.startswith("The time is up"))
    assert all(cell.label in left_out for cell in cells()[5:])
    assert any("mixed lengths over equal ones: not measured" in line for line in short)


def test_without_a_gpu_it_says_so_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One clear line and an exit status of its own; the plan alone needs no GPU."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert gpu.main([]) == gpu.EXIT_NO_DEVICE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("bench.gpu measures a GPU, and there is none to use: this build of torch")
    assert gpu.main(["--plan", "--only", "mixed"]) == 0
    assert "1 x 32k + 63 x 1k" in capsys.readouterr().out
