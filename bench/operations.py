"""How fast is each compiled operation by itself on this CPU? Beside the machine's limits and torch's attention.

    tessera bench operations [--threads N] [--only NAME] [--storages float16,int8] [--json FILE]

One layer in the shapes of three models. What moves bytes is divided by the rate of a copy with as large a working set,
what multiplies by the best matmul rate, float32 or bfloat16, measured before and after. torch's
`scaled_dot_product_attention` takes turns with ours, in the type it is fastest with; it needs keys and values gathered
from their blocks and widened: that time stands apart. Times are the lowest of several, so that a busy moment says
nothing. A kernel set is compiled for each storage, some seconds each. Dense products: see `products`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.limits import measure_matmul, measure_memory
from bench.operations_work import (
    ALL_STORAGES,
    MODELS,
    Work,
    attention_work,
    block_work,
    row_work,
    token_bytes,
    write_work,
)
from bench.setting import machine_facts, positive_list, positive_or_zero
from bench.table import Cell, Report
from common.arguments import CommandParser

CONTEXTS = (1024, 16384)
BATCHES = (1, 8, 32)
STORAGES = ("float16", "int8")
CHUNKS = (1024, 256)  # of a prefill at the shortest context, and at others
SMALLEST_COPY = 1 << 24  # below it a copy's time is mostly that of starting it
MOST_BYTES = 256_000_000
SECONDS = 0.15  # for each action that is timed
BUDGET_SECONDS = 180.0
COLUMNS = (
    "operation", "model", "storage", "case", "ms", "rate", "% of limit", "torch ms", "gather ms", "torch / ours",
)  # fmt: skip


def best_seconds(actions: Sequence[Callable[[], object]]) -> list[float]:
    """Lowest wall time of each action, in turn until SECONDS have passed for each, at least twice."""
    best = [float("inf")] * len(actions)
    end, turns = time.perf_counter() + SECONDS * len(actions), 0
    while turns < 2 or time.perf_counter() < end:
        for index, action in enumerate(actions):
            began = time.perf_counter()
            action()
            best[index] = min(best[index], time.perf_counter() - began)
        turns += 1
    return best


@dataclass(slots=True)
class Limits:
    """Rates of the machine: a copy by its working set, a power of two of bytes, and a matmul; each the best so far."""

    threads: int
    copies: dict[int, float] = field(default_factory=dict)
    matmul: float = 0.0

    def measure_matmul(self) -> None:
        """The rate of a square product; bfloat16 counts where the CPU has instructions for it."""
        rates = {kind: self._product(128, kind, 1) for kind in (torch.float32, torch.bfloat16)}
        for kind, rate in rates.items():
            if 2 * rate > max(rates.values()):
                self.matmul = max(self.matmul, rate, self._product(1024, kind, 9))

    def _product(self, rows: int, kind: torch.dtype, repeats: int) -> float:
        return measure_matmul([(1024, 1024)], rows, kind, self.threads, repeats, "square").best

    def copy(self, num_bytes: float) -> float:
        """The rate of a copy whose two arrays together have about `num_bytes`."""
        size = max(SMALLEST_COPY, 1 << round(math.log2(num_bytes)))
        if size not in self.copies:
            self.measure_copy(size)
        return self.copies[size]

    def measure_copy(self, size: int) -> None:
        """Measure the copy of one working set, again if it was measured before."""
        repeats = max(7, (1 << 28) // size)
        found = next(rate for rate in measure_memory(size, self.threads, repeats) if rate.kind == "copy")
        self.copies[size] = max(self.copies.get(size, 0.0), found.best)


def describe(work: Work, times: Sequence[float], limits: Limits) -> list[Cell]:
    """One row of the table."""
    seconds, *theirs = times
    limit, unit = (limits.matmul, "Gflop/s") if work.multiplies else (limits.copy(work.amount), "GB/s")
    rate = work.amount / seconds
    row: list[Cell] = [work.operation, work.model, work.storage, work.case, seconds * 1e3]
    row += [f"{rate / 1e9:.1f} {unit}", 100.0 * rate / limit]
    if not theirs:
        return [*row, None, None, None]
    return [*row, theirs[0] * 1e3, theirs[1] * 1e3, theirs[0] / seconds]


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    options = _parse(arguments)
    began = time.perf_counter()
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    limits = Limits(torch.get_num_threads())
    report = Report("operations", {**machine_facts(), "threads": limits.threads})
    report.begin()
    limits.measure_matmul()
    rows, late = list[tuple[Work, list[float]]](), False
    for work in works(options.storages, options.contexts, options.batches, options.only):
        if late := time.perf_counter() - began > BUDGET_SECONDS:
            break
        others = [action for action in (work.torch, work.gather) if action is not None]
        times = best_seconds([work.run, *others])
        if not work.multiplies:
            limits.copy(work.amount)
        # Without the calls, which hold the arena.
        rows.append((dataclasses.replace(work, run=_nothing, torch=None, gather=None), times))
    for size in tuple(limits.copies):
        limits.measure_copy(size)
    limits.measure_matmul()
    copies = ", ".join(f"{size >> 20} MiB {rate / 1e9:.1f}" for size, rate in sorted(limits.copies.items()))
    title = f"Matmul {limits.matmul / 1e9:.1f} Gflop/s; copy, GB/s by working set: {copies}"
    report.table(title, COLUMNS, [describe(work, times, limits) for work, times in rows])
    report.note(f"Left out: what has more than {MOST_BYTES / 1e6:.0f} MB of keys and values.")
    if late:
        report.note(f"Stopped after {BUDGET_SECONDS:.0f} seconds; what would have followed is not in the table.")
    report.write_json(options.json)
    return 0


def works(storages: Sequence[str], contexts: Sequence[int], batches: Sequence[int], only: str) -> Iterator[Work]:
    """What is to be timed, of operations whose names hold `only`, made one after another; the short ones first."""
    for model in MODELS:
        writes = [write_work(model, storage) for storage in storages if only in "kv_write"]
        yield from (work for work in (*row_work(model), *writes, *block_work(model)) if only in work.operation)
    for context, storage, model in itertools.product(sorted(contexts), storages, MODELS):
        short = context == min(contexts)
        cases = [("paged_decode", batch, 1) for batch in batches]
        cases += [("shared_prefix_decode", batch, 1) for batch in batches if batch > 1]
        if short or storage == storages[0]:
            cases.append(("paged_prefill", 1, min(CHUNKS[not short], context)))
        for name, batch, chunk in cases:
            if only in name and batch * context * token_bytes(model, storage) <= MOST_BYTES:
                yield attention_work(name, model, storage, context, batch, chunk)


def _nothing() -> None:
    pass


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="tessera bench operations",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--threads", type=positive_or_zero, default=1, metavar="N", help="compute threads; 0 is all")
    parser.add_argument("--only", default="", metavar="NAME", help="operations whose name holds this")
    parser.add_argument("--storages", type=_storages, default=list(STORAGES), help="types of keys and values")
    parser.add_argument("--contexts", type=positive_list, default=list(CONTEXTS), help="tokens of a sequence")
    parser.add_argument("--batches", type=positive_list, default=list(BATCHES), help="sequences of a decode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    return parser.parse_args(list(arguments))


def _storages(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ALL_STORAGES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(ALL_STORAGES)}")
    return names
