"""The cache manager: the only place that changes the pool, the index and the leases in one step.

Pure and synchronous: no clock, socket, thread, randomness or device. `now_ns` is passed in. Called by the service.
This first version fixes the interface; the operations follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cachemgr.blocks import BlockState
from cachemgr.ids import BlockArray, BlockRun, LeaseId, SessionId, TenantId
from cachemgr.results import Acquired, Branch, CopyPlan, DetachOutcome, Reported, SequenceReport
from cachemgr.views import BlockView, LeaseView, Page, PrefixView, SessionView, Snapshot


class CacheManager:
    """Blocks, prefixes and leases of one node. Raises only errors of `common.errors`; a raising call changed nothing."""

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
        """`name_bits` < 128 is the weak-hash test mode; `fail_allocation` n > 0 fails the n-th allocation once;
        `on_free` sees each array of freed block ids (intp)."""
        raise NotImplementedError

    @property
    def revision(self) -> int:
        """Grows with each change."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """Of this life of the daemon."""
        raise NotImplementedError

    def attach(self, *, decoder_name: str, process_id: int, now_ns: int) -> SessionId:
        """A new session."""
        raise NotImplementedError

    def detach(self, session: SessionId, *, process_dead: bool, now_ns: int) -> DetachOutcome:
        """Ends a session (NotFound if it is over)."""
        raise NotImplementedError

    def process_gone(self, session: SessionId) -> int:
        """Frees the quarantine of a detached session; 0 where there is none."""
        raise NotImplementedError

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
        """All or nothing."""
        raise NotImplementedError

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
        """One step of a decoder."""
        raise NotImplementedError

    def fork(
        self, session: SessionId, lease: LeaseId, samples: Sequence[int], num_tokens: int, now_ns: int
    ) -> list[Branch]:
        """Empty where there is no room for all."""
        raise NotImplementedError

    def rollback(self, session: SessionId, lease: LeaseId, num_tokens: int, now_ns: int) -> CopyPlan | None:
        """Cuts a sequence back."""
        raise NotImplementedError

    def make_writable(self, session: SessionId, lease: LeaseId, now_ns: int) -> CopyPlan | None:
        """Makes the block of the next token private."""
        raise NotImplementedError

    def credit(self, session: SessionId, wanted: int, now_ns: int) -> BlockArray:
        """Up to `wanted` blocks, int32."""
        raise NotImplementedError

    def evict(self, *, num_blocks: int | None = None, tenant: TenantId | None = None, everything: bool = False) -> int:
        """Drops cached blocks; FailedPrecondition for `everything` while leases are held."""
        raise NotImplementedError

    def purge(self, tenant: TenantId) -> int:
        """Drops a tenant's whole index, held or not."""
        raise NotImplementedError

    def tick(self, now_ns: int) -> None:
        """Housekeeping."""
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        """All counters."""
        raise NotImplementedError

    def check_integrity(self) -> list[str]:
        """Violations; empty means none."""
        raise NotImplementedError

    def list_blocks(self, after: int = 0, limit: int = 100, state: BlockState | None = None) -> Page[BlockView]:
        """By number."""
        raise NotImplementedError

    def list_prefixes(self, after: int = 0, limit: int = 100, tenant: TenantId | None = None) -> Page[PrefixView]:
        """Parents before children; `after` is opaque."""
        raise NotImplementedError

    def list_leases(self, after: int = 0, limit: int = 100) -> Page[LeaseView]:
        """By id."""
        raise NotImplementedError

    def list_sessions(self, after: int = 0, limit: int = 100) -> Page[SessionView]:
        """By id."""
        raise NotImplementedError
