"""Which prefills a step computes tokens of, and how many. Owns the division of one step's budget.

Invariants: no more than the budget is given, and all of it where there is so much to compute; every tenant with a
prefill gets its part by weight, or all that it can use, so that no tenant's prompts keep another's waiting; within a
tenant the best ranked prefill gets at least half, so it always moves. Pure; called by the scheduler once a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows

from decoder.sequence import Sequence


def share_chunks(prefills: Rows[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """(sequence, tokens >= 1) of `prefills`, which are in order of rank, with `budget` >= 1 tokens in all."""
    tenants: dict[str, list[Sequence]] = {}
    for sequence in prefills:
        tenants.setdefault(sequence.request.tenant, []).append(sequence)
    wanted = {name: sum(sequence.remaining for sequence in group) for name, group in tenants.items()}
    weights = {name: group[0].request.tenant_weight for name, group in tenants.items()}
    chunks: list[tuple[Sequence, int]] = []
    for name, part in divide(wanted, weights, budget).items():
        if part:
            chunks += _within(tenants[name], part)
    return chunks


def divide(wanted: Mapping[str, int], weights: Mapping[str, float], budget: int) -> dict[str, int]:
    """Max-min fair parts of `budget` tokens by weight, at most what each wants (Bertsekas & Gallager, "Data Networks",
    section 6.5.2, on one link). Single tokens left by rounding go to the first named."""
    parts = dict.fromkeys(wanted, 0)
    open_names = [name for name in wanted if wanted[name]]
    while open_names and budget > 0:
        total = sum(weights[name] for name in open_names)
        level = budget / total
        full = [name for name in open_names if wanted[name] <= level * weights[name]]
        for name in full:
            parts[name] = wanted[name]
            budget -= wanted[name]
        if full:
            open_names = [name for name in open_names if name not in full]
            continue
        for name in open_names:
            parts[name] = int(level * weights[name])
        left = budget - sum(parts[name] for name in open_names)
        for name in open_names[:left]:
            parts[name] += 1
        break
    return parts


def _within(group: Rows[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    # The best ranked prefill gets at least half of the budget, so it always moves; the rest goes to the shortest
    # first, so that a long prompt does not hold short ones up; what they leave goes back to the first.
    first = group[0]
    granted = min(first.remaining, -(-budget // 2))
    budget -= granted
    others: list[tuple[Sequence, int]] = []
    for sequence in sorted(group[1:], key=lambda item: item.remaining):
        if not budget:
            break
        part = min(sequence.remaining, budget)
        budget -= part
        others.append((sequence, part))
    granted += min(first.remaining - granted, budget)
    return [(first, granted), *others]
