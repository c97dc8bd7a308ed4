"""How tenants, keys, groups, pins, approvals and kept conversations look as tables. Pure: messages in, text out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cli.admin_tables import seconds_left
from cli.tables import format_table


def show_tenants(tenants: Sequence[Any]) -> str:
    """Tenants with their quotas, then their keys."""
    rows = [
        (
            t.tenant,
            _moment(t.created_unix_seconds),
            len(t.keys),
            t.floor_blocks,
            t.ceiling_blocks or "pool",
            t.weight,
            t.pin_blocks,
            " ".join(t.groups),
        )
        for t in tenants
    ]
    header = ("tenant", "created", "keys", "floor", "ceiling", "weight", "pins", "groups")
    return f"{format_table(header, rows)}\n\n{show_keys(tenants)}"


def show_keys(tenants: Sequence[Any]) -> str:
    """The keys of tenants, one line a key."""
    rows: list[tuple[object, ...]] = []
    for tenant in tenants:
        if not tenant.keys:
            rows.append((tenant.tenant, "", "", "no key", "", "", ""))
        for key in tenant.keys:
            moments = (key.created_unix_seconds, key.expires_unix_seconds, key.last_used_unix_seconds)
            state = key_state(key, time.time())
            rows.append((tenant.tenant, key.key_id, key.name, state, *map(_moment, moments)))
    return format_table(("tenant", "key id", "name", "state", "created", "expires", "last used"), rows)


def show_groups(groups: Sequence[Any]) -> str:
    """Groups and their members."""
    rows = [(group.group, " ".join(group.tenants), _moment(group.created_unix_seconds)) for group in groups]
    return format_table(("group", "members", "created"), rows)


def show_pins(pins: Sequence[Any]) -> str:
    """Pins and what they keep."""
    rows = [(pin.pin, pin.tenant, pin.num_tokens, pin.num_blocks, seconds_left(pin)) for pin in pins]
    return format_table(("pin", "tenant", "tokens", "blocks", "ends in (s)"), rows)


def show_approved(prefixes: Sequence[Any]) -> str:
    """Approved prefixes: how long they are, not what they say."""
    rows = [(prefix.name, prefix.num_tokens, _moment(prefix.created_unix_seconds)) for prefix in prefixes]
    return format_table(("name", "tokens", "approved"), rows)


def show_branches(branches: Sequence[Any]) -> str:
    """Kept conversations."""
    rows = [(b.branch, b.tenant, b.num_tokens, b.num_blocks, b.references, b.expires_in_seconds) for b in branches]
    return format_table(("branch", "tenant", "tokens", "blocks", "references", "ends in (s)"), rows)


def key_state(key: Any, now_unix_seconds: float) -> str:
    """Whether a key is let in: valid, expired or revoked."""
    if key.revoked:
        return "revoked"
    return "expired" if 0 < key.expires_unix_seconds <= now_unix_seconds else "valid"


def _moment(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds)) if unix_seconds else "never"
