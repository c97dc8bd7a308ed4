"""The GPU kernels measured: ceilings, decode, lengths, pages, 8-bit blocks, shared prefixes, prefill, whole steps.

    python -m bench.gpu [--quick] [--only SECTION] [--seconds 330]

Predictions are printed before anything runs. Buffers are random and rotated, so that no call finds its keys and values
in the second-level cache; each time is the median over replays of a recorded CUDA graph. Without a CUDA device it says
so and measures nothing. It has not run on a GPU yet: see docs/kernels.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bench import gpu_report as report
from bench.gpu_plan import PREDICTIONS, Cell, cells
from common.arguments import CommandParser

EXIT_NO_DEVICE = 2


class Workbench(Protocol):
    """Measures one cell."""

    def measure(self, cell: Cell) -> float:
        """Microseconds of one call."""


def run(
    planned: list[Cell],
    bench: Workbench,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    write: Callable[[str], object] = print,
) -> dict[str, float]:
    """Measure all of `planned` within `seconds` and write the table; results in microseconds by label.

    A cell that fails has a row that says so; what there was no time for is named.
    """
    started = clock()
    for line in (*report.predictions(planned), "", *report.header()):
        write(line)
    ceilings, results = report.Ceilings(), {}
    left_out = []
    for cell in planned:
        if clock() - started > seconds:
            left_out.append(cell.label)
            continue
        try:
            results[cell.label] = bench.measure(cell)
        except Exception as error:  # noqa: BLE001 - one kernel that fails must not hide the others
            write(report.failed(cell, error))
            continue
        if cell.section == "ceilings":
            ceilings.take(cell, results[cell.label])
        write(report.row(cell, results[cell.label], ceilings))
    if left_out:
        write(f"The time is up; not measured: {', '.join(left_out)}")
    if ceilings.measured < 2:
        write("The ceilings were not both measured in this run: fractions are of predicted ones.")
    write("")
    for line in report.ratios(results):
        write(line)
    return results


def why_not() -> str:
    """Why nothing can be measured here; empty where it can."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"this build of torch ({torch.__version__}) has no CUDA"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = CommandParser(prog="python -m bench.gpu", description="GPU kernels against the chip's ceilings.")
    parser.add_argument("--quick", action="store_true", help="one set of launch parameters, no baseline")
    parser.add_argument("--only", choices=sorted(PREDICTIONS), help="one section, besides the ceilings")
    parser.add_argument("--seconds", type=float, default=330.0, help="time after which nothing new begins (330)")
    parser.add_argument("--plan", action="store_true", help="print the predictions and end; needs no GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    options = parse(arguments)
    planned = [c for c in cells(options.quick) if options.only in (None, c.section) or c.section == "ceilings"]
    if options.plan:
        print("\n".join(report.predictions(planned)))
        return 0
    if reason := why_not():
        print(f"bench.gpu measures a GPU, and there is none to use: {reason}", file=sys.stderr)
        return EXIT_NO_DEVICE
    import torch

    from bench.gpu_work import GraphTimer, KernelBench

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    run(planned, KernelBench(torch.device("cuda"), GraphTimer()), options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
