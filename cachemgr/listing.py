"""Reads the core for operators: the snapshot and the paged lists. It changes nothing but cached names of nodes.

Pages are resumed after the last item of the page before, so that changes in between lose and repeat nothing else.
Called by `CacheManager`; the values are in `views.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from cachemgr.blocks import BlockState
from cachemgr.counters import TenantCounters
from cachemgr.ids import NodeId, TenantId
from cachemgr.names import node_name
from cachemgr.nodes import NEVER, Node
from cachemgr.pins import pinned_blocks
from cachemgr.state import CacheState
from cachemgr.views import (
    BlockView,
    BranchView,
    Item,
    LeaseView,
    Page,
    PrefixView,
    SessionView,
    Snapshot,
    TenantView,
    WindowView,
)
from common.layout import TOKEN_BYTES

_NODE_BITS: Final = 40  # a prefix cursor is (start block, node id): sorted so, parents come before their children


def snapshot(state: CacheState) -> Snapshot:
    """All counters at one moment."""
    pool, counters = state.pool, state.counters
    credit = sum(len(session.credit) for session in state.book.sessions.values())
    owners = len(state.tenant_names)
    cached = np.bincount(pool.owner[pool.state == BlockState.CACHED], minlength=owners).tolist()
    active = np.bincount(pool.owner[pool.state == BlockState.ACTIVE], minlength=owners).tolist()
    indexed = np.bincount(pool.owner[pool.published], minlength=owners).tolist()
    tenants = []
    for owner in range(1, owners):
        own = counters.tenants.get(owner, TenantCounters())
        tenants.append(
            TenantView(
                tenant=state.tenant_names[owner],
                cached_blocks=cached[owner],
                active_blocks=active[owner],
                hits=own.hits,
                misses=own.misses,
                hit_tokens=own.hit_tokens,
                indexed_blocks=indexed[owner],
                used_blocks=pool.ownership.charged.get(owner, 0),
                evictions=own.evictions,
                kept_branches=state.kept.count_of(owner),
                pinned_blocks=len(pinned_blocks(state, owner)),
            )
        )
    return Snapshot(
        total_blocks=pool.num_blocks,
        usable_blocks=state.room,
        free_blocks=pool.num_free,
        cached_blocks=pool.num_cached,
        active_blocks=pool.num_active,
        quarantined_blocks=pool.num_quarantined,
        indexed_blocks=pool.num_published,
        credit_blocks=credit,
        leases=len(state.book.leases),
        sessions=len(state.book.sessions),
        hits=counters.hits,
        misses=counters.misses,
        hit_tokens=counters.hit_tokens,
        cow_copies=counters.cow_copies,
        evictions=counters.evictions,
        preemptions=counters.preemptions,
        generated_tokens=counters.generated_tokens,
        hash_collisions=0 if state.weak_names is None else state.weak_names.collisions,
        queued_requests=sum(session.queued_requests for session in state.book.sessions.values()),
        epoch=state.epoch,
        revision=state.revision,
        block_tokens=state.block_tokens,
        prompt_tokens=counters.prompt_tokens,
        waits=counters.waits,
        kept_branches=len(state.kept),
        pinned_blocks=len(pinned_blocks(state)),
        scrubbed_blocks=counters.scrubbed_blocks,
        fenced_operations=state.book.fenced_operations,
        adopted_blocks=counters.adopted_blocks,
        tenants=tenants,
        windows=_windows(state),
    )


def _windows(state: CacheState) -> WindowView | None:
    """The window blocks, where there are any. Needed is what not all holders of its block have passed."""
    windows, pool = state.window_blocks, state.pool
    if windows is None:
        return None
    attached = np.flatnonzero(windows.of)
    holds = pool.references.take(attached) - pool.published.take(attached)
    return WindowView(
        total_blocks=windows.num_window_blocks,
        free_blocks=windows.num_free,
        needed_blocks=int(np.count_nonzero(holds > windows.passed_by.take(attached))),
        reclaimed_blocks=windows.num_reclaimed,
        shortened_hits=state.counters.shortened_hits,
        shortened_tokens=state.counters.shortened_tokens,
    )


def list_blocks(state: CacheState, after: int, limit: int, wanted: BlockState | None) -> Page[BlockView]:
    """Blocks by number, after block `after`, of one state or of any."""
    column = state.pool.state[max(after, 0) + 1 :]
    chosen = np.arange(len(column)) if wanted is None else np.flatnonzero(column == wanted)
    numbers = (chosen[: limit + 1] + max(after, 0) + 1).tolist()
    pinned = set(pinned_blocks(state).tolist())
    return _page([_block_view(state, number, pinned) for number in numbers], limit, lambda view: view.block)


def list_prefixes(state: CacheState, after: int, limit: int, tenant: TenantId | None) -> Page[PrefixView]:
    """Index nodes after the cursor `after`, parents before children, of one tenant or of all."""
    nodes: Iterable[Node] = state.index.forest.nodes.values()
    if tenant is not None:
        owner = state.known_owner(tenant)
        nodes = [node for node in nodes if node.tree.owner == owner]
    chosen = heapq.nsmallest(limit + 1, (node for node in nodes if _cursor(node) > after), key=_cursor)
    page = _page(chosen, limit, _cursor)
    pinned = set(pinned_blocks(state).tolist())
    return Page([_prefix_view(state, node, pinned) for node in page.items], page.next_after)


def list_leases(state: CacheState, after: int, limit: int) -> Page[LeaseView]:
    """Leases by id."""
    chosen = heapq.nsmallest(limit + 1, (number for number in state.book.leases if number > after))
    items = []
    for lease in (state.book.leases[number] for number in chosen):
        items.append(
            LeaseView(
                lease=lease.lease_id,
                session=lease.session_id,
                tenant=lease.tenant,
                request_id=lease.request_id,
                sample=lease.sample,
                num_tokens=lease.num_tokens,
                sealed_tokens=lease.sealed,
                granted_ns=lease.granted_ns,
                blocks=lease.blocks.tolist(),
                parent=lease.parent,
            )
        )
    return _page(items, limit, lambda view: view.lease)


def list_branches(state: CacheState, after: int, limit: int) -> Page[BranchView]:
    """Kept branches by number."""
    later = (branch for branch in state.kept.branches.values() if branch.branch_id > after)
    items = []
    for branch in heapq.nsmallest(limit + 1, later, key=lambda item: item.branch_id):
        hold = branch.hold
        last = int(hold.table[hold.num_blocks - 1]) if hold.num_blocks else 0
        items.append(
            BranchView(
                branch=branch.branch_id,
                tenant=hold.tenant,
                num_tokens=hold.num_tokens,
                num_blocks=hold.num_blocks,
                references=int(state.pool.references[last]),
                expires_ns=branch.expires_ns,
            )
        )
    return _page(items, limit, lambda view: view.branch)


def list_sessions(state: CacheState, after: int, limit: int) -> Page[SessionView]:
    """Attached sessions by id."""
    chosen = heapq.nsmallest(limit + 1, (number for number in state.book.sessions if number > after))
    items = []
    for session in (state.book.sessions[number] for number in chosen):
        items.append(
            SessionView(
                session=session.session_id,
                decoder_name=session.decoder_name,
                process_id=session.process_id,
                leases=len(session.leases),
                credit_blocks=len(session.credit),
                queued_requests=session.queued_requests,
                attached_ns=session.attached_ns,
                deadline_ns=session.deadline_ns,
                away=session.away,
            )
        )
    return _page(items, limit, lambda view: view.session)


def _page(items: list[Item], limit: int, key: Callable[[Item], int]) -> Page[Item]:
    shown = items[:limit]
    return Page(shown, key(shown[-1]) if shown and len(items) > limit else 0)


def _cursor(node: Node) -> int:
    return (node.start << _NODE_BITS) + node.node_id


def _block_view(state: CacheState, block: int, pinned: set[int]) -> BlockView:
    pool, forest = state.pool, state.index.forest
    block_state = BlockState(int(pool.state[block]))
    node = forest.nodes.get(NodeId(int(forest.node_of[block])))
    num_tokens = 0
    if node is not None:
        num_tokens = len(node.edge) // TOKEN_BYTES if node.tail else state.block_tokens
    return BlockView(
        block=block,
        generation=int(pool.generation[block]),
        state=block_state,
        references=int(pool.references[block]),
        published=bool(pool.published[block]),
        tenant=state.tenant_names[int(pool.owner[block])] if block_state is not BlockState.FREE else TenantId(""),
        evictable=block_state is BlockState.CACHED,
        num_tokens=num_tokens,
        pinned=block in pinned,
        window_block=0 if state.window_blocks is None else state.window_blocks.of.item(block),
    )


def _prefix_view(state: CacheState, node: Node, pinned: set[int]) -> PrefixView:
    parent = node.parent
    blocks = node.blocks.tolist()
    if parent is not None and parent.parent is None and node.tree.anchor is not None:
        parent = node.tree.anchor
    return PrefixView(
        node=node.node_id,
        parent=parent.node_id if parent is not None else NodeId(0),
        tenant=state.tenant_names[node.tree.owner],
        start_token=node.start * state.block_tokens,
        num_tokens=len(node.edge) // TOKEN_BYTES,
        blocks=blocks,
        references=max(0, int(state.pool.references[node.blocks].max()) - 1),  # of gaps alone: none
        name=node_name(node, state.index.block_bytes).hex(),
        children=len(node.children) + node.anchored,
        priority=node.priority,
        pinned=not pinned.isdisjoint(blocks),
        expires_ns=None if node.expires_ns == NEVER else node.expires_ns,
    )
