"""Who holds blocks: sessions, their leases, their credit, and what waits for an acknowledgement.

Invariant: every hold on a block is in exactly one of: a lease's table, a lease's pin (the source of a copy that has not
been reported), a session's credit, a session's deferred runs. A lease belongs to one session of this epoch, and a
session has a deadline, which each of its operations puts off. Called by the
manager's modules, which move the pool's blocks in the same step; it never touches the pool or the index itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from cachemgr.ids import BlockArray, BlockRun, LeaseId, SessionId, TenantId
from cachemgr.nodes import Tree
from cachemgr.results import CopyPlan
from common.errors import FailedPrecondition, NotFound
from common.layout import TOKEN_BYTES

NO_LEASE: Final = LeaseId(0)
DEFAULT_LEASE_NS: Final = 10_000_000_000
DEFAULT_GRACE_NS: Final = 5_000_000_000


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
    root:          cache key root that it was asked for under
    committed:     published tokens of the partly filled block at its sealed mark; 0: none. While there are, that block
                   is one of `num_published` and must be made writable before it is written
    prefix_blocks: leading blocks of the table that lie in `prefix_tree`, the tree of a wider scope; others in `tree`
    ttl_ns:        how long what it publishes or uses stays after its last use at most; 0 means as long as there is room
    passed:        leading blocks that it let go of, or never held (`windows.py`); the table has the null block there
    behind:        leading blocks whose window blocks it needs no more (`groups.py`); it holds those blocks
    asked:         tokens that it began with: who asks the same, or more, may begin behind them
    cut_off:       its tenant, its tenant's secret or its scope ended while it runs: nothing of it outlives it
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
    root: bytes = b""
    committed: int = 0
    prefix_tree: Tree | None = None
    prefix_blocks: int = 0
    ttl_ns: int = 0
    passed: int = 0
    behind: int = 0
    asked: int = 0
    cut_off: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the manager knows of it."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def blocks(self) -> BlockRun:
        """The block table, a view."""
        return self.table[: self.num_blocks]

    @property
    def held(self) -> BlockRun:
        """The blocks of the table that it holds, a view: all but the leading null blocks."""
        return self.table[self.passed : self.num_blocks]

    @property
    def private(self) -> BlockRun:
        """The blocks that it holds and the index does not list, a view."""
        return self.table[max(self.passed, self.num_published) : self.num_blocks]

    @property
    def listed(self) -> BlockRun:
        """The blocks that it holds and the index lists at their place, a view."""
        return self.table[self.passed : max(self.passed, self.num_published)]

    def cut_from_index(self) -> None:
        """It goes on with the blocks that it holds, publishes nothing any more, and is not kept at its end."""
        self.committed = 0
        self.store = False
        self.cut_off = True

    def append(self, blocks: list[int]) -> None:
        """Lengthens the table."""
        end = self.num_blocks + len(blocks)
        if end > len(self.table):
            table = np.zeros(end + (end >> 2) + 4, np.intp)
            table[: self.num_blocks] = self.blocks
            self.table = table
        if len(blocks) == 1:
            self.table[self.num_blocks] = blocks[0]
        else:
            self.table[self.num_blocks : end] = blocks
        self.num_blocks = end


class Deferred(NamedTuple):
    """Blocks that a decoder may still use until it acknowledges `revision`."""

    revision: int
    lease_id: LeaseId
    blocks: BlockRun


@dataclass(slots=True, eq=False)
class Session:
    """One attached decoder.

    deadline_ns: when it is over if it says nothing; see `LeaseBook.lapsed`
    away:        its stream is broken and may come back until the deadline; it can do nothing meanwhile
    lent:        block of the credit -> the one lease that may take it (`own_room.py`)
    """

    session_id: SessionId
    decoder_name: str
    process_id: int
    attached_ns: int
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    credit: set[int] = field(default_factory=set)
    deferred: list[Deferred] = field(default_factory=list)
    queued_requests: int = 0
    epoch: int = 0
    deadline_ns: int = 0
    away: bool = False
    lent: dict[int, LeaseId] = field(default_factory=dict)

    def spend(self, blocks: list[int]) -> None:
        """These are no credit any more."""
        self.credit.difference_update(blocks)
        if self.lent:
            for block in blocks:
                self.lent.pop(block, None)

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
        taken: list[BlockRun] = []
        left: list[Deferred] = []
        for item in self.deferred:
            if item.revision <= applied_revision or item.lease_id == lease_id:
                taken.append(item.blocks)
            else:
                left.append(item)
        self.deferred = left
        return taken


class LeaseBook:
    """All sessions and leases, and the quarantine of sessions that are over.

    lease_ns: how long a session lives that says nothing
    grace_ns: how long one whose stream broke has to come back at least
    """

    def __init__(self, *, epoch: int = 0, lease_ns: int = DEFAULT_LEASE_NS, grace_ns: int = DEFAULT_GRACE_NS) -> None:
        self.epoch = epoch
        self.lease_ns = lease_ns
        self.grace_ns = grace_ns
        self.fenced_operations = 0
        self.current = SessionId(0)  # whose operation runs, or ran last
        self.sessions: dict[SessionId, Session] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.quarantine: dict[SessionId, BlockRun] = {}
        self._last_session = 0
        self._last_lease = 0

    def open_session(self, decoder_name: str, process_id: int, now_ns: int) -> Session:
        """A new session with an id of its own."""
        self._last_session += 1
        session = Session(SessionId(self._last_session), decoder_name, process_id, now_ns, epoch=self.epoch)
        session.deadline_ns = now_ns + self.lease_ns
        self.sessions[session.session_id] = session
        return session

    def session(self, session_id: SessionId) -> Session:
        """The attached session. Raises FailedPrecondition where it is over or never was, and counts that."""
        session = self.sessions.get(session_id)
        if session is None:
            self.fenced_operations += 1
            raise FailedPrecondition("the session is not attached", reason="SESSION_OVER")
        return session

    def renew(self, session_id: SessionId, now_ns: int) -> None:
        """A session has said something. Raises FailedPrecondition, and counts it, where it is over or away."""
        session = self.session(session_id)
        if session.away:
            self.fenced_operations += 1
            raise FailedPrecondition("the stream of this session is broken", reason="SESSION_AWAY")
        session.deadline_ns = max(session.deadline_ns, now_ns + self.lease_ns)
        self.current = session_id

    def leave(self, session_id: SessionId, now_ns: int) -> None:
        """The stream of a session broke: it has the grace time to come back, and never less than its lease: until that
        has run out by its own clock, its decoder goes on."""
        session = self.session(session_id)
        session.away = True
        session.deadline_ns = max(session.deadline_ns, now_ns + self.grace_ns)

    def come_back(self, session_id: SessionId, now_ns: int) -> None:
        """A session has a stream again."""
        session = self.session(session_id)
        session.away = False
        session.deadline_ns = now_ns + self.lease_ns

    def lapsed(self, now_ns: int) -> list[SessionId]:
        """Sessions whose deadline has passed. They live on, and can be renewed, until they are detached."""
        return [number for number, session in self.sessions.items() if session.deadline_ns <= now_ns]

    def next_lease_id(self) -> LeaseId:
        """A lease id that was never used."""
        self._last_lease += 1
        return LeaseId(self._last_lease)

    def add(self, lease: Lease) -> None:
        """Enters a lease under its session."""
        self.leases[lease.lease_id] = lease
        self.sessions[lease.session_id].leases[lease.lease_id] = lease
        lease.tree.users += 1
        if lease.prefix_tree is not None:
            lease.prefix_tree.users += 1

    def remove(self, lease: Lease) -> None:
        """Forgets a lease."""
        del self.leases[lease.lease_id]
        del self.sessions[lease.session_id].leases[lease.lease_id]
        lease.tree.users -= 1
        if lease.prefix_tree is not None:
            lease.prefix_tree.users -= 1


def to_wire(blocks: BlockRun) -> BlockArray:
    """A copy of a run as it crosses the manager's interface, int32."""
    return blocks.astype(np.int32)
