"""Plain tables."""

from __future__ import annotations

import pytest

from cli.tables import format_table


def test_numbers_align_right_and_text_left() -> None:
    """Columns are as wide as their longest cell; a column of numbers aligns right."""
    table = format_table(("name", "count"), [("a", 5), ("long name", 12345)])
    assert table.splitlines() == ["name       count", "---------  -----", "a              5", "long name  12345"]


def test_empty_values_and_truths_are_readable() -> None:
    """None is an empty cell, booleans are yes and no, floats have one decimal."""
    assert format_table(("a", "b", "c"), [(None, True, 1.25)]).splitlines()[2] == "   yes  1.2"


def test_a_ragged_row_is_refused() -> None:
    """A row that does not fit the header raises instead of shifting columns."""
    with pytest.raises(ValueError, match="1 cells"):
        format_table(("a", "b"), [("x",)])
