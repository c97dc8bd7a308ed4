"""Traces of admissions: what `tessera bench replay` runs. Reading, writing, and a generator of plausible ones.

A trace is a file of JSON lines. The first may be a header, {"format": "tessera-admissions", "version": 1}; every other
one is an admission, oldest first:

    {"time": 12.25, "tenant": "acme", "blocks": [17, 402, 403], "priority": 50, "ttl_seconds": 600}

time:        seconds since any beginning; never falls
tenant:      whose prompt it is; blocks of two tenants are never the same. Absent: ""
blocks:      one name for each whole block of the prompt, a whole number or a string, that stands for the block and all
             before it: a chained hash, or a number given at first sight. No name twice in one admission
priority:    0..100, of the blocks in eviction. Absent: 50
ttl_seconds: > 0, after the last use. Absent: never

So a recorder needs neither a model nor a text, and a trace gives neither away.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FORMAT = "tessera-admissions"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Admission:
    """One line of a trace; see the module."""

    time: float
    tenant: str
    blocks: tuple[int | str, ...]
    priority: int = 50
    ttl_seconds: float = 0.0


def read_trace(path: Path) -> list[Admission]:
    """All admissions of a trace. Raises ValueError with the line that is wrong."""
    admissions: list[Admission] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                admission = _admission(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            if admission is None:
                continue
            if admissions and admission.time < admissions[-1].time:
                raise ValueError(f"{path}, line {number}: the time falls")
            admissions.append(admission)
    return admissions


def write_trace(path: Path, admissions: Iterable[Admission]) -> None:
    """Writes a trace."""
    with path.open("w", encoding="utf-8") as lines:
        lines.write(json.dumps({"format": FORMAT, "version": VERSION}) + "\n")
        for item in admissions:
            fields = {"time": item.time, "tenant": item.tenant, "blocks": item.blocks, "priority": item.priority}
            if item.ttl_seconds:
                fields["ttl_seconds"] = item.ttl_seconds
            lines.write(json.dumps(fields) + "\n")


def _admission(fields: object) -> Admission | None:
    """One line; None for a header. Raises ValueError, TypeError or KeyError."""
    if not isinstance(fields, dict):
        raise ValueError("is no JSON object")
    if "format" in fields:
        if (fields["format"], fields.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"the header is not of {FORMAT}, version {VERSION}")
        return None
    for name in ("time", "blocks"):
        if name not in fields:
            raise ValueError(f"{name}: is missing; needed are time and blocks, allowed tenant, priority, ttl_seconds")
    blocks = tuple(fields["blocks"])
    if not all(isinstance(block, int | str) for block in blocks) or len(set(blocks)) != len(blocks):
        raise ValueError("blocks: allowed are numbers and strings, each once")
    priority, ttl = fields.get("priority", 50), fields.get("ttl_seconds", 0.0)
    if not (isinstance(priority, int) and 0 <= priority <= 100):
        raise ValueError("priority: allowed are 0..100")
    if not 0 <= ttl < 1e10:
        raise ValueError("ttl_seconds: allowed is a number > 0")
    return Admission(float(fields["time"]), str(fields.get("tenant", "")), blocks, priority, float(ttl))


def make_sessions(
    seed: int,
    num_sessions: int,
    *,
    num_tenants: int = 4,
    systems: int = 8,
    system_blocks: int = 32,
    turn_blocks: int = 8,
    mean_turns: float = 6.0,
    mean_gap_seconds: float = 30.0,
    sessions_per_second: float = 1.0,
) -> list[Admission]:
    """Conversations: each begins with one of its tenant's system prompts (few are common, most rare), and each turn
    sends all that was said before and some blocks more. Equal seeds give equal traces."""
    return list(_merged(np.random.default_rng(seed), num_sessions, num_tenants, systems, system_blocks, turn_blocks,
                        mean_turns, mean_gap_seconds, sessions_per_second))  # fmt: skip


def _merged(
    random: np.random.Generator,
    num_sessions: int,
    num_tenants: int,
    systems: int,
    system_blocks: int,
    turn_blocks: int,
    mean_turns: float,
    mean_gap_seconds: float,
    sessions_per_second: float,
) -> Iterator[Admission]:
    names: dict[tuple[int, object], int] = {}  # (name before, content) -> name

    def chain(contents: Sequence[object]) -> tuple[int, ...]:
        made, before = [], 0
        for content in contents:
            before = names.setdefault((before, content), len(names) + 1)
            made.append(before)
        return tuple(made)

    turns: list[tuple[float, str, list[object]]] = []
    begin = 0.0
    for session in range(num_sessions):
        begin += float(random.exponential(1.0 / sessions_per_second))
        tenant = min(int(random.zipf(1.5)) - 1, num_tenants - 1)
        system = min(int(random.zipf(1.3)) - 1, systems - 1)
        contents: list[object] = [("system", tenant, system, place) for place in range(system_blocks)]
        time = begin
        for turn in range(int(random.geometric(1.0 / mean_turns))):
            count = 1 + int(random.poisson(turn_blocks - 1))
            contents = contents + [("said", session, turn, place) for place in range(count)]
            turns.append((time, f"tenant-{tenant}", contents))
            time += float(random.exponential(mean_gap_seconds))
    for time, tenant_name, said in sorted(turns, key=lambda turn: turn[0]):
        yield Admission(round(time, 3), tenant_name, chain(said))
