"""How answers of the admin RPC look as tables. Pure: messages in, text out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from cli.tables import format_table
from tessera.admin.v1 import admin_pb2

MAX_SHOWN_BLOCKS = 8


def as_plain(message: Any) -> dict[str, Any]:
    """A message as plain values for JSON: every field, numbers as numbers, enums by name.

    The canonical JSON of protobuf would turn 64-bit numbers into strings, which no script wants to compare.
    """

    def plain(field: Any, value: Any) -> Any:
        if field.message_type is not None:
            return as_plain(value)
        return field.enum_type.values_by_number[value].name if field.enum_type is not None else value

    shown: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        shown[field.name] = [plain(field, item) for item in value] if field.is_repeated else plain(field, value)
    return shown


def show_snapshot(answer: Any) -> str:
    """All counters, then the tenants."""
    counters = [
        (name.name, getattr(answer, name.name))
        for name in admin_pb2.GetSnapshotResponse.DESCRIPTOR.fields
        if name.name != "tenants"
    ]
    text = format_table(("counter", "value"), counters)
    if not answer.tenants:
        return text
    rows = [(t.tenant, t.cached_blocks, t.active_blocks, t.hits, t.misses, t.hit_tokens) for t in answer.tenants]
    header = ("tenant", "cached blocks", "active blocks", "hits", "misses", "hit tokens")
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
            block.tenant,
        )
        for block in blocks
    ]
    header = ("block", "state", "generation", "references", "published", "evictable", "tokens", "tenant")
    return format_table(header, rows)


def show_prefixes(prefixes: Sequence[Any]) -> str:
    """Nodes of the index, parents before children."""
    rows = [
        (p.node, p.parent, p.tenant, p.start_token, p.num_tokens, _numbers(p.blocks), p.references, p.children, p.name)
        for p in prefixes
    ]
    header = ("node", "parent", "tenant", "start", "tokens", "blocks", "references", "children", "name")
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
        (s.session, s.decoder_name, s.process_id, s.mapped, s.leases, s.credit_blocks, s.queued_requests, s.age_seconds)
        for s in sessions
    ]
    header = ("session", "decoder", "process", "mapped", "leases", "credit", "queued", "age (s)")
    return format_table(header, rows)


def show_tenants(tenants: Sequence[Any]) -> str:
    """Tenants, one line a key."""
    rows: list[tuple[object, ...]] = []
    for tenant in tenants:
        if not tenant.keys:
            rows.append((tenant.tenant, "", "", "no key", "", "", ""))
        for key in tenant.keys:
            moments = (key.created_unix_seconds, key.expires_unix_seconds, key.last_used_unix_seconds)
            state = key_state(key, time.time())
            rows.append((tenant.tenant, key.key_id, key.name, state, *map(_moment, moments)))
    return format_table(("tenant", "key id", "name", "state", "created", "expires", "last used"), rows)


def key_state(key: Any, now_unix_seconds: float) -> str:
    """Whether a key is let in: valid, expired or revoked."""
    if key.revoked:
        return "revoked"
    return "expired" if 0 < key.expires_unix_seconds <= now_unix_seconds else "valid"


def _numbers(values: Sequence[int]) -> str:
    shown = " ".join(map(str, values[:MAX_SHOWN_BLOCKS]))
    return f"{shown} … ({len(values)})" if len(values) > MAX_SHOWN_BLOCKS else shown


def _moment(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds)) if unix_seconds else "never"


TABLES: dict[str, Callable[[Sequence[Any]], str]] = {
    "blocks": show_blocks,
    "prefixes": show_prefixes,
    "leases": show_leases,
    "sessions": show_sessions,
    "tenants": show_tenants,
}
"""Field of a list answer -> its table."""
