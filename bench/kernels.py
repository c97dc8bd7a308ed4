"""How fast is a model step? Prints the machine's limits and, beside them, prefill and decode times on this CPU.

    python -m bench.kernels MODEL [--dtype bfloat16|float32] [--kv-dtype float16|...] [--threads 1 2]

Everything is a median in one process: wall time, and CPU time of all threads, which says more where other processes
take the cores. A limit is the slower of reads and arithmetic (`bench/work.py`), at the rates that
`bench/limits.py` measures in the same run with as many threads. Where torch's products do not reach the hardware's
rate, a prefill can pass it. A virtual machine's memory may change while the bench runs: the last rows are taken pass by
pass in turn with the memory's rate, and with each other.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.limits import MemoryProbe, describe_limits, measure_limits
from bench.work import MachineLimits, ModelWork
from common.arguments import CommandParser
from common.layout import KV_DTYPES
from decoder.batch import StepBatch
from decoder.grouped_arena import private_arena
from decoder.models.llama import CausalLM
from decoder.weights import load_model

BLOCK_TOKENS = 16
_TURNS = 21


def median_times(action: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median wall and CPU seconds of `action` after two unmeasured calls; CPU counts every thread of the process."""
    wall, processor = [], []
    for index in range(repeats + 2):
        start, start_processor = time.perf_counter(), time.process_time()
        action()
        if index >= 2:
            wall.append(time.perf_counter() - start)
            processor.append(time.process_time() - start_processor)
    return statistics.median(wall), statistics.median(processor)


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """Median wall time of `action` after two unmeasured calls."""
    return median_times(action, repeats)[0]


def least_seconds(num_bytes: float, operations: float, limits: MachineLimits) -> float:
    """The slower of reading `num_bytes` and of the arithmetic."""
    return max(num_bytes / limits.step_bytes_per_second, operations / limits.operations_per_second)


def prefill_batch(tokens: NDArray[np.int32], start: int, table: NDArray[np.int32]) -> StepBatch:
    """One chunk of one sequence."""
    count = tokens.size
    return StepBatch(
        tokens,
        np.arange(start, start + count, dtype=np.int32),
        np.array([0, count], np.int32),
        np.array([start + count], np.int32),
        table,
        np.array([count - 1], np.int32),
        0,
    )


