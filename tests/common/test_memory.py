"""What the machine has: physical memory, or less in a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.memory import available_bytes, machine_bytes

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


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max", 5 * 1024), ("10000", 5 * 1024), ("6000", 6000 - 4000 + 300), ("2000", 0), (None, 5 * 1024)],
)
def test_what_is_free_is_the_lesser_of_machine_and_group(tmp_path: Path, limit: str | None, expected: int) -> None:
    """The kernel's estimate, or what the group's limit leaves; file pages of the group can be dropped, others not."""
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:      5 kB\n")
    (tmp_path / "memory.current").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 3000\nfile 900\nactive_file 100\ninactive_file 200\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == expected


def test_what_is_free_here_is_part_of_what_there_is() -> None:
    """On the machine itself it is a number between nothing and all."""
    assert 0 < available_bytes() <= machine_bytes()
