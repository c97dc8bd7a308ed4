"""The cache manager: the only place that changes the pool, the index and the leases in one step.

Pure, synchronous and deterministic: no clock, socket, thread, random source or device; `now_ns` is passed in. A call
that raises has changed nothing. The operations live in `admission.py`, `reports.py`, `sealing.py` and `branches.py`;
this class is their one door. Called by the services of the daemon, from one thread. It logs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cachemgr import admission, branches, integrity, listing, reports, upkeep
from cachemgr.blocks import BlockState
from cachemgr.ids import BlockArray, BlockRun, LeaseId, SessionId, TenantId
from cachemgr.results import Acquired, Branch, CopyPlan, DetachOutcome, Reported, SequenceReport
from cachemgr.state import CacheState
from cachemgr.views import BlockView, LeaseView, Page, PrefixView, SessionView, Snapshot


class CacheManager:
    """Blocks, prefixes and leases of one node. Raises errors of `common.errors` only.

    num_blocks:      usable blocks, ids 1..num_blocks
    name_bits:       below 128 the weak-hash test mode: names are cut to so many bits and collisions are counted
    fail_allocation: n > 0 makes the n-th allocation fail, once (test knob)
    on_free:         sees each array of freed block ids (intp) as they are freed; must not call back
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_tokens: int,
        epoch: int,
        name_bits: int = 128,
        fail_allocation: int = 0,
        on_free: Callable[[BlockRun], None] | None = None,
    ) -> None:
        self._state = CacheState(
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            epoch=epoch,
            name_bits=name_bits,
            fail_allocation=fail_allocation,
            on_free=on_free,
        )

    @property
    def revision(self) -> int:
        """Grows with each change."""
        return self._state.revision

    @property
    def epoch(self) -> int:
        """Of this life of the daemon."""
        return self._state.epoch

    def attach(self, *, decoder_name: str, process_id: int, now_ns: int) -> SessionId:
        """Opens a session."""
        self._state.revision += 1
        return self._state.book.open_session(decoder_name, process_id, now_ns).session_id

    def detach(self, session: SessionId, *, process_dead: bool, now_ns: int) -> DetachOutcome:
        """Ends a session: its leases end, published blocks stay. What its process could still write, its credit
        included, is freed if the process is dead, and else quarantined until `process_gone`.

        Raises FailedPrecondition where the session is not attached.
        """
        return upkeep.detach(self._state, session, process_dead=process_dead)

    def process_gone(self, session: SessionId) -> int:
        """Frees the quarantine of a session that is over: its process is dead or has acknowledged. Returns how many
        blocks; 0 where there are none, so that repeating it is harmless."""
        return upkeep.process_gone(self._state, session)

    def acquire(
        self,
        session: SessionId,
        *,
        tenant: TenantId,
        root: bytes,
        tokens: bytes,
        request_id: str,
        sample: int,
        no_read: bool = False,
        no_store: bool = False,
        resumed: bool = False,
        priority: int = 50,
        now_ns: int,
    ) -> Acquired:
        """Leases a table for all `tokens` (packed int32, at least one): the longest cached prefix is shared, but never
        the last token; the rest is new. Where the match ends inside a block, any number of tokens is worth a copy.

        Counts a hit or a miss unless `resumed`. `no_read` matches nothing, `no_store` never publishes. Raises
        ResourceExhausted (EXCEEDS_POOL: can never fit; POOL_FULL: not now), InvalidArgument, FailedPrecondition.
        """
        return admission.acquire(
            self._state,
            session,
            tenant=tenant,
            root=root,
            tokens=tokens,
            request_id=request_id,
            sample=sample,
            no_read=no_read,
            no_store=no_store,
            resumed=resumed,
            priority=priority,
            now_ns=now_ns,
        )

    def report(
        self,
        session: SessionId,
        sequences: Sequence[SequenceReport],
        *,
        returned: BlockArray,
        wanted: int,
        generated_tokens: int = 0,
        preemptions: int = 0,
        queued: int = 0,
        applied_revision: int,
        now_ns: int,
    ) -> Reported:
        """Takes one step of a decoder: growth, seals, copies, releases; returned and wanted credit. `applied_revision`
        frees the duplicates that replacements up to it left behind.

        A bad sequence is in `refusals` and its lease is over; the others are done. Raises InvalidArgument for a bad
        number or foreign `returned` blocks, FailedPrecondition for a session that is over; then nothing was done.
        """
        return reports.report(
            self._state,
            session,
            sequences,
            returned=returned,
            wanted=wanted,
            generated_tokens=generated_tokens,
            preemptions=preemptions,
            queued=queued,
            applied_revision=applied_revision,
        )

    def fork(
        self, session: SessionId, lease: LeaseId, samples: Sequence[int], num_tokens: int, now_ns: int
    ) -> list[Branch]:
        """One branch for each of `samples` that shares the first `num_tokens` tokens of a lease, all of them sealed;
        each has a copy of a partly filled tail. No branch at all where there is no room for every copy.

        Raises InvalidArgument, NotFound (no such lease of this session), FailedPrecondition.
        """
        return branches.fork(self._state, session, lease, samples, num_tokens, now_ns)

    def rollback(self, session: SessionId, lease: LeaseId, num_tokens: int, now_ns: int) -> CopyPlan | None:
        """Cuts a sequence back to `num_tokens` (1..known tokens). Blocks after them are dropped from the table; if the
        last one is shared or published it becomes a copy, by the plan that is returned.

        Raises InvalidArgument, NotFound, FailedPrecondition (COPY_PENDING), ResourceExhausted.
        """
        return branches.rollback(self._state, session, lease, num_tokens, now_ns)

    def make_writable(self, session: SessionId, lease: LeaseId, now_ns: int) -> CopyPlan | None:
        """Makes sure that the block of the first token not sealed has one holder: None where that is so already, else
        the table has a fresh block there and the plan fills it. Raises as `rollback`."""
        return branches.make_writable(self._state, session, lease)

    def credit(self, session: SessionId, wanted: int, now_ns: int) -> BlockArray:
        """Hands up to `wanted` blocks to the session ahead of need (int32), evicting cached ones; perhaps none."""
        return reports.credit(self._state, session, wanted)

    def evict(self, *, num_blocks: int | None = None, tenant: TenantId | None = None, everything: bool = False) -> int:
        """Drops cached blocks, in the order of eviction: at most `num_blocks`, or all of `tenant`, or everything.
        Returns how many. Raises InvalidArgument; FailedPrecondition for `everything` while anything of it is in use."""
        return upkeep.evict(self._state, num_blocks, tenant, everything=everything)

    def purge(self, tenant: TenantId) -> int:
        """Drops a tenant's whole index, also what leases hold: they keep their blocks, and publish nothing any more.
        Returns how many blocks were unlisted."""
        return upkeep.purge(self._state, tenant)

    def tick(self, now_ns: int) -> None:
        """Time passes. Nothing in this core ends by itself yet: a lease lives as long as its session."""

    def snapshot(self) -> Snapshot:
        """All counters at one moment."""
        return listing.snapshot(self._state)

    def check_integrity(self) -> list[str]:
        """Recounts everything from the tables up; one line for each violation, none where all is well."""
        return integrity.check_integrity(self._state)

    def list_blocks(self, after: int = 0, limit: int = 100, state: BlockState | None = None) -> Page[BlockView]:
        """Blocks by number, after block `after`."""
        return listing.list_blocks(self._state, after, limit, state)

    def list_prefixes(self, after: int = 0, limit: int = 100, tenant: TenantId | None = None) -> Page[PrefixView]:
        """Index nodes, parents before children. `after` is the `next_after` of the page before, not a node id."""
        return listing.list_prefixes(self._state, after, limit, tenant)

    def list_leases(self, after: int = 0, limit: int = 100) -> Page[LeaseView]:
        """Leases by id."""
        return listing.list_leases(self._state, after, limit)

    def list_sessions(self, after: int = 0, limit: int = 100) -> Page[SessionView]:
        """Attached sessions by id."""
        return listing.list_sessions(self._state, after, limit)
