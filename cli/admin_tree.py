"""The prefix index as a drawing for a terminal. Pure: messages in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.words import count


def show_tree(prefixes: Sequence[Any]) -> str:
    """Nodes below their parents, under the tenant or scope that owns them; there too where no parent is listed."""
    known = {prefix.node for prefix in prefixes}
    below: dict[int, list[Any]] = {}
    roots: dict[str, list[Any]] = {}
    for prefix in prefixes:
        if prefix.parent in known:
            below.setdefault(prefix.parent, []).append(prefix)
        else:
            roots.setdefault(prefix.tenant, []).append(prefix)
    lines: list[str] = []
    for tenant in sorted(roots):
        lines.append(tenant)
        # Depth first without recursion: a conversation can be deeper than Python's stack.
        stack = [(item, "", number == 0) for number, item in enumerate(reversed(roots[tenant]))]
        while stack:
            prefix, indent, is_last = stack.pop()
            lines.append(f"{indent}{'└─ ' if is_last else '├─ '}{_node(prefix, tenant)}")
            inner = indent + ("   " if is_last else "│  ")
            children = below.get(prefix.node, [])
            stack += [(item, inner, number == 0) for number, item in enumerate(reversed(children))]
    return "\n".join(lines)


def _node(prefix: Any, tenant: str) -> str:
    """One node: its tokens, blocks, and what keeps or ends it."""
    end = prefix.start_token + prefix.num_tokens
    parts = [f"tokens {prefix.start_token}..{end - 1}", count(sum(block > 0 for block in prefix.blocks), "block")]
    if prefix.tenant != tenant:
        parts.append(f"of {prefix.tenant}")
    if prefix.references:
        parts.append(count(prefix.references, "holder"))
    if prefix.pinned:
        parts.append("pinned")
    if prefix.priority:
        parts.append(f"priority {prefix.priority}")
    if prefix.HasField("expires_in_seconds"):
        parts.append(f"ends in {prefix.expires_in_seconds:.0f} s")
    return f"#{prefix.node}  {', '.join(parts)}"
