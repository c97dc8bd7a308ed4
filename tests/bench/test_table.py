"""`bench/table.py`: quantiles, cells and the JSON file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.table import Report, format_cell, format_table, median, quantile


def test_quantiles_are_those_of_the_sorted_values() -> None:
    """A quantile lies linearly between its neighbours, whatever the order given."""
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [quantile(values, fraction) for fraction in (0.0, 0.25, 0.5, 1.0)] == [1.0, 2.0, 3.0, 5.0]
    assert median([1.0, 2.0]) == 1.5


@pytest.mark.parametrize(("values", "fraction"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_a_quantile_of_nothing_is_refused(values: list[float], fraction: float) -> None:
    """No values, or a fraction outside 0..1, is an error and not a number."""
    with pytest.raises(ValueError, match=r"values|fraction"):
        quantile(values, fraction)


def test_a_table_shows_what_was_not_measured() -> None:
    """Three significant digits, and `-` for None and NaN; every line has the same width."""
    assert [format_cell(cell) for cell in (1234.5, 1.2345, 0.0123, None, math.nan, 7, "x")] == [
        "1234", "1.23", "0.0123", "-", "-", "7", "x",
    ]  # fmt: skip
    lines = format_table(["name", "ms"], [["a", 1.5], ["longer name", None]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    with pytest.raises(ValueError, match="cells"):
        format_table(["name"], [["a", 1]])


def test_the_json_file_holds_what_was_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Facts, rows and notes come back from the file; a NaN is null there."""
    report = Report("name", {"date": "today"})
    report.begin()
    report.table("Title", ["a", "b"], [[1, math.nan]])
    report.note("a note")
    report.write_json(tmp_path / "rows.json")
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document == {
        "bench": "name",
        "facts": {"date": "today"},
        "tables": [{"title": "Title", "columns": ["a", "b"], "rows": [[1, None]]}],
        "notes": ["a note"],
    }
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("# bench name", "date today", "Title", "a note"))
