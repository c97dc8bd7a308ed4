"""How much memory this machine, or the container that we run in, has, and that nobody takes more."""

from __future__ import annotations

import os
from pathlib import Path

from common.errors import ResourceExhausted

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


def check_available(num_bytes: int, subject: str, what: str) -> None:
    """Raise ResourceExhausted (NO_MEMORY) with both numbers where `what` takes more bytes than can be taken."""
    if num_bytes > (free := available_bytes()):
        raise ResourceExhausted(
            f"{subject}: {what} take {num_bytes} bytes of memory; {free} can be taken",
            subject=subject,
            needed=num_bytes,
            usable=free,
            reason="NO_MEMORY",
        )


def _fields(path: Path) -> dict[str, int]:
    pieces = (line.split() for line in path.read_text().splitlines())
    return {line[0]: int(line[1]) for line in pieces if len(line) > 1}
