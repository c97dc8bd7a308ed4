"""How much memory this machine, or the container that we run in, has."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def machine_bytes(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Bytes of physical memory, or of the control group's limit where that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(cgroup_limit.read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return physical
    return min(physical, limit)
