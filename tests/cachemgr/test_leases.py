"""The lease book: sessions, their leases, and what waits for an acknowledgement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemgr.ids import LeaseId, SessionId, TenantId
from cachemgr.leases import Deferred, Lease, LeaseBook, Session, to_wire
from cachemgr.nodes import Tree
from common.errors import FailedPrecondition, NotFound


def make_lease(book: LeaseBook, session: Session, table: list[int]) -> Lease:
    return Lease(
        lease_id=book.next_lease_id(),
        session_id=session.session_id,
        tenant=TenantId("a"),
        owner=1,
        tree=Tree(1, b"r" * 32),
        request_id="r",
        sample=0,
        tokens=bytearray(b"\0" * 12),
        table=np.array(table, np.intp),
        num_blocks=len(table),
        num_published=0,
        sealed=0,
        granted=0,
        copy=None,
        store=True,
        priority=50,
        granted_ns=0,
    )


@given(st.lists(st.lists(st.integers(1, 1000), max_size=9), max_size=12))
def test_table_grows_like_a_list(pieces: list[list[int]]) -> None:
    """Appending keeps every block in its place, however the table is enlarged."""
    book = LeaseBook()
    lease = make_lease(book, book.open_session("d", 1, 0), [])
    expected: list[int] = []
    for piece in pieces:
        lease.append(piece)
        expected += piece
        assert lease.blocks.tolist() == expected


def test_growth_never_changes_what_was_handed_out() -> None:
    """A table that crossed the interface is the receiver's own."""
    book = LeaseBook()
    lease = make_lease(book, book.open_session("d", 1, 0), [1, 2, 3])
    wire = to_wire(lease.blocks)
    lease.table[0] = 9
    assert wire.tolist() == [1, 2, 3]
    assert wire.dtype == np.int32


def test_ids_are_never_used_twice() -> None:
    """A session or lease that is over leaves its number behind."""
    book = LeaseBook()
    first = book.open_session("d", 1, 0)
    lease = make_lease(book, first, [1])
    book.add(lease)
    book.remove(lease)
    del book.sessions[first.session_id]
    second = book.open_session("d", 1, 0)
    assert second.session_id != first.session_id
    assert make_lease(book, second, [1]).lease_id != lease.lease_id


def test_lease_is_found_by_its_own_session_alone() -> None:
    """Another session's lease is NotFound; the holder finds it."""
    book = LeaseBook()
    holder, other = book.open_session("d", 1, 0), book.open_session("e", 2, 0)
    lease = make_lease(book, holder, [1])
    book.add(lease)
    assert holder.lease(lease.lease_id) is lease
    with pytest.raises(NotFound):
        other.lease(lease.lease_id)


def test_session_that_is_over_is_refused() -> None:
    """An old session's messages are refused; a live one's are taken."""
    book = LeaseBook()
    live = book.open_session("d", 1, 0)
    assert book.session(live.session_id) is live
    with pytest.raises(FailedPrecondition):
        book.session(SessionId(99))


def test_users_of_a_tree_are_its_leases() -> None:
    """A tree knows how many leases may still publish in it."""
    book = LeaseBook()
    session = book.open_session("d", 1, 0)
    lease = make_lease(book, session, [1])
    book.add(lease)
    assert lease.tree.users == 1
    book.remove(lease)
    assert lease.tree.users == 0


def test_deferred_runs_come_back_by_revision_or_by_lease() -> None:
    """What is acknowledged is handed out once; what belongs to a lease goes with it; the rest waits."""
    session = LeaseBook().open_session("d", 1, 0)
    runs = [np.array([number], np.intp) for number in range(1, 5)]
    for revision, lease, run in ((1, 1, runs[0]), (2, 1, runs[1]), (3, 2, runs[2]), (4, 3, runs[3])):
        session.deferred.append(Deferred(revision, LeaseId(lease), run))
    assert [run.tolist() for run in session.take_deferred(applied_revision=1)] == [[1]]
    assert [run.tolist() for run in session.take_deferred(lease_id=LeaseId(1))] == [[2]]
    assert session.take_deferred(applied_revision=2) == []
    assert [run.tolist() for run in session.take_deferred(applied_revision=9)] == [[3], [4]]
    assert session.deferred == []


def test_a_break_brings_no_deadline_nearer() -> None:
    """A decoder that works on by its own clock, for it has not seen that its stream broke, is right to do so."""
    book = LeaseBook(lease_ns=10, grace_ns=4)
    session = book.open_session("d", 1, 0).session_id
    book.leave(session, 1)
    assert book.lapsed(9) == []
    assert book.lapsed(10) == [session]
    late = book.open_session("e", 2, 0).session_id
    book.leave(late, 9)
    assert late not in book.lapsed(12)
    assert late in book.lapsed(13)