def decode_batch(size: int, context: int, width: int, shared: int = 0) -> StepBatch:
    """`size` sequences that each add the last token of a context of `context` tokens, of which they share the first."""
    tables = np.arange(1, size * width + 1, dtype=np.int32).reshape(size, width)
    tables[:, : shared // BLOCK_TOKENS] = tables[0, : shared // BLOCK_TOKENS]
    rows = np.arange(size, dtype=np.int32)
    return StepBatch(
        np.full(size, 7, np.int32),
        np.full(size, context - 1, np.int32),
        np.arange(size + 1, dtype=np.int32),
        np.full(size, context, np.int32),
        tables,
        rows,
        size,
    )


def fill_arena(model: CausalLM, arena: NDArray[np.float32] | NDArray[np.uint16], sequences: int, width: int) -> None:
    """Compute keys and values of random tokens into all blocks of `sequences` tables of `decode_batch`: pages that were
    never written are one page of zeros, which the caches hold."""
    random = np.random.default_rng(1)
    for table in np.arange(1, sequences * width + 1, dtype=np.int32).reshape(sequences, 1, width):
        tokens = random.integers(0, model.config.vocab_size, width * BLOCK_TOKENS).astype(np.int32)
        for start in range(0, tokens.size, 512):
            model.forward(prefill_batch(tokens[start : start + 512], start, table), arena)


def measure(
    model: CausalLM,
    arena: NDArray[np.float32] | NDArray[np.uint16],
    work: ModelWork,
    limits: MachineLimits,
    threads: int,
) -> None:
    """Print prefill and decode medians of one model beside what `limits` allow."""
    random = np.random.default_rng(0)
    for length in (128, 1024, 4000):
        table = np.arange(1, -(-length // BLOCK_TOKENS) + 1, dtype=np.int32)[None]
        for chunk in (256, 512, length):
            if chunk > length:
                continue
            tokens = random.integers(0, model.config.vocab_size, length).astype(np.int32)

            def prefill(
                chunk: int = chunk, tokens: NDArray[np.int32] = tokens, table: NDArray[np.int32] = table
            ) -> None:
                for start in range(0, tokens.size, chunk):
                    model.forward(prefill_batch(tokens[start : start + chunk], start, table), arena)

            seconds, processor = median_times(prefill, 3)
            limit = least_seconds(model.weight_bytes, work.operations(length, 0), limits)
            print(
                f"  prefill {length:5d} tokens, chunks of {chunk:5d}: {seconds * 1e3:8.1f} ms wall, "
                f"{processor * 1e3:8.1f} ms CPU, {limit / seconds * 100:4.0f} % of the limit"
            )
    fill_arena(model, arena, 32, 1024 // BLOCK_TOKENS + 1)
    for context in (128, 1024):
        width = -(-context // BLOCK_TOKENS)
        for size in (1, 4, 8, 16, 32):
            batch = decode_batch(size, context, width)
            seconds, processor = median_times(functools.partial(model.forward, batch, arena), 15)
            num_bytes = model.weight_bytes + size * context * model.layout.token_bytes
            limit = least_seconds(num_bytes, size * work.operations(1, context), limits)
            print(
                f"  decode batch {size:3d}, context {context:5d}: {seconds * 1e3:8.2f} ms wall, "
                f"{processor * 1e3:8.2f} ms CPU, "
                f"{limit / seconds * 100:4.0f} % of the limit, {size / seconds:7.1f} tok/s"
            )
    measure_in_turn(model, arena, threads)


def measure_in_turn(model: CausalLM, arena: NDArray[np.float32] | NDArray[np.uint16], threads: int) -> None:
    """Print decode steps that take turns with each other and with the memory's rate: what each is of the limit of its
    own moment, and how many steps of one sequence one of 32 takes.

    Sequences share none, half or all but the last tokens of their contexts. Ratios are medians and quartiles of turns.
    """
    context = 1024 + BLOCK_TOKENS
    width = context // BLOCK_TOKENS
    cases = [(1, 0), *((size, shared) for size in (4, 32) for shared in (0, 512, 1024))]
    probe = MemoryProbe(model.weight_bytes, threads)
    batches = {case: decode_batch(case[0], context, width, case[1]) for case in cases}
    for batch in batches.values():
        model.forward(batch, arena)
    rates: list[float] = []
    times: dict[tuple[int, int], list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(_TURNS):
        rates.append(probe.now())
        for case, batch in batches.items():
            times[case].append(median_times(functools.partial(model.forward, batch, arena), 1))
    print(f"  in turn with the memory's rate, GB/s: {quartiles([rate / 1e9 for rate in rates], 1)}")
    least = model.weight_bytes + context * model.layout.token_bytes
    fractions = [least / rate / wall * 100 for rate, (wall, _) in zip(rates, times[1, 0], strict=True)]
    print(f"  one sequence of {context}: {quartiles(fractions, 1)} % of the limit of its moment")
    for (size, shared), pairs in times.items():
        ratios = [wall / alone for (wall, _), (alone, _) in zip(pairs, times[1, 0], strict=True)]
        seconds, processor = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"  decode batch {size:3d}, context {context:5d}, {shared:5d} shared: {seconds * 1e3:8.2f} ms wall, "
            f"{processor * 1e3:8.2f} ms CPU, {quartiles(ratios, 2)} times batch 1"
        )


def quartiles(values: list[float], digits: int) -> str:
    """Median, and lower and upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    """Parse the command line and print the tables."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--kv-dtype", default=None, choices=KV_DTYPES, help="default: float16, or float32")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    for threads in arguments.threads:
        print(f"{threads} threads")
        start = time.perf_counter()
        model = load_model(
            arguments.model, arguments.dtype, BLOCK_TOKENS, arguments.kv_dtype, threads, layer_groups=False
        )
        loaded = time.perf_counter()
        arena = private_arena(model.layout, 32 * 65 + 1)
        model.warm_up(arena)
        print(f"  load {loaded - start:.1f} s, warm-up {time.perf_counter() - loaded:.1f} s")
        work = ModelWork(model.config, model.layout)
        limits = measure_limits(work, arguments.dtype, threads)
        print(f"  {describe_limits(limits)}")
        measure(model, arena, work, limits, threads)
        model.close()


if __name__ == "__main__":
    main()
