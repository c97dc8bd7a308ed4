"""The cache manager: the only place that changes the pool, the index and the leases in one step.

Pure, synchronous and deterministic: no clock, socket, thread, random source or device; `now_ns` is passed in. A call
that raises has changed nothing. The operations live in `admission.py`, `reports.py`, `sealing.py` and `branches.py`;
this class is their one door. Called by the services of the daemon, from one thread. It logs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cachemgr import admission, kept, pruning, reports, resuming, upkeep
from cachemgr.asks import Ask
from cachemgr.events import EventLog
from cachemgr.ids import BlockArray, BlockRun, LeaseId, SessionId, TenantId
from cachemgr.leases import DEFAULT_GRACE_NS, DEFAULT_LEASE_NS
from cachemgr.manager_adoption import ManagerAdoption
from cachemgr.manager_branches import ManagerBranches
from cachemgr.manager_quotas import ManagerQuotas
from cachemgr.manager_views import ManagerViews
from cachemgr.manager_windows import ManagerWindows
from cachemgr.recorder import Recorder
from cachemgr.results import Acquired, DetachOutcome, Reported, ScopeSpan, SequenceFields, Waiting
from cachemgr.resuming import Held, Resumed
from cachemgr.state import CacheState


class CacheManager(ManagerAdoption, ManagerBranches, ManagerQuotas, ManagerViews, ManagerWindows):
    """Blocks, prefixes and leases of one node. Raises errors of `common.errors` only.

    num_blocks:      usable blocks, ids 1..num_blocks
    window_tokens:   most keys that any token reads, the last ones; 0: all (`windows.py`). With window blocks, what
                     holds for the layers that lie in those
    num_window_blocks: usable window blocks, ids 1..num_window_blocks, where some layers have a window and others none
                     (`groups.py`); 0: there are no layer groups
    name_bits:       below 128 the weak-hash test mode: names are cut to so many bits and collisions are counted
    fail_allocation: n > 0 makes the n-th allocation fail, once (test knob)
    events:          where changes are logged; one of its own where none is given
    lease_ns:        a session that says nothing for so long has lapsed
    grace_ns:        so has one whose stream broke and did not come back for so long
    journal:         is told of all that the index lists and no longer lists
    on_free:         sees each array of freed block ids (intp) as they are freed; must not call back
    on_window_free:  as `on_free`, of window blocks
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_tokens: int,
        window_tokens: int = 0,
        num_window_blocks: int = 0,
        epoch: int,
        name_bits: int = 128,
        fail_allocation: int = 0,
        on_free: Callable[[BlockRun], None] | None = None,
        on_window_free: Callable[[BlockRun], None] | None = None,
        events: EventLog | None = None,
        lease_ns: int = DEFAULT_LEASE_NS,
        grace_ns: int = DEFAULT_GRACE_NS,
        journal: Recorder | None = None,
    ) -> None:
        self._core = CacheState(
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            window_tokens=window_tokens,
            num_window_blocks=num_window_blocks,
            epoch=epoch,
            name_bits=name_bits,
            fail_allocation=fail_allocation,
            on_free=on_free,
            on_window_free=on_window_free,
            events=events,
            lease_ns=lease_ns,
            grace_ns=grace_ns,
            journal=journal,
        )

    def attach(self, *, decoder_name: str, process_id: int, now_ns: int) -> SessionId:
        """Opens a session."""
        self._state.now_ns = now_ns
        self._state.revision += 1
        session = self._state.book.open_session(decoder_name, process_id, now_ns).session_id
        self._state.events.add("session_attached", now_ns, session=session, decoder=decoder_name)
        return session

    def detach(self, session: SessionId, *, process_dead: bool, now_ns: int) -> DetachOutcome:
        """Ends a session: its leases end, published blocks stay. What its process could still write, its credit
        included, is freed if the process is dead, and else quarantined until `process_gone`.

        Raises FailedPrecondition where the session is not attached.
        """
        self._state.now_ns = now_ns
        return upkeep.detach(self._state, session, process_dead=process_dead)

    def heartbeat(self, session: SessionId, now_ns: int) -> None:
        """A session has said something; every operation counts as that. Raises FailedPrecondition where it is over, or
        away."""
        self._state.book.renew(session, now_ns)

    def away(self, session: SessionId, now_ns: int) -> None:
        """The stream of a session broke: everything stays as it is for the grace time, and it can do nothing but
        `resume`. Raises FailedPrecondition where it is over."""
        self._state.now_ns = now_ns
        self._state.book.leave(session, now_ns)
        self._state.events.add("session_away", now_ns, session=session)
        self._state.waits.session_left(session)

    def resume(self, session: SessionId, held: Sequence[Held], credit: BlockArray, now_ns: int) -> Resumed:
        """A session goes on with what its decoder presents: its sequences, and its unused credit (int32). What was told
        and not heard is taken over, what was answered and not heard is let go. A sequence that does not fit has lost
        its lease. The answer is acknowledged as that of a report.

        Raises FailedPrecondition where the session is over; InvalidArgument where the credit is not the session's.
        """
        self._state.now_ns = now_ns
        resumed = resuming.resume(self._state, session, held, credit, now_ns)
        self._state.events.add("session_resumed", now_ns, session=session)
        return resumed

    @property
    def fenced_operations(self) -> int:
        """Operations that were refused because their session was over, or away."""
        return self._state.book.fenced_operations

    def count_fenced(self) -> None:
        """One more was refused before it got here."""
        self._state.book.fenced_operations += 1

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
        ttl_ns: int = 0,
        base: bytes = b"",
        base_tokens: int = 0,
        will_keep: bool = False,
        prefix: ScopeSpan | None = None,
        may_wait: bool = False,
        now_ns: int,
    ) -> Acquired | Waiting:
        """Leases a table for all `tokens` (packed int32, at least one): the longest cached prefix is shared, but never
        the last token; the rest is new. Where the match ends inside a block, any number of tokens is worth a copy.

        What it publishes or uses goes `ttl_ns` (0: never) after its last use, and before that by `priority`. Counts a
        hit or a miss unless `resumed`. `no_read` matches nothing, `no_store` never publishes. `base` names a
        kept branch of the tenant that the sequence continues, from its first `base_tokens` tokens (0: all): `tokens`
        come after those, and may be none. `will_keep` says that the sequence is to be kept at its end. Whole blocks of
        `prefix` are looked for in, and published into, the wider tree that it names; the rest below them. A kept branch
        goes on in the scope that it was begun in, whatever `prefix` is.

        With `may_wait` the answer is `Waiting`, and no lease, where a sequence that may share with this one computes
        at least one block more of the prompt now: ask again when `take_ready_waits` has it, or without `may_wait`.

        Raises ResourceExhausted (EXCEEDS_POOL: can never fit; EXCEEDS_USABLE: nor with today's floors and pins;
        POOL_FULL: not now; TOO_MANY_KEPT), NotFound (BRANCH_NOT_FOUND), InvalidArgument, FailedPrecondition.
        """
        state = self._state
        state.now_ns = now_ns
        state.book.renew(session, now_ns)
        ask = Ask(
            tenant, root, tokens, request_id, sample, no_read, no_store, resumed, priority, ttl_ns, base, base_tokens,
            will_keep, prefix, may_wait, now_ns,
        )  # fmt: skip
        return admission.acquire(state, session, ask)

    def take_ready_waits(self) -> list[tuple[SessionId, int]]:
        """The waits (session, wait id) that are over since the last call: to be told to their sessions."""
        return self._state.waits.take_ready()

    def report(
        self,
        session: SessionId,
        sequences: Iterable[SequenceFields],
        *,
        returned: BlockArray,
        wanted: int,
        lacking: Sequence[LeaseId] = (),
        generated_tokens: int = 0,
        preemptions: int = 0,
        queued: int = 0,
        applied_revision: int,
        now_ns: int,
    ) -> Reported:
        """Takes one step of a decoder: growth, seals, copies, releases; returned and wanted credit. `applied_revision`
        frees the duplicates that replacements up to it left behind. `lacking` are leases that stand still, each as
        often as it lacks a block, best ranked first: where less is granted than wanted, those that it does not do for
        are lent blocks that their own tenants could acquire.

        A bad sequence is in `refusals` and its lease is over; the others are done. Raises InvalidArgument for a bad
        number or foreign `returned` blocks, FailedPrecondition for a session that is over; then nothing was done.
        """
        state = self._state
        state.now_ns = now_ns
        state.book.renew(session, now_ns)
        return reports.report(
            state,
            session,
            sequences,
            returned=returned,
            wanted=wanted,
            lacking=lacking,
            generated_tokens=generated_tokens,
            preemptions=preemptions,
            queued=queued,
            applied_revision=applied_revision,
            now_ns=now_ns,
        )

    def credit(self, session: SessionId, wanted: int, now_ns: int) -> BlockArray:
        """Hands up to `wanted` blocks to the session ahead of need (int32), evicting cached ones; perhaps none."""
        self._state.now_ns = now_ns
        self._state.book.renew(session, now_ns)
        return reports.credit(self._state, session, wanted)

    def evict(self, *, num_blocks: int | None = None, tenant: TenantId | None = None, everything: bool = False) -> int:
        """Drops cached blocks, in the order of eviction: at most `num_blocks`, or all of `tenant`, or everything.
        Returns how many. Raises InvalidArgument; FailedPrecondition for `everything` while anything of it is in use."""
        return upkeep.evict(self._state, num_blocks, tenant, everything=everything)

    def purge(self, tenant: TenantId) -> int:
        """Drops a tenant's whole index, also what leases hold: they keep their blocks, and publish nothing any more.
        Returns how many blocks were unlisted."""
        return upkeep.purge(self._state, tenant)

    def prune(self, scope: TenantId, reachable: pruning.Reachable) -> int:
        """Drops what of a wider scope may not be named any more, with the private tails below it, as `purge` does.
        Returns how many blocks were unlisted. Raises Unavailable while adopting."""
        return pruning.prune(self._state, scope, reachable)

    def tick(self, now_ns: int) -> list[SessionId]:
        """Time passes: kept branches, pins and prefixes that have expired end. Returns the sessions that have lapsed:
        whoever knows whether their processes live detaches them; until then they can still be heard."""
        self._state.now_ns = now_ns
        kept.expire(self._state, now_ns)
        upkeep.expire(self._state)
        self._state.recent.make_compact()
        return self._state.book.lapsed(now_ns)
