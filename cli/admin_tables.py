"""How answers of the admin RPC look as tables. Pure: messages in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cli.tables import format_table
from tessera.admin.v1 import admin_pb2

MAX_SHOWN_BLOCKS = 8


def show_snapshot(answer: Any) -> str:
    """All counters, then the tenants."""
    counters = [
        (name.name, getattr(answer, name.name))
        for name in admin_pb2.GetSnapshotResponse.DESCRIPTOR.fields
        if name.name not in ("tenants", "windows")
    ]
    if answer.HasField("windows"):
        fields = admin_pb2.WindowPool.DESCRIPTOR.fields
        counters += [(f"windows.{name.name}", getattr(answer.windows, name.name)) for name in fields]
    text = format_table(("counter", "value"), counters)
    if not answer.tenants:
        return text
    rows = [
        (
            t.tenant,
            t.used_blocks,
            t.floor_blocks,
            t.ceiling_blocks or "pool",
            t.cached_blocks,
            t.active_blocks,
            t.pinned_blocks,
            t.evictions,
            t.hits,
            t.misses,
            t.hit_tokens,
        )
        for t in answer.tenants
    ]
    header = (
        "tenant",
        "used blocks",
        "floor",
        "ceiling",
        "cached",
        "active",
        "pinned",
        "evictions",
        "hits",
        "misses",
        "hit tokens",
    )
    return f"{text}\n\n{format_table(header, rows)}"


def show_blocks(blocks: Sequence[Any]) -> str:
    """Blocks by number."""
    rows = [
        (
            block.block,
            admin_pb2.BlockState.Name(block.state).removeprefix("BLOCK_STATE_").lower(),
            block.generation,
            block.references,
            block.published,
            block.evictable,
            block.num_tokens,
            block.pinned,
            block.window_block or "",
            block.tenant,
        )
        for block in blocks
    ]
    header = (
        "block", "state", "generation", "references", "published", "evictable", "tokens", "pinned", "window", "tenant",
    )  # fmt: skip
    return format_table(header, rows)


def show_prefixes(prefixes: Sequence[Any]) -> str:
    """Nodes of the index, parents before children."""
    rows = [
        (
            p.node,
            p.parent,
            p.tenant,
            p.start_token,
            p.num_tokens,
            _numbers(p.blocks),
            p.references,
            p.children,
            p.priority,
            p.pinned,
            seconds_left(p),
            p.name,
        )
        for p in prefixes
    ]
    header = (
        "node",
        "parent",
        "tenant",
        "start",
        "tokens",
        "blocks",
        "references",
        "children",
        "priority",
        "pinned",
        "ends in (s)",
        "name",
    )
    return format_table(header, rows)


def show_leases(leases: Sequence[Any]) -> str:
    """Leases and what they hold."""
    rows = [
        (
            lease.lease,
            lease.session,
            lease.tenant,
            lease.request_id,
            lease.sample,
            lease.num_blocks,
            lease.num_tokens,
            lease.sealed_tokens,
            lease.age_seconds,
            _numbers(lease.blocks),
        )
        for lease in leases
    ]
    header = ("lease", "session", "tenant", "request", "sample", "held", "tokens", "sealed", "age (s)", "blocks")
    return format_table(header, rows)


def show_sessions(sessions: Sequence[Any]) -> str:
    """Attached decoders."""
    rows = [
        (
            s.session,
            s.decoder_name,
            s.process_id,
            s.mapped,
            s.away,
            s.leases,
            s.credit_blocks,
            s.queued_requests,
            s.age_seconds,
            s.lease_seconds_left,
        )
        for s in sessions
    ]
    header = (
        "session",
        "decoder",
        "process",
        "mapped",
        "away",
        "leases",
        "credit",
        "queued",
        "age (s)",
        "lease left (s)",
    )
    return format_table(header, rows)


def _numbers(values: Sequence[int]) -> str:
    shown = " ".join(map(str, values[:MAX_SHOWN_BLOCKS]))
    return f"{shown} … ({len(values)})" if len(values) > MAX_SHOWN_BLOCKS else shown


def seconds_left(item: Any) -> object:
    """Seconds until something ends; "never" where it does not."""
    return f"{item.expires_in_seconds:.1f}" if item.HasField("expires_in_seconds") else "never"
