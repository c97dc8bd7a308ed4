"""The manager's structures together, and the few steps that move a block through more than one of them.

Invariant: pool, index and leases agree after each method. The operations in `admission.py`, `sealing.py`, `reports.py`
and `branches.py` are written with these steps; only they and `manager.py` hold a `CacheState`. It decides no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from cachemgr.blocks import NO_OWNER, BlockPool
from cachemgr.claimed import Claimed
from cachemgr.counters import Counters
from cachemgr.events import EventLog
from cachemgr.expiry import expire
from cachemgr.gaps import GappedIndex
from cachemgr.grouped_index import GroupedIndex
from cachemgr.grouped_ownership import GroupedOwnership
from cachemgr.groups import end, take_room
from cachemgr.ids import BlockRun, TenantId
from cachemgr.kept_book import KeptBook
from cachemgr.leases import DEFAULT_GRACE_NS, DEFAULT_LEASE_NS, Lease, LeaseBook, Session
from cachemgr.names import FULL_BITS, WeakNames
from cachemgr.nodes import NEVER, NO_BLOCKS, Node
from cachemgr.quotas import Quotas
from cachemgr.radix import PrefixIndex
from cachemgr.recent import RecentAdmissions
from cachemgr.recorder import Recorder
from cachemgr.tails import clear_tails
from cachemgr.waiting import Waits
from cachemgr.window_blocks import WindowBlocks, reach_of
from common.errors import ResourceExhausted, Unavailable

ADOPTING_RETRY_SECONDS: Final = 0.1
REPLACED: Final = ("superseded", "purged")  # causes of unlisting that are no eviction

if TYPE_CHECKING:
    from cachemgr.pins import Pin


class CacheState:
    """Everything a `CacheManager` owns. `revision` grows with each change; `now_ns` is the time of the operation that
    runs, or ran last."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_tokens: int,
        window_tokens: int = 0,
        num_window_blocks: int = 0,
        epoch: int,
        name_bits: int,
        fail_allocation: int,
        on_free: Callable[[BlockRun], None] | None,
        on_window_free: Callable[[BlockRun], None] | None = None,
        events: EventLog | None = None,
        lease_ns: int = DEFAULT_LEASE_NS,
        grace_ns: int = DEFAULT_GRACE_NS,
        journal: Recorder | None = None,
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}; allowed is 1 and more")
        if window_tokens < (num_window_blocks > 0):
            raise ValueError(f"window_tokens is {window_tokens}; allowed is 0 and more, with window blocks 1 and more")
        if not 1 <= name_bits <= FULL_BITS:
            raise ValueError(f"name_bits is {name_bits}; allowed is 1..{FULL_BITS}")
        self.block_tokens = block_tokens
        self.window_tokens = 0 if num_window_blocks else window_tokens
        self.group_window_tokens = window_tokens if num_window_blocks else 0
        self.epoch = epoch
        self.revision = 0
        self.now_ns = 0
        self.events = EventLog() if events is None else events
        self.recent = RecentAdmissions(block_tokens)
        self.journal = journal
        self.frozen = False  # while a new daemon is adopting: nothing is allocated, nothing evicted
        self.claimed = Claimed()
        self.last_holders: NDArray[np.int64] | None = None  # by block, of the journal that is being adopted
        self.window_blocks: WindowBlocks | None = None
        self.index: PrefixIndex
        if num_window_blocks:
            reach = reach_of(window_tokens, block_tokens)
            windows = self.window_blocks = WindowBlocks(num_window_blocks, num_blocks, on_window_free, reach=reach)
            windows.note = None if journal is None else journal.has_windows
            self.pool = BlockPool(num_blocks, windows.detach_before(on_free), GroupedOwnership(num_blocks, windows))
            self.index = GroupedIndex(num_blocks, block_tokens, self.pool.references, windows, window_tokens)
        else:
            self.pool = BlockPool(num_blocks, on_free)
            self.index = PrefixIndex(num_blocks, block_tokens, self.pool.references)
            if window_tokens:
                self.index = GappedIndex(num_blocks, block_tokens, self.pool.references, window_tokens)
        self.book = LeaseBook(epoch=epoch, lease_ns=lease_ns, grace_ns=grace_ns)
        self.quotas = Quotas(self.pool)
        self.pins: dict[int, Pin] = {}
        self.last_pin = 0
        self.kept = KeptBook(num_blocks)
        self.counters = Counters()
        self.waits = Waits(block_tokens)
        self.late: dict[Node, Lease] = {}  # leaves that a lease's next block, sealed already, shall lengthen
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
        return 0 if self.frozen else self.pool.num_free + self.pool.num_cached

    def room_for(self, owner: int) -> int:
        """As `room`, for one owner: the floors of the others are not to be had. Its own ceiling is not counted."""
        return max(0, self.room - self.quotas.shielded(owner)) if self.quotas.any_floor else self.room

    def expiry(self, ttl_ns: int) -> int:
        """When that expires which is used now by a lease of such a time to live."""
        return self.now_ns + ttl_ns if ttl_ns else NEVER

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

    def allocate(self, count: int, owner: int, asking: int | None = None) -> BlockRun:
        """`count` blocks, each held once, evicting as far as needed. The caller has checked that there is room, also
        below the owner's ceiling; for `asking`, where those of a wider scope are for one of its tenants."""
        self.keep_ceiling(owner, count)
        if count > self.pool.num_free:
            self.expire()
        if count > self.pool.num_free:
            payer = owner if asking is None else asking
            for budgets in self.quotas.budgets(payer, count, count - self.pool.num_free):
                self.evict(count - self.pool.num_free, budgets, owner=owner)
                if count <= self.pool.num_free:
                    break
            else:
                clear_tails(self, count, owner)
        blocks = self.pool.allocate(count, owner)
        if self.window_blocks is not None:
            take_room(self, count, owner if asking is None else asking)
            self.window_blocks.attach(blocks, owner)
        if self.journal is not None and count:
            self.journal.given(blocks, self.book.current)
        return blocks

    def keep_ceiling(self, owner: int, count: int) -> None:
        """Drops own cached blocks of an owner that is about to be charged for `count` more, as its ceiling asks."""
        excess = self.quotas.excess(owner, count)
        if excess:
            self.evict(excess, {owner: excess}, "quota")

    def evict(self, count: int, budgets: Mapping[int, int], cause: str = "room", owner: int = NO_OWNER) -> int:
        """Drops up to `count` cached blocks in the order of the queue, of each owner at most its budget; returns how
        many. `owner` is who needs the room."""
        self.index.forest.ghosts.stamp = (self.now_ns, owner, cause)
        return self.drop_idle(self.index.evict(budgets, count), cause)

    def expire(self) -> int:
        """Drops the cached blocks whose time is over; returns how many."""
        if self.frozen:
            return 0
        self.index.forest.ghosts.stamp = (self.now_ns, NO_OWNER, "expired")
        return self.drop_idle(expire(self.index, self.now_ns), "expired")

    def drop_idle(self, blocks: BlockRun, cause: str) -> int:
        """Frees cached blocks that the index has just unlisted."""
        self.forget_names(blocks)
        self.pool.unpublish_idle(blocks, self.note_unlisted(blocks, cause))
        return len(blocks)

    def refuse_while_frozen(self) -> None:
        """Raises Unavailable where something is to be dropped that a decoder might yet claim."""
        if self.frozen:
            raise Unavailable(
                "the cache manager has restarted and waits for the decoders that held its memory",
                reason="ADOPTING",
                retry_after_seconds=ADOPTING_RETRY_SECONDS,
            )

    def take_scrub(self) -> BlockRun:
        """The blocks handed out since the last call that hold another owner's content."""
        blocks = self.pool.ownership.take_scrub()
        self.counters.scrubbed_blocks += len(blocks)
        return blocks

    def note_unlisted(self, blocks: BlockRun, cause: str) -> list[tuple[int, BlockRun]]:
        """Logs that the index lists these no more, before they are anybody else's; one event for each owner. Returns
        the blocks by their owners."""
        runs = self.pool.ownership.runs_of(blocks) if len(blocks) else []
        for owner, run in runs:
            self.events.add("blocks_evicted", self.now_ns, owner, blocks=run, detail={"cause": cause})
            if cause not in REPLACED:
                self.counters.count_eviction(owner, len(run))
        return runs

    def discard(self, unlisted: BlockRun) -> None:
        """Frees blocks that the index has just unlisted because something longer covers them."""
        if len(unlisted):
            self.forget_names(unlisted)
            self.note_unlisted(unlisted, "superseded")
            self.pool.unpublish(unlisted)

    def forget_names(self, blocks: BlockRun) -> None:
        """The index lists these no more."""
        if self.journal is not None:
            self.journal.unpublish(blocks)
        if self.weak_names is not None:
            self.weak_names.discard(blocks)

    def unpin(self, lease: Lease, *, quarantine: bool = False) -> BlockRun:
        """Lets the source of the lease's copy go: the plan is over. Returns what became free, or quarantined."""
        if lease.copy is None:
            return NO_BLOCKS
        source = lease.copy.source
        lease.copy = None
        if self.pool.unhold_one(source, quarantine=quarantine):
            return np.array((source,), np.intp)
        if self.pool.published.item(source):
            self.discard(self.index.drop_superseded(source))
            self.index.requeue(source)
        return NO_BLOCKS

    def rest(self, lease: Lease, num_published: int) -> None:
        """Tells the eviction queue that a lease has let go of the first `num_published` blocks of its table, or the
        last of them."""
        if num_published and self.window_tokens:
            self.rest_path(lease.table[lease.passed : num_published])
        elif num_published:
            self.index.requeue(lease.table.item(num_published - 1))

    def rest_path(self, blocks: BlockRun) -> None:
        """As `rest`, where any of these listed blocks may be evicted: of each node one, the last one first."""
        end = len(blocks)
        while end:
            node = self.index.forest.node_or_none(blocks.item(end - 1))
            if node is None:
                return
            self.index.forest.queue.push(node)
            end = max(0, end - 1 - (int(self.index.forest.position[blocks[end - 1]]) - node.start))

    def let_go(self, run: BlockRun, *, quarantine: bool = False) -> BlockRun:
        """One holder less for blocks that may be published or not; returns what became free, or quarantined."""
        if len(run) == 1:
            block = run.item(0)
            if self.pool.unhold_one(block, quarantine=quarantine):
                return run
            self.index.requeue(block)  # harmless for one that is not published
            return NO_BLOCKS
        loose = self.pool.unhold(run, quarantine=quarantine)
        for block in run[self.pool.published.take(run)].tolist():
            self.index.requeue(block)
        return loose

    def end_lease(self, session: Session, lease: Lease, *, quarantine: bool = False) -> list[BlockRun]:
        """Drops all holds of a lease and forgets it; returns what became free, or quarantined."""
        end(self, lease)
        deferred = session.take_deferred(lease_id=lease.lease_id)
        loose = [self.let_go(run, quarantine=quarantine) for run in deferred]
        if lease.copy is not None:
            loose.append(self.unpin(lease, quarantine=quarantine))
        self.pool.unhold_published(lease.listed, from_first=not self.window_tokens)
        if lease.num_published < lease.num_blocks:
            loose.append(self.pool.unhold(lease.private, quarantine=quarantine))
        self.rest(lease, lease.num_published)
        self.forget(lease)
        return loose

    def forget(self, lease: Lease) -> None:
        """Removes a lease that holds nothing any more, and its trees if that was all there was."""
        self.waits.leave(lease)
        self.book.remove(lease)
        self.events.add("lease_ended", self.now_ns, lease.owner, lease.session_id, lease.lease_id)
        self.index.forest.forget_if_empty(lease.tree)
        if lease.prefix_tree is not None:
            self.index.forest.forget_if_empty(lease.prefix_tree)
