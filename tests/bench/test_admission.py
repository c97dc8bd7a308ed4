"""The bench of admission on a tiny model: every part is told, and the parts make up the whole. No timing is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import admission
from bench.admission import PARTS, Told, join, rows_of
from cli.errors import CommandError

ORDER = (
    "asked_by_client_ns", "arrived_ns", "submitted_ns", "queued_ns", "asked_ns", "admitted_ns", "copied_ns", "begun_ns",
    "computed_ns", "first_token_ns", "told_client_ns",
)  # fmt: skip
MOMENTS = {name: 1_000_000 * (index + 1) ** 2 for index, name in enumerate(ORDER)}


def test_every_part_of_the_way_is_told(common_options: list[str], tmp_path: Path) -> None:
    """A real node's requests come from the cache to the last token but one, and each part took its time."""
    assert admission.main([*common_options, "--prompt-tokens", "64", "--rounds", "3", "--pool-bytes", "32M"]) == 0
    document = json.loads((tmp_path / "rows.json").read_text())
    rows = {row[0]: row[1] for row in document["tables"][0]["rows"]}
    assert list(rows) == [name for name, _, _ in PARTS]
    assert all(value > 0 for value in rows.values())
    assert "of each prompt 63 tokens" in document["notes"][0]


def test_the_parts_are_the_whole() -> None:
    """Parts follow each other without a gap: their sum is the time at the client, and admission's that of its parts."""
    rows = {name: p50 for name, p50, _ in rows_of([MOMENTS])}
    whole = [name for name, begin, end in PARTS if ORDER.index(end) - ORDER.index(begin) > 1]
    single = [(name, begin) for name, begin, _ in PARTS if name not in whole]
    assert [begin for _, begin in single] == list(ORDER[:-1])
    admitted, everything = whole
    inside = ORDER[ORDER.index("arrived_ns") : ORDER.index("begun_ns")]
    assert sum(rows[name] for name, begin in single if begin in inside) == pytest.approx(rows[admitted])
    assert sum(rows[name] for name, _ in single) == pytest.approx(rows[everything])


def test_a_moment_that_was_not_noted_ends_the_bench(tmp_path: Path) -> None:
    """Neither a missing moment, nor one before its part began, nor a missing answer becomes a figure."""
    for wrong in ({"copied_ns": 0}, {"begun_ns": MOMENTS["copied_ns"] - 1}):
        with pytest.raises(CommandError):
            rows_of([MOMENTS, MOMENTS | wrong])
    (tmp_path / "gateway.log").write_text(json.dumps({"event": "first_token_timed", "request_id": "a", **MOMENTS}))
    assert join([Told("a", 1, 5, 6)], tmp_path)[0]["asked_by_client_ns"] == 5
    with pytest.raises(CommandError, match="1 of 2"):
        join([Told("a", 1, 5, 6), Told("b", 1, 5, 6)], tmp_path)
