"""Tables on the terminal, medians, and the same rows as JSON. Every bench prints through here.

A `Report` collects what one run measured: facts about the machine, tables, notes. It measures nothing and decides
nothing; cells are what the bench computed, so that the JSON file and the terminal never disagree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Cell = str | int | float | None


def quantile(values: Sequence[float], fraction: float) -> float:
    """The `fraction` quantile (0..1), linear between neighbours. Raises ValueError on no values."""
    if not values:
        raise ValueError("no values to take a quantile of")
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction is {fraction}; allowed is 0..1")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """The middle value. Raises ValueError on no values."""
    return quantile(values, 0.5)


def spread(values: Sequence[float]) -> str:
    """`lowest..highest`, so that a reader sees how quiet the machine was."""
    return f"{min(values):.3g}..{max(values):.3g}" if values else "-"


def format_cell(value: Cell) -> str:
    """Three significant digits for a float, `-` for what was not measured."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(decimals, 6)}f}"


def format_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A Markdown table, columns padded, numbers to the right. Raises ValueError on a row of the wrong length."""
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row has {len(row)} cells, the table {len(columns)} columns")
    texts = [[format_cell(cell) for cell in row] for row in rows]
    left = [any(isinstance(row[index], str) for row in rows) for index in range(len(columns))]
    widths = [max(len(columns[index]), 3, *(len(row[index]) for row in texts), 0) for index in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(cells, widths, left, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if is_left else "-" * (width - 1) + ":" for width, is_left in zip(widths, left, strict=True)]
    return "\n".join([line(columns), line(rule), *(line(row) for row in texts)])


@dataclass(slots=True)
class Report:
    """Everything one bench says. Tables are printed as they come, so that a long run shows its progress."""

    name: str
    facts: Mapping[str, Cell]
    _tables: list[dict[str, object]] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Print what was measured where."""
        print(f"# bench {self.name}")
        print("; ".join(f"{key} {format_cell(value)}" for key, value in self.facts.items()), flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print one table and keep its rows."""
        print(f"\n{title}\n\n{format_table(columns, rows)}", flush=True)
        self._tables.append({"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})

    def note(self, text: str) -> None:
        """Print one line that explains a table."""
        print(f"\n{text}", flush=True)
        self._notes.append(text)

    def write_json(self, path: Path | None) -> None:
        """Write the run to `path`, unless it is None. NaN becomes null."""
        if path is None:
            return
        document = {"bench": self.name, "facts": dict(self.facts), "tables": self._tables, "notes": self._notes}
        path.write_text(json.dumps(_without_nan(document), indent=2, allow_nan=False) + "\n")


def _without_nan(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return value
