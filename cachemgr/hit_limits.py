"""How far the recent hit rate is from the best there could be. Pure; it runs beside the event loop.

Rates are cached tokens over prompt tokens. The limits are counted in whole blocks by `belady.py`, as if each had a
window block where a model has those: bounds they are there too. What was really had, parts of blocks too, is a lower
bound of both, so neither is ever said to be below it. Called by the admin service.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachemgr.belady import best_hit_rate
from cachemgr.recent import Admission


@dataclass(frozen=True, slots=True)
class HitLimits:
    """`best` of a pool of the same size that knows the future, `infinite` of one without end; all 0..1."""

    admissions: int = 0
    hit: float = 0.0
    best: float = 0.0
    infinite: float = 0.0


def hit_limits(admissions: Sequence[Admission], num_blocks: int, block_tokens: int) -> HitLimits:
    """Replays `admissions` through pools of `num_blocks`. Costs some microseconds a block."""
    prompt_tokens = sum(item.num_tokens for item in admissions)
    if not prompt_tokens:
        return HitLimits()
    hit = sum(item.cached_tokens for item in admissions) / prompt_tokens
    chains = [item.names.tolist() for item in admissions]
    whole = sum(len(chain) for chain in chains if len(chain) <= num_blocks) * block_tokens / prompt_tokens
    rates = best_hit_rate(chains, num_blocks)
    best = max(hit, rates.best * whole)
    return HitLimits(len(admissions), hit, best, max(best, rates.infinite * whole))
