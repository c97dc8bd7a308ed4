"""What the machine has: physical memory, or less in a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.memory import machine_bytes

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("written", "expected"),
    [("max\n", PHYSICAL), ("1048576\n", 1 << 20), (f"{4 * PHYSICAL}\n", PHYSICAL), (None, PHYSICAL)],
)
def test_the_lower_limit_counts(tmp_path: Path, written: str | None, expected: int) -> None:
    """A limit of the control group below the machine's memory is what there is."""
    path = tmp_path / "memory.max"
    if written is not None:
        path.write_text(written)
    assert machine_bytes(path) == expected
