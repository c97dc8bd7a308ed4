"""Counters since the daemon started. They only grow. The manager's modules write them, the views read them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TenantCounters:
    """One tenant's admissions, and its blocks that were evicted. `hit_tokens` is a sum over hits."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    evictions: int = 0


@dataclass(slots=True)
class Counters:
    """The node's counters; `tenants` by tenant index."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    cow_copies: int = 0
    evictions: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    waits: int = 0
    scrubbed_blocks: int = 0
    adopted_blocks: int = 0
    shortened_hits: int = 0
    shortened_tokens: int = 0
    tenants: dict[int, TenantCounters] = field(default_factory=dict)

    def count_eviction(self, owner: int, num_blocks: int) -> None:
        """Blocks of one owner that were evicted."""
        self.evictions += num_blocks
        self._tenant(owner).evictions += num_blocks

    def count_admission(self, owner: int, cached_tokens: int, prompt_tokens: int) -> None:
        """One admitted request, once: a hit if it found at least one token."""
        self.prompt_tokens += prompt_tokens
        tenant = self._tenant(owner)
        if cached_tokens:
            self.hits += 1
            self.hit_tokens += cached_tokens
            tenant.hits += 1
            tenant.hit_tokens += cached_tokens
        else:
            self.misses += 1
            tenant.misses += 1

    def _tenant(self, owner: int) -> TenantCounters:
        counters = self.tenants.get(owner)
        if counters is None:
            counters = self.tenants[owner] = TenantCounters()
        return counters
