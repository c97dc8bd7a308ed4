"""The register of sessions and leases against a naive model: who is there, who holds what, until when."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachemgr.ids import LeaseId, SessionId, TenantId
from cachemgr.leases import Deferred, Lease, LeaseBook
from cachemgr.nodes import Tree
from common.errors import FailedPrecondition, NotFound

LEASE, GRACE = 20, 8


@dataclass
class Model:
    """One session as the model has it."""

    deadline: int
    away: bool = False
    leases: set[int] = field(default_factory=set)
    deferred: list[tuple[int, int, int]] = field(default_factory=list)  # (revision, lease, block)


class LeaseMachine(RuleBasedStateMachine):
    """Any history of sessions, leases, breaks and acknowledgements is kept as a few dictionaries would keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook(epoch=3, lease_ns=LEASE, grace_ns=GRACE)
        self.trees = [Tree(1, b"a" * 32), Tree(2, b"b" * 32)]
        self.model: dict[int, Model] = {}
        self.ever: list[int] = []
        self.users = [0, 0]
        self.fenced = 0
        self.now = 0
        self.block = 0

    def _some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.ever))

    @rule()
    def attach(self) -> None:
        session = self.book.open_session("d", 1, self.now)
        assert session.session_id not in self.ever
        assert session.epoch == 3
        self.ever.append(session.session_id)
        self.model[session.session_id] = Model(self.now + LEASE)

    @rule(step=st.integers(0, 9))
    def time_passes(self, step: int) -> None:
        self.now += step

    @precondition(lambda self: self.ever)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        number = self._some(data)
        known = self.model.get(number)
        if known is None or known.away:
            self.fenced += 1
            with pytest.raises(FailedPrecondition):
                self.book.renew(SessionId(number), self.now)
        else:
            self.book.renew(SessionId(number), self.now)
            known.deadline = max(known.deadline, self.now + LEASE)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def stream_breaks(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        self.book.leave(SessionId(number), self.now)
        self.model[number].away = True
        self.model[number].deadline = max(self.model[number].deadline, self.now + GRACE)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def comes_back(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        self.book.come_back(SessionId(number), self.now)
        self.model[number].away = False
        self.model[number].deadline = self.now + LEASE

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tree=st.integers(0, 1))
    def grant(self, data: st.DataObject, tree: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        lease = Lease(
            lease_id=self.book.next_lease_id(), session_id=SessionId(number), tenant=TenantId("t"), owner=tree + 1,
            tree=self.trees[tree], request_id="r", sample=0, tokens=bytearray(4), table=np.array([1], np.intp),
            num_blocks=1, num_published=0, sealed=0, granted=0, copy=None, store=True, priority=50, granted_ns=self.now,
        )  # fmt: skip
        self.book.add(lease)
        assert all(lease.lease_id not in known.leases for known in self.model.values())
        self.model[number].leases.add(lease.lease_id)
        self.users[tree] += 1

    @precondition(lambda self: any(known.leases for known in self.model.values()))
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        pairs = [(number, lease) for number, known in self.model.items() for lease in sorted(known.leases)]
        number, lease_id = data.draw(st.sampled_from(pairs))
        lease = self.book.session(SessionId(number)).lease(LeaseId(lease_id))
        self.book.remove(lease)
        self.model[number].leases.discard(lease_id)
        self.users[lease.owner - 1] -= 1

    @precondition(lambda self: self.model)
    @rule(data=st.data(), lease=st.integers(1, 4), revision=st.integers(0, 9))
    def defer(self, data: st.DataObject, lease: int, revision: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        self.block += 1
        run = np.array([self.block], np.intp)
        self.book.session(SessionId(number)).deferred.append(Deferred(revision, LeaseId(lease), run))
        self.model[number].deferred.append((revision, lease, self.block))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), revision=st.integers(-1, 9), lease=st.sampled_from([None, 1, 2, 3, 4]))
    def acknowledge(self, data: st.DataObject, revision: int, lease: int | None) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        known = self.model[number]
        wanted = [item for item in known.deferred if item[0] <= revision or item[1] == lease]
        lease_id = None if lease is None else LeaseId(lease)
        taken = self.book.session(SessionId(number)).take_deferred(applied_revision=revision, lease_id=lease_id)
        assert sorted(int(run[0]) for run in taken) == sorted(block for _, _, block in wanted)
        known.deferred = [item for item in known.deferred if item not in wanted]

    @precondition(lambda self: self.ever)
    @rule(data=st.data(), lease=st.integers(1, 12))
    def look_up(self, data: st.DataObject, lease: int) -> None:
        """A lease is found by its own session alone."""
        number = self._some(data)
        if number not in self.model:
            self.fenced += 1
            with pytest.raises(FailedPrecondition):
                self.book.session(SessionId(number))
            return
        session = self.book.session(SessionId(number))
        if lease in self.model[number].leases:
            assert session.lease(LeaseId(lease)).session_id == number
        else:
            with pytest.raises(NotFound):
                session.lease(LeaseId(lease))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        session = self.book.session(SessionId(number))
        for lease in list(session.leases.values()):
            self.book.remove(lease)
            self.users[lease.owner - 1] -= 1
        del self.book.sessions[session.session_id]
        del self.model[number]

    @invariant()
    def agrees_with_the_model(self) -> None:
        book = self.book
        assert {number: set(session.leases) for number, session in book.sessions.items()} == {
            number: known.leases for number, known in self.model.items()
        }
        assert set(book.leases) == set().union(*(known.leases for known in self.model.values()))
        assert [tree.users for tree in self.trees] == self.users
        assert sorted(book.lapsed(self.now)) == sorted(
            n for n, known in self.model.items() if known.deadline <= self.now
        )
        assert {number: session.away for number, session in book.sessions.items()} == {
            number: known.away for number, known in self.model.items()
        }
        assert book.fenced_operations == self.fenced


LeaseMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
