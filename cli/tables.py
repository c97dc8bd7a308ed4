"""Plain tables for a terminal: columns as wide as their longest cell, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Lay out `rows` under `header`; numbers align right, everything else left. Raises ValueError on ragged rows."""
    ragged = [row for row in rows if len(row) != len(header)]
    if ragged:
        raise ValueError(f"a row has {len(ragged[0])} cells; the header has {len(header)}")
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(header), *cells]) for column in range(len(header))]
    numeric = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(len(header))]

    def line(values: Sequence[str]) -> str:
        parts = [
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(values, widths, numeric, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(list(header)), line(["-" * width for width in widths]), *map(line, cells)])


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _text(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    return "" if cell is None else str(cell)
