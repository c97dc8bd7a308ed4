"""`bench/products.py`: what it times are the products of every matrix, and never zeros."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import products
from bench.setting import Setting, model_shape
from bench.work import ModelWork


def test_every_matrix_is_there_and_none_is_zero() -> None:
    """Matrices have the padded sizes asked for, one after another, and neither weights nor inputs are zeros."""
    rig = products.Products.of([(40, 32), (64, 96)], "bfloat16", 3)
    assert rig.matrices[:, :2].tolist() == [[64, 32], [64, 96]]
    assert rig.memory.used_bytes == (64 * 32 + 64 * 96) * 2
    assert np.count_nonzero(rig.buffers[2]) > 0.9 * rig.buffers[2].size
    assert rig.seconds(3, 1) > 0.0
    assert np.count_nonzero(rig.buffers[3].view(np.float32)[: 3 * 64]) == 3 * 64


def test_the_bench_prints_its_table(
    tiny_gguf: Path, common_options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each number of rows has a time, two rates and a fraction of the limit."""
    assert products.main([*common_options, "--rows", "1,3", "--repeats", "1"]) == 0
    assert "Products of a step, one thread" in capsys.readouterr().out
    (table,) = json.loads((tmp_path / "rows.json").read_text())["tables"]
    assert [row[0] for row in table["rows"]] == [1, 3]
    assert all(value > 0.0 for row in table["rows"] for value in row)
    work = ModelWork(*model_shape(Setting(tiny_gguf, "bfloat16", 1, None)))
    _, milliseconds, _, gigabytes, *_ = table["rows"][0]
    assert gigabytes * milliseconds * 1e6 == pytest.approx(work.weight_bytes)
