"""`bench/limits.py`: it measures something, and never zeros."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from bench import limits
from bench.setting import Setting, model_shape
from bench.work import ModelWork


def test_what_is_timed_is_not_zero() -> None:
    """Every number of a working set differs from zero, and it has the size asked for."""
    values = limits._random_array(3_000_000, seed=1)
    assert values.nbytes == 3_000_000
    assert values.min() > 0.0
    assert len(set(values[:1000].tolist())) > 900


def test_rates_are_positive_on_one_thread_and_two() -> None:
    """Each rate has the samples asked for, all of them positive; torch's thread count is as before."""
    before = torch.get_num_threads()
    for threads in (1, 2):
        rates = [
            *limits.measure_memory(1_000_000, threads, 3),
            limits.measure_matmul([(64, 32)], 16, torch.bfloat16, threads, 3, "small"),
            limits.measure_matmul([(64, 32)], 16, torch.float32, threads, 3, "small"),
        ]
        assert [len(rate.samples) for rate in rates] == [3, 3, 3, 3]
        assert all(0.0 < rate.value <= rate.best for rate in rates)
    assert torch.get_num_threads() == before


def test_the_better_limit_takes_each_rate_by_itself() -> None:
    """Two measurements are combined rate by rate."""
    first, second = limits.MachineLimits(1.0, 5.0), limits.MachineLimits(2.0, 4.0)
    assert limits.better(first, second) == limits.MachineLimits(2.0, 5.0)


def test_the_bench_prints_its_tables(tiny_gguf: Path, common_options: list[str], tmp_path: Path, capsys) -> None:
    """Memory and matmul rates are printed with date, CPU and dtype, and written as JSON."""
    assert limits.main([*common_options, "--large-mb", "4", "--square", "64", "--repeats", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("# bench limits", "date ", "CPU ", "dtype bfloat16", "Memory", "Matmul"))
    tables = json.loads((tmp_path / "rows.json").read_text())["tables"]
    assert [len(table["rows"]) for table in tables] == [4, 8]
    work = ModelWork(*model_shape(Setting(tiny_gguf, "bfloat16", 1, None)))
    measured = limits.measure_limits(work, "float32", 1, repeats=2)
    assert measured.step_bytes_per_second > 0.0
    assert measured.operations_per_second > 0.0


def test_a_type_far_behind_is_timed_at_few_rows_alone(tiny_gguf: Path, monkeypatch) -> None:
    """Where bfloat16 is ten times slower, only the smallest product is timed in it, and float32 gives the limit."""
    seen: list[tuple[int, torch.dtype]] = []

    def measure(shapes, rows, dtype, threads, repeats, label) -> limits.Rate:
        seen.append((rows, dtype))
        return limits.Rate("matmul", label, threads, (10.0 if dtype is torch.float32 else 1.0,))

    monkeypatch.setattr(limits, "measure_matmul", measure)
    work = ModelWork(*model_shape(Setting(tiny_gguf, "bfloat16", 1, None)))
    assert limits.measure_limits(work, "bfloat16", 1, repeats=1).operations_per_second == 10.0
    first, *others = limits.PREFILL_ROWS
    assert seen == [(first, torch.float32), (first, torch.bfloat16), *((rows, torch.float32) for rows in others)]
