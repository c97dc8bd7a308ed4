"""What operators see of the core: frozen values, copies that alias nothing. Built by `listing.py`, sent by the admin
service. They hold counts and numbers, never tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from cachemgr.blocks import BlockState
from cachemgr.ids import LeaseId, NodeId, SessionId, TenantId

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """One page. `next_after` is what to pass as `after` for the next one; 0 means that this was the last page."""

    items: list[Item]
    next_after: int


@dataclass(frozen=True, slots=True)
class TenantView:
    """One tenant's share of the pool and its counters."""

    tenant: TenantId
    cached_blocks: int
    active_blocks: int
    hits: int
    misses: int
    hit_tokens: int
    indexed_blocks: int
    used_blocks: int
    evictions: int
    kept_branches: int
    pinned_blocks: int


@dataclass(frozen=True, slots=True)
class WindowView:
    """The window blocks; see WindowPool for their meaning."""

    total_blocks: int
    free_blocks: int
    needed_blocks: int
    reclaimed_blocks: int
    shortened_hits: int
    shortened_tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All counters at one moment; see GetSnapshotResponse for their meaning. free+cached+active+quarantined = total."""

    total_blocks: int
    usable_blocks: int
    free_blocks: int
    cached_blocks: int
    active_blocks: int
    quarantined_blocks: int
    indexed_blocks: int
    credit_blocks: int
    leases: int
    sessions: int
    hits: int
    misses: int
    hit_tokens: int
    cow_copies: int
    evictions: int
    preemptions: int
    generated_tokens: int
    hash_collisions: int
    queued_requests: int
    epoch: int
    revision: int
    block_tokens: int
    prompt_tokens: int
    waits: int
    kept_branches: int
    pinned_blocks: int
    scrubbed_blocks: int
    fenced_operations: int
    adopted_blocks: int
    tenants: list[TenantView]
    windows: WindowView | None = None  # None without groups of layers


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block. `references` = leases that hold it, plus one if published; `tenant` is empty where none owns it."""

    block: int
    generation: int
    state: BlockState
    references: int
    published: bool
    tenant: TenantId
    evictable: bool
    num_tokens: int
    pinned: bool
    window_block: int = 0


@dataclass(frozen=True, slots=True)
class PrefixView:
    """One node of the index. `parent` 0 means that it hangs from its root, another tenant's node that it hangs below a
    wider scope; `children` counts such trees too. `name` is lower-case hexadecimal, `expires_ns` None means never."""

    node: NodeId
    parent: NodeId
    tenant: TenantId
    start_token: int
    num_tokens: int
    blocks: list[int]
    references: int
    name: str
    children: int
    priority: int
    pinned: bool
    expires_ns: int | None


@dataclass(frozen=True, slots=True)
class LeaseView:
    """One lease. `granted_ns` is the `now_ns` of its grant; `parent` 0 means that it was not forked."""

    lease: LeaseId
    session: SessionId
    tenant: TenantId
    request_id: str
    sample: int
    num_tokens: int
    sealed_tokens: int
    granted_ns: int
    blocks: list[int]
    parent: LeaseId


@dataclass(frozen=True, slots=True)
class BranchView:
    """One kept branch. `num_blocks` is 0 where its holds were dropped; `references` are those of its last block:
    branches and leases that share it, plus one if published."""

    branch: int
    tenant: TenantId
    num_tokens: int
    num_blocks: int
    references: int
    expires_ns: int


@dataclass(frozen=True, slots=True)
class SessionView:
    """One attached decoder. `attached_ns` is the `now_ns` of its attach; at `deadline_ns` it is over if it is silent;
    `away` says that its stream is broken."""

    session: SessionId
    decoder_name: str
    process_id: int
    leases: int
    credit_blocks: int
    queued_requests: int
    attached_ns: int
    deadline_ns: int
    away: bool


@dataclass(frozen=True, slots=True)
class PinView:
    """One pin. `num_tokens` are kept by it; `expires_ns` None means that it stays until it is ended."""

    pin: int
    tenant: TenantId
    num_tokens: int
    num_blocks: int
    expires_ns: int | None
