"""How much memory this machine, or the container that we run in, has."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_LIMIT = _CGROUP / "memory.max"
_MEMORY = Path("/proc/meminfo")


def machine_bytes(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Bytes of physical memory, or of the control group's limit where that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(cgroup_limit.read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return physical
    return min(physical, limit)


def available_bytes(memory: Path = _MEMORY, group: Path = _CGROUP) -> int:
    """Bytes that can be taken without swapping: the kernel's estimate, or what the limit of the control group leaves
    where that is less. Page cache that can be dropped counts as free."""
    try:
        free = _fields(memory)["MemAvailable:"] * 1024
    except (OSError, ValueError, KeyError):
        free = machine_bytes(group / "memory.max")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = _fields(group / "memory.stat")
    except (OSError, ValueError):
        return free
    return min(free, max(0, limit - used + cached.get("inactive_file", 0) + cached.get("active_file", 0)))


def _fields(path: Path) -> dict[str, int]:
    pieces = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in pieces if len(line) > 1}
