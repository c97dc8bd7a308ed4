"""One sequence as a simulated decoder keeps it: its tokens, its table, and what the daemon has been told of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cachemgr.claim_plans import Claim
from cachemgr.ids import LeaseId
from cachemgr.results import CopyPlan, Keep, SequenceReport
from cachemgr.resuming import Held
from common.tokens import pack_tokens
from tests.simulation.memory import cells_of, labelled
from tests.simulation.workload import Request, span_of

WAITING, ACQUIRING, RUNNING, HELD_UP, FINISHED = "waiting", "acquiring", "running", "held up", "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request. `cells` are what its tokens' slots must hold; `computed` tokens are written.

    HELD_UP: a rollback or a copy-on-write is on its way; nothing is computed until its answer.
    `drafts` are trailing tokens that a draft model guessed; they may be cut off again.
    """

    request: Request
    sample: int
    arrival: int
    tokens: list[int]
    cells: list[int] = field(default_factory=list)
    state: str = WAITING
    lease: LeaseId | None = None
    table: list[int] = field(default_factory=list)
    computed: int = 0
    copy: CopyPlan | None = None
    copied: bool = False
    taken: list[int] = field(default_factory=list)
    reported_tokens: int = 0
    reported_sealed: int = 0
    drafts: int = 0
    to_fork: tuple[int, ...] = ()
    may_wait: bool = True
    wait_id: int = 0
    scope: int = 0  # that its first `prefix_tokens`, whole blocks, lie in
    prefix_tokens: int = 0
    lie: bool = False  # its next report says what is not so

    @property
    def rank(self) -> tuple[int, int, int]:
        """The order of service."""
        return (self.request.priority, self.arrival, self.sample)

    @property
    def name(self) -> str:
        """For the trace."""
        return f"r{self.request.number}.{self.sample}"

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        """Tokens after the prompt, drafts not counted."""
        return len(self.tokens) - len(self.request.prompt) - self.drafts

    def know(self) -> None:
        """Works out the cells of tokens that are new."""
        known = len(self.cells)
        if known < len(self.tokens):
            before = labelled(self.cells[-1] if known else self.request.cell, self.request.owner)
            self.cells += cells_of(before, self.tokens[known:])
            if known < self.prefix_tokens:
                self.lie_in(self.scope, self.prefix_tokens)

    def lie_in(self, scope: int, prefix_tokens: int) -> None:
        """Its first tokens lie in a scope (0: none), the others are its tenant's own."""
        self.scope, self.prefix_tokens = scope, prefix_tokens
        owner = self.request.owner
        self.cells = [
            labelled(cell, scope if place < prefix_tokens else owner) for place, cell in enumerate(self.cells)
        ]

    def cut(self, num_tokens: int) -> None:
        """Forgets the tokens after the first `num_tokens`."""
        del self.tokens[num_tokens:]
        del self.cells[num_tokens:]
        self.computed = min(self.computed, num_tokens)
        self.reported_tokens = min(self.reported_tokens, num_tokens)
        self.reported_sealed = min(self.reported_sealed, num_tokens)

    def hold(self, lease: LeaseId, table: list[int], computed: int, known: int, copy: CopyPlan | None) -> None:
        """It has a lease from now on; the daemon knows `known` tokens."""
        self.lease, self.table, self.computed, self.copy = lease, table, computed, copy
        self.copied = False
        self.taken = []
        self.reported_tokens, self.reported_sealed = known, 0
        self.state = RUNNING

    def let_go(self) -> None:
        """Its lease is over: what was computed counts no more; drafts that nobody confirmed are dropped."""
        self.cut(len(self.tokens) - self.drafts)
        self.drafts = 0
        self.lie = False
        self.lease, self.table, self.computed, self.copy = None, [], 0, None
        self.taken, self.copied = [], False
        self.reported_tokens = self.reported_sealed = 0

    def has_news(self, size: int) -> bool:
        """Whether the daemon must be told."""
        return bool(self.taken) or self.copied or self.computed // size > self.reported_sealed // size or self.lie

    def held(self) -> Claim:
        """All of it, as it is now; from now on only what comes after is news."""
        assert self.lease is not None
        known = max(self.computed, self.reported_tokens)
        self.reported_tokens, self.reported_sealed = known, self.computed
        self.taken, self.copied = [], False
        tokens = pack_tokens(np.array(self.tokens[:known], np.int32))
        request = self.request
        return Claim(
            Held(self.lease, tokens, np.array(self.table, np.int32), self.computed, self.copy),
            request.tenant, request.root, f"r{request.number}", self.sample, no_store=request.no_store,
            priority=request.cache_priority, ttl_ns=request.ttl_ns,
            prefix=span_of(self.scope, request.root, self.prefix_tokens),
        )  # fmt: skip

    def news(self, *, release: bool = False, keep: Keep | None = None) -> SequenceReport:
        """What the daemon has not been told; drafts that are computed are told too."""
        assert self.lease is not None
        known = max(self.computed, self.reported_tokens)
        stolen = self.table[-1:] if self.lie and self.lease % 2 else []  # the first ones may be credit again by now
        report = SequenceReport(
            self.lease,
            taken_blocks=np.array(self.taken + stolen, np.int32),
            tokens=pack_tokens(np.array(self.tokens[self.reported_tokens : known], np.int32)),
            sealed_tokens=self.computed + (1000 if self.lie and not stolen else 0),
            copied=self.copied,
            release=release,
            keep=keep,
        )
        self.reported_tokens, self.reported_sealed = known, self.computed
        self.taken, self.copied, self.lie = [], False, False
        return report
