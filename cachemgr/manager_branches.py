"""The cache manager's door to branches: forks and rollbacks of running sequences, and the branches that are kept.

`CacheManager` inherits it, so that it stays the one door. A call that raises has changed nothing. Called by the session
service and the branch service.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachemgr import branches, kept
from cachemgr.ids import BlockArray, LeaseId, SessionId, TenantId
from cachemgr.leases import to_wire
from cachemgr.manager_state import ManagerState
from cachemgr.results import Branch, CopyPlan


class ManagerBranches(ManagerState):
    """What can be made of a sequence."""

    def fork(
        self, session: SessionId, lease: LeaseId, samples: Sequence[int], num_tokens: int, now_ns: int
    ) -> list[Branch]:
        """One branch for each of `samples` that shares the first `num_tokens` tokens of a lease, all of them sealed;
        each has a copy of a partly filled tail. No branch at all where there is no room for every copy.

        Raises InvalidArgument, NotFound (no such lease of this session), FailedPrecondition.
        """
        self._state.now_ns = now_ns
        self._state.book.renew(session, now_ns)
        return branches.fork(self._state, session, lease, samples, num_tokens, now_ns)

    def rollback(self, session: SessionId, lease: LeaseId, num_tokens: int, now_ns: int) -> CopyPlan | None:
        """Cuts a sequence back to `num_tokens` (1..known tokens). Blocks after them are dropped from the table; if the
        last one is shared or published it becomes a copy, by the plan that is returned.

        Raises InvalidArgument, NotFound, FailedPrecondition (COPY_PENDING, WINDOW_PASSED), ResourceExhausted.
        """
        self._state.now_ns = now_ns
        self._state.book.renew(session, now_ns)
        return branches.rollback(self._state, session, lease, num_tokens, now_ns)

    def make_writable(self, session: SessionId, lease: LeaseId, now_ns: int) -> CopyPlan | None:
        """Makes sure that the block of the first token not sealed has one holder: None where that is so already, else
        the table has a fresh block there and the plan fills it. Raises as `rollback`."""
        self._state.now_ns = now_ns
        self._state.book.renew(session, now_ns)
        return branches.make_writable(self._state, session, lease)

    def block_table(self, session: SessionId, lease: LeaseId) -> BlockArray:
        """The block table of a lease, int32, a copy. Raises NotFound, FailedPrecondition."""
        return to_wire(self._state.book.session(session).lease(lease).blocks)

    def commit(self, session: SessionId, lease: LeaseId, num_tokens: int, now_ns: int) -> None:
        """Publishes the first `num_tokens` (1..sealed tokens) tokens of a sequence that goes on, a partly filled block
        too: that one must be made writable before it is written again.

        Raises InvalidArgument, NotFound, FailedPrecondition (NO_STORE).
        """
        self._state.book.renew(session, now_ns)
        branches.commit(self._state, session, lease, num_tokens)

    def kept_scope(self, tenant: TenantId, name: bytes, *, now_ns: int) -> TenantId | None:
        """Whose the scope is that a kept branch was begun in; None for the tenant itself. Raises NotFound."""
        span = kept.span_of(self._state, kept.find(self._state, tenant, name, now_ns), 0)
        return None if span is None else span.owner

    def limit_kept(self, most: int) -> None:
        """At most so many branches of one tenant are kept; those that are more stay until their time is over."""
        self._state.kept.limit = most

    def fork_kept(self, tenant: TenantId, name: bytes, names: Sequence[bytes], *, ttl_ns: int, now_ns: int) -> int:
        """More kept branches of one, under `names`; they share every block. Returns how many tokens each has.

        Raises NotFound (BRANCH_NOT_FOUND), InvalidArgument, ResourceExhausted (TOO_MANY_KEPT); then there is none.
        """
        return kept.fork(self._state, tenant, name, names, ttl_ns, now_ns)

    def rollback_kept(self, tenant: TenantId, name: bytes, num_tokens: int, *, now_ns: int) -> None:
        """Cuts a kept branch back to `num_tokens` (1..its tokens). Raises NotFound, InvalidArgument."""
        kept.rollback(self._state, tenant, name, num_tokens, now_ns)

    def drop_kept(self, tenant: TenantId, name: bytes, *, now_ns: int) -> None:
        """Ends a kept branch; what it has published stays cached. Raises NotFound."""
        kept.drop(self._state, tenant, name, now_ns)

    def drop_numbered_kept(self, branch_id: int) -> TenantId:
        """Ends the kept branch of that number, as `list_branches` tells it, whosever it is; returns its tenant.

        Raises NotFound (BRANCH_NOT_FOUND).
        """
        return kept.drop_numbered(self._state, branch_id)
