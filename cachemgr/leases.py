"""Who holds blocks: sessions, their leases, their credit, and what waits for an acknowledgement.

Invariant: every hold on a block is in exactly one of: a lease's table, a lease's pin (the source of a copy that has not
been reported), a session's credit, a session's deferred runs. A lease belongs to one attached session. Called by the
manager's modules, which move the pool's blocks in the same step; it never touches the pool or the index itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cachemgr.ids import BlockArray, BlockRun, LeaseId, SessionId, TenantId
from cachemgr.nodes import Tree
from cachemgr.results import CopyPlan
from common.errors import FailedPrecondition, NotFound
from common.layout import TOKEN_BYTES

NO_LEASE: Final = LeaseId(0)


@dataclass(slots=True, eq=False)
class Lease:
    """One sequence's hold on blocks.

    tokens:        packed record of all its tokens
    table:         int [capacity]; the first `num_blocks` entries are the block table
    num_published: leading blocks of the table that the index lists at their place
    sealed:        leading tokens that are computed and fenced
    granted:       tokens that needed no computing when the lease began, a copy that is still to run included
    copy:          the plan that has not been reported yet; its source is pinned
    store:         whether its blocks may still be published
    grew:          whether it has published blocks itself
    """

    lease_id: LeaseId
    session_id: SessionId
    tenant: TenantId
    owner: int
    tree: Tree
    request_id: str
    sample: int
    tokens: bytearray
    table: BlockRun
    num_blocks: int
    num_published: int
    sealed: int
    granted: int
    copy: CopyPlan | None
    store: bool
    priority: int
    granted_ns: int
    parent: LeaseId = NO_LEASE
    grew: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the manager knows of it."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def blocks(self) -> BlockRun:
        """The block table, a view."""
        return self.table[: self.num_blocks]

    def append(self, blocks: list[int]) -> None:
        """Lengthens the table."""
        end = self.num_blocks + len(blocks)
        if end > len(self.table):
            table = np.zeros(end + (end >> 2) + 4, np.intp)
            table[: self.num_blocks] = self.blocks
            self.table = table
        self.table[self.num_blocks : end] = blocks
        self.num_blocks = end


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """Blocks that a decoder may still use until it acknowledges `revision`."""

    revision: int
    lease_id: LeaseId
    blocks: BlockRun


@dataclass(slots=True, eq=False)
class Session:
    """One attached decoder."""

    session_id: SessionId
    decoder_name: str
    process_id: int
    attached_ns: int
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    credit: set[int] = field(default_factory=set)
    deferred: list[Deferred] = field(default_factory=list)
    queued_requests: int = 0

    def lease(self, lease_id: LeaseId) -> Lease:
        """Its lease of that id. Raises NotFound, also where another session has it."""
        lease = self.leases.get(lease_id)
        if lease is None:
            raise NotFound("this session holds no such lease", reason="LEASE_NOT_FOUND")
        return lease

    def take_deferred(self, *, applied_revision: int = -1, lease_id: LeaseId | None = None) -> list[BlockRun]:
        """Removes and returns what was acknowledged, or what belongs to a lease."""
        if not self.deferred:
            return []
        taken = [item for item in self.deferred if item.revision <= applied_revision or item.lease_id == lease_id]
        self.deferred = [item for item in self.deferred if item not in taken]
        return [item.blocks for item in taken]


class LeaseBook:
    """All sessions and leases, and the quarantine of sessions that are over."""

    def __init__(self) -> None:
        self.sessions: dict[SessionId, Session] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.quarantine: dict[SessionId, BlockRun] = {}
        self._last_session = 0
        self._last_lease = 0

    def open_session(self, decoder_name: str, process_id: int, now_ns: int) -> Session:
        """A new session with an id of its own."""
        self._last_session += 1
        session = Session(SessionId(self._last_session), decoder_name, process_id, now_ns)
        self.sessions[session.session_id] = session
        return session

    def session(self, session_id: SessionId) -> Session:
        """The attached session. Raises FailedPrecondition where it is over or never was."""
        session = self.sessions.get(session_id)
        if session is None:
            raise FailedPrecondition("the session is not attached", reason="SESSION_OVER")
        return session

    def next_lease_id(self) -> LeaseId:
        """A lease id that was never used."""
        self._last_lease += 1
        return LeaseId(self._last_lease)

    def add(self, lease: Lease) -> None:
        """Enters a lease under its session."""
        self.leases[lease.lease_id] = lease
        self.sessions[lease.session_id].leases[lease.lease_id] = lease
        lease.tree.users += 1

    def remove(self, lease: Lease) -> None:
        """Forgets a lease."""
        del self.leases[lease.lease_id]
        del self.sessions[lease.session_id].leases[lease.lease_id]
        lease.tree.users -= 1


def to_wire(blocks: BlockRun) -> BlockArray:
    """A copy of a run as it crosses the manager's interface, int32."""
    return blocks.astype(np.int32)
