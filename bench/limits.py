"""What this machine can do: bytes read and copied a second, and multiplications a second of the model's matrices.

Decode is bounded by reading the weights and the keys and values, prefill by arithmetic; the other benches divide by
the rates found here, measured in their own run (`measure_limits`). Nothing is timed on zeros: pages are filled with
random numbers first, since the kernel backs untouched pages with one shared page and some hardware skips zeros.

Two working sets are timed. One is as large as the model's weights: a step reads them over and over, so what stays in
the last-level cache between steps belongs to its limit, and this is the rate the fractions use. The other is far larger
than any last-level cache and shows the memory alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numba as nb
import numpy as np
import torch
from numpy.typing import NDArray

from bench.setting import make_parser, model_shape, positive, read_setting, start_report
from bench.table import Cell, median, spread
from bench.work import MachineLimits, ModelWork

MEGABYTE = 1_000_000
PREFILL_ROWS = (128, 512, 1024)
SQUARE = 2048
SAMPLE_SECONDS = 0.02
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rate:
    """One measured rate: its samples in bytes or operations a second."""

    kind: str
    what: str
    threads: int
    samples: tuple[float, ...]

    @property
    def value(self) -> float:
        """Median rate."""
        return median(self.samples)

    @property
    def best(self) -> float:
        """Fastest sample."""
        return max(self.samples)


@nb.njit(nogil=True, fastmath=True)  # type: ignore[untyped-decorator,unused-ignore]
def _sum(values: FloatArray) -> np.float32:
    # Four places at once keep more reads in flight than one; on the machines we saw that is a tenth faster.
    quarter = values.shape[0] // 4
    first, second = values[:quarter], values[quarter : 2 * quarter]
    third, fourth = values[2 * quarter : 3 * quarter], values[3 * quarter : 4 * quarter]
    total = np.float32(0.0)
    for index in range(quarter):
        total += (first[index] + second[index]) + (third[index] + fourth[index])
    return total


def _random_array(num_bytes: int, seed: int) -> FloatArray:
    # A megabyte of random numbers, repeated: every page is touched and none is zero.
    part = np.random.default_rng(seed).random(MEGABYTE // 4, dtype=np.float32) + np.float32(0.5)
    return np.resize(part, max(num_bytes // 4, 1024))


def _time_split(
    work: Callable[[slice], object], length: int, threads: int, repeats: int, skipped: int = 2
) -> list[float]:
    """Seconds of `work` over [0, length) split evenly over threads, after `skipped` runs."""
    edges = [length * index // threads for index in range(threads + 1)]
    slices = [slice(low, high) for low, high in itertools.pairwise(edges)]
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats + skipped):
            began = time.perf_counter()
            list(pool.map(work, slices))
            seconds.append(time.perf_counter() - began)
    return seconds[skipped:]


class MemoryProbe:
    """Working sets of `num_bytes` that `threads` threads read and copy, timed pass by pass."""

    def __init__(self, num_bytes: int, threads: int) -> None:
        self._source = _random_array(num_bytes, seed=1)
        self._target = _random_array(num_bytes // 2, seed=2)  # a copy's two arrays together are the working set
        self._threads = threads
        self.label = f"{self._source.nbytes / MEGABYTE:.0f} MB"
        _sum(self._source[:16])

    def read(self, repeats: int, skipped: int = 2) -> list[float]:
        """Bytes a second of `repeats` passes that sum the set, after `skipped` more."""
        source = self._source
        seconds = _time_split(lambda part: _sum(source[part]), source.size, self._threads, repeats, skipped)
        return [source.nbytes / one for one in seconds]

    def copy(self, repeats: int, skipped: int = 2) -> list[float]:
        """Bytes a second, read and written, of `repeats` passes that copy half of the set, after `skipped` more."""
        source, target = self._source, self._target

        def copy(part: slice) -> None:
            np.copyto(target[part], source[part])

        seconds = _time_split(copy, target.size, self._threads, repeats, skipped)
        return [2 * target.nbytes / one for one in seconds]

    def now(self) -> float:
        """Bytes a second of one pass each, the higher of both."""
        return max(self.read(1, 0) + self.copy(1, 0))


def measure_memory(num_bytes: int, threads: int, repeats: int) -> tuple[Rate, Rate]:
    """Rates of reading an array of `num_bytes`, and of copying one (bytes read plus bytes written)."""
    probe = MemoryProbe(num_bytes, threads)
    read, copied = tuple(probe.read(repeats)), tuple(probe.copy(repeats))
    return Rate("read", probe.label, threads, read), Rate("copy", probe.label, threads, copied)


def measure_matmul(
    shapes: Sequence[tuple[int, int]], rows: int, dtype: torch.dtype, threads: int, repeats: int, label: str
) -> Rate:
    """Rate of `rows` inputs through weights of `shapes` (outputs, inputs), one after another as in a layer."""
    generator = torch.Generator().manual_seed(3)
    layers: list[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = []
    for outputs, inputs in shapes:
        activations = torch.randn(rows, inputs, generator=generator).to(dtype)
        weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
        layers.append((activations, _linear(weight, rows)))
    operations = sum(2.0 * rows * outputs * inputs for outputs, inputs in shapes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    def once() -> None:
        for activations, multiply in layers:
            multiply(activations)

    samples = []
    try:
        once()
        began = time.perf_counter()
        once()
        # Small products are repeated within one sample, so that a sample is milliseconds and not the clock's grain.
        inner = max(1, int(SAMPLE_SECONDS / (time.perf_counter() - began)))
        for _ in range(repeats + 1):
            began = time.perf_counter()
            for _ in range(inner):
                once()
            samples.append(inner * operations / (time.perf_counter() - began))
    finally:
        torch.set_num_threads(before)
    return Rate(f"matmul {str(dtype).removeprefix('torch.')}", label, threads, tuple(samples[1:]))


def _linear(weight: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """The fastest product torch has for a constant weight: oneDNN with the weight packed once, where it is there."""
    mkldnn = torch.ops.mkldnn
    if weight.dtype is not torch.bfloat16 or not hasattr(mkldnn, "_reorder_linear_weight"):
        return lambda activations: torch.nn.functional.linear(activations, weight)
    try:
        packed = mkldnn._reorder_linear_weight(weight, rows)
    except RuntimeError:  # a CPU whose instructions oneDNN has no bfloat16 product for
        return lambda activations: torch.nn.functional.linear(activations, weight)
    return lambda activations: mkldnn._linear_pointwise(activations, packed, None, "none", [], "")


def layer_shapes(work: ModelWork) -> list[tuple[int, int]]:
    """(outputs, inputs) of the matrices of one layer, fused as the decoder fuses them."""
    config = work.config
    return [
        (config.query_size + 2 * config.kv_size, config.hidden_size),
        (config.hidden_size, config.query_size),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]


def measure_limits(work: ModelWork, dtype: str, threads: int, repeats: int = 7) -> MachineLimits:
    """The two rates that bound a step of this model here and now; a few seconds.

    The fastest sample of read and copy counts as the memory's rate and that of all products as the arithmetic's: a
    limit is what was reached once, and a fraction of it is never flattered by a noisy moment.
    """
    kinds = [torch.float32] + [torch.bfloat16] * (dtype == "bfloat16")  # without instructions for it bfloat16 is slower
    memory = measure_memory(work.weight_bytes, threads, repeats)
    matmul: list[Rate] = []
    for rows in PREFILL_ROWS:
        label = f"a layer, {rows} rows"
        found = [measure_matmul(layer_shapes(work), rows, kind, threads, repeats, label) for kind in kinds]
        # A type that is far behind at few rows would take minutes at many.
        kinds = [kind for kind, rate in zip(kinds, found, strict=True) if 4 * rate.best > max(r.best for r in found)]
        matmul += found
    return MachineLimits(max(rate.best for rate in memory), max(rate.best for rate in matmul))


def better(first: MachineLimits, second: MachineLimits) -> MachineLimits:
    """The higher of each rate. Benches measure before and after their own work, in case one moment was a busy one."""
    return MachineLimits(
        max(first.step_bytes_per_second, second.step_bytes_per_second),
        max(first.operations_per_second, second.operations_per_second),
    )


def describe_limits(limits: MachineLimits) -> str:
    """One line for below a table."""
    memory, arithmetic = limits.step_bytes_per_second / 1e9, limits.operations_per_second / 1e12
    return (
        f"Limits measured in this run, before and after: {memory:.1f} GB/s from a working set as large as the weights "
        f"(read or copy, the higher), {arithmetic:.3g} Tflop/s in the model's matrices."
    )


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = make_parser("limits", __doc__)
    parser.add_argument("--large-mb", type=positive, default=1500, help="working set far beyond the last-level cache")
    parser.add_argument("--square", type=positive, default=SQUARE, help="rows of a square product, for comparison")
    parser.add_argument("--repeats", type=positive, default=9, help="samples of each rate")
    namespace = parser.parse_args(list(arguments))
    setting = read_setting(namespace)
    work = ModelWork(*model_shape(setting))
    report = start_report("limits", setting)
    counts = sorted({1, setting.threads})
    rates: list[Rate] = []
    for threads in counts:
        for num_bytes in (work.weight_bytes, namespace.large_mb * MEGABYTE):
            rates.extend(measure_memory(num_bytes, threads, namespace.repeats))
    rows = [_row(rate, 1e9) for rate in rates]
    report.table("Memory, GB/s (a copy counts what it reads and what it writes)", _columns("GB/s"), rows)
    report.note(
        f"The fractions of other benches use the {work.weight_bytes / MEGABYTE:.0f} MB rows: a step reads that much "
        "weight, the same bytes each time. A copy far beyond the cache may count more bytes, since it writes past it."
    )
    products: list[Rate] = []
    for threads in counts:
        for kind in (torch.bfloat16, torch.float32):
            for count in PREFILL_ROWS:
                label = f"a layer, {count} rows"
                products.append(measure_matmul(layer_shapes(work), count, kind, threads, namespace.repeats, label))
            side = namespace.square
            label = f"{side} x {side} x {side}"
            products.append(measure_matmul([(side, side)], side, kind, threads, namespace.repeats, label))
    report.table("Matmul, Tflop/s", _columns("Tflop/s"), [_row(rate, 1e12) for rate in products])
    report.write_json(setting.json)
    return 0


def _columns(unit: str) -> list[str]:
    return ["what", "size", "threads", f"median {unit}", "spread"]


def _row(rate: Rate, unit: float) -> list[Cell]:
    scaled = [sample / unit for sample in rate.samples]
    return [rate.kind, rate.what, rate.threads, rate.value / unit, spread(scaled)]
