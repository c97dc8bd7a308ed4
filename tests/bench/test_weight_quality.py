"""`bench/weight_quality.py`: on a tiny model float32 comes first, and each type is as far from it as its rounding."""

from __future__ import annotations

import json
from pathlib import Path

from bench import weight_quality
from tests.bench.test_kv_quality import LINE


def test_the_bench_judges_every_type(common_options: list[str], tmp_path: Path) -> None:
    """int8 reads about half of the bytes of bfloat16, changes something, and stays near float32."""
    text = tmp_path / "text.txt"
    text.write_text(LINE * 60)
    options = ["--text", str(text), "--windows", "2", "--tokens", "80", "--types", "bfloat16", "int8", "file"]
    assert weight_quality.main([*common_options, *options]) == 0
    table = json.loads((tmp_path / "rows.json").read_text())["tables"][0]
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    assert list(rows) == ["float32", "bfloat16", "int8", "file"]
    read = {name: row["MiB read a step"] for name, row in rows.items()}
    assert read["int8"] < 0.65 * read["bfloat16"] < 0.4 * read["float32"]
    assert 0.0 < abs(rows["int8"]["change %"]) < 5.0 and rows["float32"]["change %"] is None
