"""The manager's structures together, and the few steps that move a block through more than one of them.

Invariant: pool, index and leases agree after each method. The operations in `admission.py`, `sealing.py`, `reports.py`
and `branches.py` are written with these steps; only they and `manager.py` hold a `CacheState`. It decides no policy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cachemgr.blocks import NO_OWNER, BlockPool
from cachemgr.counters import Counters
from cachemgr.ids import BlockRun, TenantId
from cachemgr.leases import Lease, LeaseBook, Session
from cachemgr.names import FULL_BITS, WeakNames
from cachemgr.nodes import NO_BLOCKS, Tree
from cachemgr.radix import PrefixIndex
from common.errors import ResourceExhausted


class CacheState:
    """Everything a `CacheManager` owns. `revision` grows with each change."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_tokens: int,
        epoch: int,
        name_bits: int,
        fail_allocation: int,
        on_free: Callable[[BlockRun], None] | None,
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; allowed is 1 and more")
        if not 1 <= name_bits <= FULL_BITS:
            raise ValueError(f"name_bits is {name_bits}; allowed is 1..{FULL_BITS}")
        self.block_tokens = block_tokens
        self.epoch = epoch
        self.revision = 0
        self.pool = BlockPool(num_blocks, on_free)
        self.index = PrefixIndex(num_blocks, block_tokens, self.pool.references)
        self.book = LeaseBook()
        self.counters = Counters()
        self.weak_names = WeakNames(name_bits, self.index.block_bytes) if name_bits < FULL_BITS else None
        self.tenant_names: list[TenantId] = [TenantId("")]
        self._tenant_numbers: dict[TenantId, int] = {}
        self._fail_allocation = fail_allocation
        self._allocations = 0

    def owner_of(self, tenant: TenantId) -> int:
        """The tenant's number, from 1; given at first sight."""
        number = self._tenant_numbers.get(tenant)
        if number is None:
            number = self._tenant_numbers[tenant] = len(self.tenant_names)
            self.tenant_names.append(tenant)
        return number

    def known_owner(self, tenant: TenantId) -> int:
        """The tenant's number, or 0 for one never seen."""
        return self._tenant_numbers.get(tenant, NO_OWNER)

    @property
    def room(self) -> int:
        """Blocks that could be allocated now, cached ones evicted. Every cached block can be: a block under it is never
        held while it is not."""
        return self.pool.num_free + self.pool.num_cached

    def require(self, count: int, room: int) -> None:
        """Checks, before anything is changed, that `count` blocks can be had of `room`. Raises ResourceExhausted."""
        if count > room:
            raise ResourceExhausted(
                f"{count} blocks are needed and {room} can be had now",
                subject="blocks",
                needed=count,
                usable=room,
                reason="POOL_FULL",
            )
        self._allocations += count > 0
        if self._fail_allocation and count and self._allocations == self._fail_allocation:
            raise ResourceExhausted(
                "this allocation was made to fail", subject="blocks", needed=count, usable=room, reason="POOL_FULL"
            )

    def allocate(self, count: int, owner: int) -> BlockRun:
        """`count` blocks, each held once, evicting as far as needed. The caller has checked that there is room."""
        missing = count - self.pool.num_free
        if missing > 0:
            self.evict(missing)
        return self.pool.allocate(count, owner)

    def evict(self, count: int, accept: Callable[[Tree], bool] | None = None) -> int:
        """Drops up to `count` cached blocks in the order of the queue; returns how many."""
        blocks = self.index.evict(count, accept)
        self.forget_names(blocks)
        self.pool.unpublish_idle(blocks)
        self.counters.evictions += len(blocks)
        return len(blocks)

    def discard(self, unlisted: BlockRun) -> None:
        """Frees blocks that the index has just unlisted because something longer covers them."""
        if len(unlisted):
            self.forget_names(unlisted)
            self.pool.unpublish(unlisted)

    def publish(self, lease: Lease, first_index: int, tokens: bytes, blocks: BlockRun) -> None:
        """Marks blocks that the index lists since this step."""
        self.pool.publish(blocks)
        if self.weak_names is not None:
            previous = int(lease.table[first_index - 1]) if first_index else 0
            self.weak_names.add(lease.tree.root_key, previous, tokens, blocks)

    def forget_names(self, blocks: BlockRun) -> None:
        """The index lists these no more."""
        if self.weak_names is not None:
            self.weak_names.discard(blocks)

    def unpin(self, lease: Lease, *, quarantine: bool = False) -> BlockRun:
        """Lets the source of the lease's copy go: the plan is over. Returns what became free, or quarantined."""
        if lease.copy is None:
            return NO_BLOCKS
        source = lease.copy.source
        lease.copy = None
        loose = self.pool.unhold(np.array([source], np.intp), quarantine=quarantine)
        if self.pool.published[source]:
            self.discard(self.index.drop_superseded(source))
            self.index.requeue(source)
        return loose

    def rest(self, lease: Lease, num_published: int) -> None:
        """Tells the eviction queue that a lease has let go of the first `num_published` blocks of its table, or the
        last of them."""
        if num_published:
            self.index.requeue(int(lease.table[num_published - 1]))

    def let_go(self, run: BlockRun, *, quarantine: bool = False) -> BlockRun:
        """One holder less for blocks that may be published or not; returns what became free, or quarantined."""
        loose = self.pool.unhold(run, quarantine=quarantine)
        for block in run[self.pool.published.take(run)].tolist():
            self.index.requeue(block)
        return loose

    def end_lease(self, session: Session, lease: Lease, *, quarantine: bool = False) -> list[BlockRun]:
        """Drops all holds of a lease and forgets it; returns what became free, or quarantined."""
        deferred = session.take_deferred(lease_id=lease.lease_id)
        loose = [self.let_go(run, quarantine=quarantine) for run in deferred]
        loose.append(self.unpin(lease, quarantine=quarantine))
        self.pool.unhold_published(lease.table[: lease.num_published])
        loose.append(self.pool.unhold(lease.table[lease.num_published : lease.num_blocks], quarantine=quarantine))
        self.rest(lease, lease.num_published)
        self.forget(lease)
        return loose

    def forget(self, lease: Lease) -> None:
        """Removes a lease that holds nothing any more, and its tree if that was all there was."""
        self.book.remove(lease)
        self.index.forest.forget_if_empty(lease.tree)
