"""The lines that `bench/gpu.py` prints: predictions first, then one row a measurement with its part of the ceilings."""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu_plan import PREDICTED_COPY, PREDICTED_MATMUL, PREDICTIONS, Cell

NEAR = 0.15  # a result so far from its prediction counts as predicted


@dataclass(slots=True)
class Ceilings:
    """Bytes and products a second, measured in this run; predicted values until then."""

    copy: float = PREDICTED_COPY
    matmul: float = PREDICTED_MATMUL
    measured: int = 0

    def take(self, cell: Cell, microseconds: float) -> None:
        """A ceiling has been measured."""
        if cell.label == "copy":
            self.copy = cell.bytes_moved / microseconds * 1e6
        else:
            self.matmul = cell.flops / microseconds * 1e6
        self.measured += 1


def predictions(planned: list[Cell]) -> list[str]:
    """What is expected, section by section and row by row, before anything runs."""
    lines = ["Predictions (one H200):"]
    for section in dict.fromkeys(cell.section for cell in planned):
        lines.append(f"- {section}: {PREDICTIONS[section]}")
        lines += [f"    {c.label}: {c.predicted_us:.1f} us" for c in planned if c.section == section]
    return lines


def header() -> list[str]:
    """The head of the table."""
    return [
        "| section | what | predicted us | measured us | reached | of the measured ceiling | |",
        "|---|---|---|---|---|---|---|",
    ]


def row(cell: Cell, microseconds: float, ceilings: Ceilings) -> str:
    """One measurement."""
    reached, part = "-", "-"
    if cell.flops:
        rate = cell.flops / microseconds * 1e6
        reached, part = f"{rate / 1e12:.0f} TFLOP/s", f"{rate / ceilings.matmul:.0%}"
    elif cell.bytes_moved:
        rate = cell.bytes_moved / microseconds * 1e6
        reached, part = f"{rate / 1e12:.2f} TB/s", f"{rate / ceilings.copy:.0%}"
    if cell.section == "ceilings":
        part = "is the ceiling"
    ratio = microseconds / cell.predicted_us
    verdict = "as predicted" if abs(ratio - 1) <= NEAR else "faster" if ratio < 1 else "SLOWER"
    return f"{_start(cell)} {microseconds:.1f} | {reached} | {part} | {verdict} |"


def failed(cell: Cell, error: Exception) -> str:
    """A row for what could not be measured."""
    return f"{_start(cell)} FAILED | {type(error).__name__}: {error} | - | |"


def _start(cell: Cell) -> str:
    return f"| {cell.section} | {cell.label} | {cell.predicted_us:.1f} |"


def ratios(results: dict[str, float]) -> list[str]:
    """The comparisons that the targets are about, where both sides were measured; `results` by label."""

    def ratio(name: str, above: str, below: str, target: str) -> list[str]:
        if above not in results or below not in results:
            return [f"- {name}: not measured"]
        return [f"- {name}: {results[above] / results[below]:.2f} (target {target})"]

    return [
        "Comparisons:",
        *ratio("mixed lengths over equal ones", "1 x 32k + 63 x 1k", "equal", "<= 1.10"),
        *ratio("pages of 16 over 64", "B16 L8192 pages of 16", "B16 L8192 pages of 64", "<= 1.15"),
        *ratio("bfloat16 over e4m3", "B64 L8192 bfloat16", "B64 L8192 float8_e4m3fn", ">= 1.70"),
        *ratio("apart over together", "32 x (8k + 256) apart", "32 x (8k + 256) together", ">= 4"),
        *ratio("the same of 8 x 2k", "8 x (2k + 256) apart", "8 x (2k + 256) together", ">= 0.9"),
        *ratio(
            "the same of a step", "16 layers, 32 x (4k + 256) apart", "16 layers, 32 x (4k + 256) together", ">= 1.2"
        ),
        *ratio("8 adapters over none", "16 layers, batch 8, adapters: 8", "16 layers, batch 8, recorded", "<= 1.30"),
        *ratio("scattered over consecutive pages at 8k", "L8192 scattered pages", "L8192 consecutive pages", "<= 1.08"),
        *ratio(
            "launched anew over recorded", "16 layers, batch 8, launched anew", "16 layers, batch 8, recorded", ">= 1.6"
        ),
        *ratio(
            "ids read at once over a step late",
            "16 layers, batch 8, ids read at once",
            "16 layers, batch 8, ids read a step late",
            ">= 1.15",
        ),
    ]
