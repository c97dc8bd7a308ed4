"""What `tessera admin top` draws. Pure: two readings in, text out.

Rates are what changed since the reading before; without one, since the daemon started. The map has a character for each
part of the pool: a small pool block by block, a large one by its shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cli.tables import format_table
from tessera.admin.v1 import admin_pb2

WIDTH = 64
MAP_LINES = 4
BAR_WIDTH = 20
MAX_MAPPED_BLOCKS = 4096
MARKS: dict[int, str] = {
    admin_pb2.BLOCK_STATE_ACTIVE: "#",
    admin_pb2.BLOCK_STATE_CACHED: "=",
    admin_pb2.BLOCK_STATE_QUARANTINED: "!",
    admin_pb2.BLOCK_STATE_FREE: ".",
}
LEGEND = "# active   = cached   ! quarantined   . free"


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read at `moment` (monotonic seconds); `blocks` are the states of all blocks, None in a large pool."""

    moment: float
    snapshot: Any
    sessions: Sequence[Any]
    blocks: Sequence[int] | None
    limits: Any
    limits_moment: float


def draw(now: Reading, last: Reading | None) -> str:
    """The screen."""
    parts = [_head(now.snapshot), _pool(now), _rates(now, last), _limits(now.limits)]
    parts += [_tenants(now.snapshot), _decoders(now.sessions)]
    return "\n\n".join(part for part in parts if part)


def _head(snapshot: Any) -> str:
    if not snapshot.block_tokens:
        return f"epoch {snapshot.epoch}   no decoder has attached yet"
    windows = snapshot.windows
    size = (snapshot.total_blocks * snapshot.block_bytes + windows.total_blocks * windows.block_bytes) / 2**20
    return (
        f"epoch {snapshot.epoch}   {snapshot.total_blocks} blocks of {snapshot.block_tokens} tokens, {size:.0f} MiB   "
        f"{snapshot.leases} leases   {snapshot.queued_requests} queued   {snapshot.kept_branches} kept conversations"
    )


def _pool(reading: Reading) -> str:
    now = reading.snapshot
    if not now.total_blocks:
        return ""
    counts = (
        f"active {now.active_blocks} (credit {now.credit_blocks})   cached {now.cached_blocks}   "
        f"quarantined {now.quarantined_blocks}   free {now.free_blocks}   pinned {now.pinned_blocks}"
    )
    return "\n".join([*_map(reading), LEGEND, counts, *_windows(now)])


def _windows(now: Any) -> list[str]:
    """A line for the window blocks, where the layout has groups of layers."""
    if not now.HasField("windows"):
        return []
    windows = now.windows
    attached = windows.total_blocks - windows.free_blocks
    return [f"window blocks: needed {windows.needed_blocks}   attached {attached}   free {windows.free_blocks}"]


def _map(reading: Reading) -> list[str]:
    """The pool in at most MAP_LINES lines. Of several blocks in one place the most frequent state shows."""
    if reading.blocks is None:
        now = reading.snapshot
        shares = (
            (admin_pb2.BLOCK_STATE_ACTIVE, now.active_blocks),
            (admin_pb2.BLOCK_STATE_CACHED, now.cached_blocks),
            (admin_pb2.BLOCK_STATE_QUARANTINED, now.quarantined_blocks),
        )
        text = "".join(MARKS[state] * _part(count, now.total_blocks, WIDTH * MAP_LINES) for state, count in shares)
        text = text[: WIDTH * MAP_LINES].ljust(WIDTH * MAP_LINES, MARKS[admin_pb2.BLOCK_STATE_FREE])
    else:
        each = max(1, -(-len(reading.blocks) // (WIDTH * MAP_LINES)))
        places = [reading.blocks[start : start + each] for start in range(0, len(reading.blocks), each)]
        text = "".join(MARKS.get(Counter(place).most_common(1)[0][0], "?") for place in places)
    return [text[start : start + WIDTH] for start in range(0, len(text), WIDTH)]


def _part(count: int, total: int, width: int) -> int:
    """How many of `width` places a count fills; at least one if there is any, and never more than there are."""
    return min(width, max(1, round(count * width / total))) if count and total else 0


def _rates(now: Reading, last: Reading | None) -> str:
    names = ("generated_tokens", "prompt_tokens", "hit_tokens", "evictions", "preemptions", "waits", "cow_copies")
    before = None if last is None or last.snapshot.epoch != now.snapshot.epoch else last.snapshot
    seconds = 0.0 if last is None else max(now.moment - last.moment, 1e-3)
    rows = []
    for name in names:
        total = getattr(now.snapshot, name)
        rate = None if before is None else (total - getattr(before, name)) / seconds
        rows.append((name.replace("_", " "), "" if rate is None else f"{rate:.1f}", total))
    return format_table(("counter", "per second", "in all"), rows)


def _limits(limits: Any) -> str:
    if not limits.admissions:
        return "token hits no request was admitted yet"
    gap = limits.best_hit_rate - limits.hit_rate
    return (
        f"token hits {_percent(limits.hit_rate)} of the prompt tokens of the last {limits.admissions} requests\n"
        f"           {_percent(limits.best_hit_rate)} was the best possible in this pool: {_percent(gap)} away; "
        f"{_percent(limits.infinite_hit_rate)} without an end of room"
    )


def _tenants(snapshot: Any) -> str:
    """A row a tenant. Its hits are of requests, those that found any of their prompt; the limits are of tokens."""
    rows = []
    for tenant in snapshot.tenants:
        ceiling = tenant.ceiling_blocks or snapshot.total_blocks
        asked = tenant.hits + tenant.misses
        rows.append(
            (
                tenant.tenant,
                _bar(tenant.used_blocks, tenant.floor_blocks, ceiling),
                tenant.used_blocks,
                ceiling,
                tenant.floor_blocks,
                tenant.weight,
                tenant.active_blocks,
                tenant.pinned_blocks,
                tenant.evictions,
                _percent(tenant.hits / asked) if asked else "",
            )
        )
    header = ("tenant", "quota", "used", "ceiling", "floor", "weight", "active", "pinned", "evictions", "request hits")
    return format_table(header, rows) if rows else ""


def _bar(used: int, floor: int, ceiling: int) -> str:
    """How much of a ceiling is used; `|` is where the floor ends."""
    filled = min(BAR_WIDTH, _part(used, ceiling, BAR_WIDTH))
    bar = list("#" * filled + "." * (BAR_WIDTH - filled))
    if floor and ceiling:
        bar[min(BAR_WIDTH - 1, floor * BAR_WIDTH // ceiling)] = "|"
    return f"[{''.join(bar)}]"


def _decoders(sessions: Sequence[Any]) -> str:
    rows = [
        (
            item.decoder_name,
            item.process_id,
            "away" if item.away else "attached",
            item.leases,
            item.credit_blocks,
            item.queued_requests,
            item.age_seconds,
            item.lease_seconds_left,
        )
        for item in sessions
    ]
    header = ("decoder", "process", "state", "leases", "credit", "queued", "age (s)", "lease left (s)")
    return format_table(header, rows) if rows else "no decoder is attached"


def _percent(part: float) -> str:
    return f"{part * 100:.1f} %"
