"""How near are the matrix products of a step to this machine? Rows x achieved rate x fraction of the limit.

    tessera bench products [--model PATH] [--dtype bfloat16|float32] [--kv-dtype float16|bfloat16] [--rows 1,2,4,...]

The products of a whole step alone, on one thread: every matrix of every layer and the output matrix, with random
weights. Their limit is the slower of reading the weights once and of the arithmetic, at the rates of `bench/limits.py`
on one thread in the same run. Norms, attention, barriers and the engine are not in it.
"""

# Types inside kernels are inferred by numba.
# mypy: disable-error-code="operator,arg-type,call-arg,no-untyped-call"

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.limits import better, describe_limits, layer_shapes, measure_limits
from bench.setting import make_parser, model_shape, positive, positive_list, read_setting, start_report
from bench.table import Cell
from bench.work import ModelWork
from common.layout import KV_DTYPES, default_kv_dtype
from decoder.kernels import amx, sets, simd
from decoder.kernels import frame as f
from decoder.kernels.compiled import entry
from decoder.kernels.linear import STORE, linear
from decoder.kernels.step import enter, leave
from decoder.kernels.sync import CONTROL_WORDS
from decoder.models.kernel_choice import choose_kernels
from decoder.models.packing import Memory, packed_elements, round_up, to_bfloat16
from decoder.models.workspace import aligned

ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
_PATTERN = 1 << 20  # random weights, repeated


@entry
def _multiply(
    kernels: Any, frame: Any, matrices: Any, weight_bytes: int, rows: int, counter: int, scratch: int, inputs: int,
    out: int,
) -> None:  # fmt: skip
    enter(kernels, frame)
    for index in range(matrices.shape[0]):
        columns, depth, weights = matrices[index, 0], matrices[index, 1], matrices[index, 2]
        simd.store_int64(counter, 0)  # tasks that are taken, and done
        simd.store_int64(counter + 8, 0)
        linear(
            kernels, frame, f.NO_ADAPTER, counter, 0, 1, scratch, STORE, inputs, rows, depth, weights, 0, columns // 32,
            depth * 32 * weight_bytes, out, columns, 0,
        )  # fmt: skip
    leave(kernels)


@dataclass(slots=True)
class Products:
    """Matrices with random weights in one memory, as (columns, depth, address), and room for `most_rows` rows."""

    kernels: sets.Kernels
    matrices: NDArray[np.int64]
    most_rows: int
    memory: Memory
    buffers: tuple[NDArray[np.uint8], ...]

    @classmethod
    def of(
        cls, shapes: Sequence[tuple[int, int]], dtype: str, most_rows: int, kernels: sets.Kernels | None = None
    ) -> Products:
        """Matrices of `shapes` (outputs, inputs), for the set that a model has beside the default keys and values."""
        kernels = kernels or choose_kernels(default_kv_dtype(dtype), bfloat16=dtype == "bfloat16", head_dim=64)
        values = np.random.default_rng(0).standard_normal(_PATTERN).astype(np.float32)
        pattern: NDArray[Any] = values if dtype == "float32" else to_bfloat16(values)
        memory = Memory(sum(packed_elements(*shape) * pattern.itemsize + 64 for shape in shapes))
        matrices = np.zeros((len(shapes), 3), np.int64)
        for row, (outputs, inputs) in zip(matrices, shapes, strict=True):
            weights = memory.take((packed_elements(outputs, inputs),), pattern.dtype)
            weights[:] = np.resize(pattern, weights.size)
            row[:] = round_up(outputs, 32), round_up(inputs, 32), weights.ctypes.data
        rows = round_up(most_rows, 32)
        sizes = (64, f.SUM_BYTES, rows * int(matrices[:, 1].max()) * 4, rows * int(matrices[:, 0].max()) * 4)
        buffers = tuple(aligned(size) for size in sizes)
        # Halves of float32 as well as bfloat16: inputs are random numbers in every layout, and never zeros.
        buffers[2][:] = np.resize(to_bfloat16(values).view(np.uint8), sizes[2])
        return cls(kernels, matrices, most_rows, memory, buffers)

    def seconds(self, rows: int, repeats: int) -> float:
        """The least time of all products with `rows` rows, after one that is not counted."""
        frame = np.zeros(f.FRAME_WORDS, np.int64)
        tiles = np.frombuffer(amx.full_tiles(), np.uint8).copy()
        frame[f.TILE_CONFIG] = tiles.ctypes.data
        control = np.zeros(CONTROL_WORDS, np.int32)
        frame[f.CONTROL] = control.ctypes.data
        places = [buffer.ctypes.data for buffer in self.buffers]
        weight_bytes = 4 if isinstance(self.kernels, sets.Float32Kernels) else 2
        times = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            _multiply(self.kernels, frame, self.matrices, weight_bytes, rows, *places)
            times.append(time.perf_counter() - began)
        return min(times[1:])


def main(arguments: Sequence[str]) -> int:
    """Measure and print; returns the exit status."""
    parser = make_parser("products", __doc__)
    parser.set_defaults(threads=1)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="type of keys and values, which decides that of inputs")
    parser.add_argument("--rows", type=positive_list, default=",".join(map(str, ROWS)), help="rows of the products")
    parser.add_argument("--repeats", type=positive, default=9, help="the fastest of so many counts")
    namespace = parser.parse_args(list(arguments))
    if namespace.threads != 1:
        parser.error("products are measured on one thread")
    setting = read_setting(namespace)
    work = ModelWork(*model_shape(setting))
    report = start_report("products", setting)
    shapes = layer_shapes(work) * work.config.num_layers + [(work.config.vocab_size, work.config.hidden_size)]
    operations = 2.0 * sum(outputs * inputs for outputs, inputs in shapes)
    before = measure_limits(work, setting.dtype, 1)
    kernels = choose_kernels(
        namespace.kv_dtype or default_kv_dtype(setting.dtype), bfloat16=setting.dtype == "bfloat16",
        head_dim=work.config.head_dim,
    )  # fmt: skip
    products = Products.of(shapes, setting.dtype, max(namespace.rows), kernels)
    times = {rows: products.seconds(rows, namespace.repeats) for rows in namespace.rows}
    limits = better(before, measure_limits(work, setting.dtype, 1))
    table: list[list[Cell]] = []
    for rows, seconds in times.items():
        arithmetic = rows * operations / limits.operations_per_second
        limit = max(work.weight_bytes / limits.step_bytes_per_second, arithmetic)
        rates = [rows * operations / seconds / 1e12, work.weight_bytes / seconds / 1e9]
        table.append([rows, seconds * 1e3, *rates, limit * 1e3, 100 * limit / seconds])
    report.table(
        f"Products of a step, one thread, {type(products.kernels).__name__}",
        ["rows", "ms", "Tflop/s", "GB/s", "limit ms", "% of limit"],
        table,
    )
    report.note(describe_limits(limits))
    report.write_json(setting.json)
    return 0
