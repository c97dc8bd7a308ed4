"""`tessera bench adoption`: what a journal costs and how long adopting takes, on the terminal and in the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.adoption import main


def test_every_row_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small run prints both tables; every published block is adopted, in as many nodes as it has paths."""
    path = tmp_path / "adoption.json"
    assert main(["--blocks", "12000", "--published", "11000", "--rounds", "3", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    costs, starts = (table["rows"] for table in document["tables"])
    assert len(costs) == 5
    assert all(median > 0 for _, median, _ in costs)
    wanted = [(10752, 21), (11000, 1375), (11000, 11000)]
    assert [(blocks, nodes) for _, _, blocks, nodes, *_ in starts] == [*wanted, *wanted]
    assert [window_blocks for _, window_blocks, *_ in starts] == [0] * 3 + [4000] * 3
    assert "with a journal" in capsys.readouterr().out


def test_impossible_sizes_are_refused() -> None:
    """More published blocks than the pool has is a usage error."""
    with pytest.raises(SystemExit):
        main(["--blocks", "12000", "--published", "13000"])
