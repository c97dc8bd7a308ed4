"""`tessera bench core`: one row an operation, and the same rows in the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.core import main


def test_the_file_holds_the_rows_that_were_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json keeps where it ran and every row; the terminal shows the same operations."""
    path = tmp_path / "core.json"
    flags = ["--blocks", "12000", "--published", "11000", "--rounds", "2", "--json", str(path)]
    assert main(flags) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    table, beside = document["tables"]
    shown = capsys.readouterr().out
    assert {"date", "CPU", "cores", "blocks"} <= set(document["facts"])
    assert len(table["rows"]) == 12
    for name, median, worst, own_worst, ratio in table["rows"]:
        assert name in shown
        assert 0 < median <= worst
        assert own_worst > 0
        assert ratio == pytest.approx(own_worst / median)
    assert len(beside["rows"]) == 5
    for name, ours, radix, chain, *ratios in beside["rows"]:
        assert name in shown
        assert ratios == pytest.approx([radix / ours, chain / ours])


def test_an_index_larger_than_the_pool_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """More published blocks than the pool has, or fewer than the evictions need, are refused with what is allowed."""
    for published in ("20000", "5"):
        with pytest.raises(SystemExit):
            main(["--blocks", "12000", "--published", published])
        assert "allowed are 11000..12000" in capsys.readouterr().err
