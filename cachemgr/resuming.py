"""Coming back: what a decoder presents after its stream broke is made one with what the core knows of its session.

Invariant: afterwards both sides hold the same, as if every message had arrived: growth is taken over as a report would
have told it, and what the decoder does not list (an acquire, a credit, whose answer was lost) is let go. A lease that
does not fit what was presented is over, and its blocks wait for the acknowledgement of the answer. Called by
`manager.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cachemgr import reports
from cachemgr.ids import BlockArray, LeaseId, SessionId
from cachemgr.leases import NO_LEASE, Lease, Session, to_wire
from cachemgr.results import CopyPlan, Replacement, SequenceReport
from cachemgr.state import CacheState
from cachemgr.windows import passed_by
from common.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Held:
    """One sequence as its decoder has it: all of its tokens (packed), its table (int32), what is computed and fenced,
    and the copy that has not run."""

    lease_id: LeaseId
    tokens: bytes
    blocks: BlockArray
    sealed_tokens: int
    copy: CopyPlan | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a resume came to: the lease of each held sequence (0: not kept), and replacements as a report has them."""

    leases: list[LeaseId]
    replacements: list[Replacement]
    revision: int


def resume(state: CacheState, session_id: SessionId, held: Sequence[Held], credit: BlockArray, now_ns: int) -> Resumed:
    """See `CacheManager.resume`."""
    session = state.book.session(session_id)
    if state.window_tokens:
        held = [_as_known(state, session, item) for item in held]
    mine = _checked_credit(session, held, credit)
    kept: list[SequenceReport] = []
    misfits: list[Held] = []
    replacements: list[Replacement] = []
    taken: set[int] = set()
    for item in held:
        lease = session.leases.get(item.lease_id)
        report = None if lease is None else _compare(session, lease, item)
        swap = None if lease is None else _swap(session, lease, item)
        if report is None or swap is None or not taken.isdisjoint(report.taken_blocks.tolist()):
            misfits.append(item)
            continue
        taken.update(report.taken_blocks.tolist())
        kept.append(report)
        replacements += swap
    listed = {item.lease_id for item in held}
    lost = [SequenceReport(number, release=True) for number in session.leases if number not in listed]
    # The decoder may write what is in the table of a misfit until it is told.
    unsafe = {block for item in misfits for block in item.blocks.tolist()}
    unused = sorted(session.credit - mine - taken - unsafe)
    unzeroed = [session.leases[item.lease_id].held.copy() for item in lost]
    done = reports.report(
        state,
        session_id,
        [*lost, *kept],
        returned=np.array(unused, np.int32),
        wanted=0,
        lacking=(),
        generated_tokens=0,
        preemptions=0,
        queued=session.queued_requests,
        applied_revision=0,
        now_ns=now_ns,
    )
    # What the decoder was told to zero with an answer that was lost, it has not zeroed.
    state.pool.ownership.taint(np.concatenate((*unzeroed, np.array(unused, np.intp))))
    for item in misfits:
        reports.end_refused(state, session, SequenceReport(item.lease_id, taken_blocks=item.blocks))
    refused = {refusal.lease_id for refusal in done.refusals}
    leases = [number if number in session.leases else NO_LEASE for number in (item.lease_id for item in held)]
    replacements = [swap for swap in replacements if swap.lease_id not in refused]
    state.book.come_back(session_id, now_ns)
    for lease in session.leases.values():
        state.waits.enter(lease)
    return Resumed(leases, [*replacements, *done.replacements], state.revision)


def _as_known(state: CacheState, session: Session, held: Held) -> Held:
    """What is presented, with the blocks that the manager knows of where nothing is read any more: the decoder is not
    told when those go, and they may be anybody's by now."""
    lease = session.leases.get(held.lease_id)
    known = np.zeros(len(held.blocks), np.int32) if lease is None else to_wire(lease.blocks)
    passed = min(passed_by(state, held.sealed_tokens), len(known), len(held.blocks))
    return replace(held, blocks=np.concatenate((known[:passed], held.blocks[passed:]))) if passed else held


def renamed(held: Sequence[Held], leases: Mapping[LeaseId, LeaseId]) -> list[Held]:
    """What is presented under the leases of an earlier session, under those that they became; one that was refused gets
    a number that is no lease's."""
    return [replace(item, lease_id=leases.get(item.lease_id) or LeaseId(-1 - n)) for n, item in enumerate(held)]


def _checked_credit(session: Session, held: Sequence[Held], credit: BlockArray) -> set[int]:
    """The credit that the decoder says it has. Raises InvalidArgument where it cannot be so."""
    mine = set(credit.tolist())
    if len(mine) != len(credit) or not mine <= session.credit:
        raise InvalidArgument("credit_blocks", "holds blocks twice, or blocks that are not the session's credit")
    numbers = [item.lease_id for item in held]
    if len(set(numbers)) != len(numbers):
        raise InvalidArgument("sequences", "names a lease twice")
    for item in held:
        if not mine.isdisjoint(item.blocks.tolist()):
            raise InvalidArgument("sequences", "a block of the presented credit is in a table, too")
    return mine


def _compare(session: Session, lease: Lease, held: Held) -> SequenceReport | None:
    """What the decoder did to a lease and could not tell, as a report; None where the two do not fit."""
    known, grown = len(lease.tokens), held.blocks[lease.num_blocks :]
    if len(held.blocks) < lease.num_blocks or not session.credit.issuperset(grown.tolist()):
        return None
    if len(held.tokens) < known or not held.tokens.startswith(bytes(lease.tokens)):
        return None
    if held.copy is not None and held.copy != lease.copy:
        return None
    copied = lease.copy is not None and held.copy is None
    return SequenceReport(held.lease_id, grown, held.tokens[known:], held.sealed_tokens, copied)


def _swap(session: Session, lease: Lease, held: Held) -> list[Replacement] | None:
    """The replacement that the decoder was not told of, if any; None where its table has blocks of somebody else."""
    count = lease.num_blocks
    differing = np.flatnonzero(lease.blocks[: len(held.blocks)] != held.blocks[:count])
    if not len(differing):
        return []
    runs = [item.blocks for item in session.deferred if item.lease_id == lease.lease_id]
    waiting = np.concatenate(runs) if runs else np.zeros(0, np.intp)
    if not np.isin(held.blocks[differing], waiting).all():
        return None
    first, end = int(differing[0]), int(differing[-1]) + 1
    return [Replacement(lease.lease_id, first, to_wire(lease.table[first:end]))]
