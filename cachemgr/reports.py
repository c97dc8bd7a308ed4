"""Reports: what the decoders' steps did, one batched message for a step or a few.

Invariants: a sequence is checked whole before it changes anything; a bad one refuses itself alone, and its lease is
over; blocks that a decoder might still write wait until it acknowledges. Sequences come best ranked first: where their
owner's ceiling has no room for all, the last ones give way. Called by `manager.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cachemgr import groups
from cachemgr.blocks import NO_OWNER
from cachemgr.giving_way import give, who_gives_way
from cachemgr.ids import BlockArray, BlockRun, LeaseId, SessionId
from cachemgr.kept import keep
from cachemgr.layers import owner_at
from cachemgr.leases import Deferred, Session, to_wire
from cachemgr.own_room import lend_own
from cachemgr.quotas import OVER_CEILING
from cachemgr.relief import relieve
from cachemgr.report_checks import checked_credit, checked_seal, validate
from cachemgr.results import NOTHING_TAKEN, Kept, Refusal, Replacement, Reported, SequenceFields, SequenceReport
from cachemgr.sealing import publish_tail, seal
from cachemgr.state import CacheState
from cachemgr.steady_reports import list_late, others
from cachemgr.windows import drop_passed
from common.errors import InvalidArgument, ResourceExhausted, TesseraError


class _News(NamedTuple):
    """What is told of the sequences of a report."""

    replacements: list[Replacement]
    refusals: list[Refusal]
    kept: list[Kept]


def report(
    state: CacheState,
    session_id: SessionId,
    sequences: Iterable[SequenceFields],
    *,
    returned: BlockArray,
    wanted: int,
    lacking: Sequence[LeaseId],
    generated_tokens: int,
    preemptions: int,
    queued: int,
    applied_revision: int,
    now_ns: int,
) -> Reported:
    """See `CacheManager.report`."""
    session = state.book.session(session_id)
    validate(state, wanted, generated_tokens, preemptions, queued, applied_revision)
    back = checked_credit(session, returned, "returned_blocks")
    state.revision += 1
    for run in session.take_deferred(applied_revision=applied_revision):
        state.let_go(run)
    if back:
        session.spend(back)
        state.pool.ownership.untouched(_run(back))
        state.pool.unhold(_run(back))
    news = _News([], [], [])
    scarce: dict[int, list[SequenceReport]] = {}  # by owner: what waits for the news of all others
    for sequence in others(state, session, sequences, scarce):
        if state.late:
            list_late(state)
        if scarce and _queue_up(session, sequence, scarce):
            continue
        if _try(state, session, sequence, news, now_ns) is not None:
            scarce[session.leases[sequence.lease_id].owner] = [sequence]
    if state.late and (scarce or lacking or not _can_wait(state, wanted)):
        list_late(state)
    for ranked in scarce.values():
        _share_ceiling(state, session, ranked, news, now_ns)
    counters = state.counters
    counters.generated_tokens += generated_tokens
    counters.preemptions += preemptions
    session.queued_requests = queued
    if state.journal is not None:
        state.journal.flush()
    granted = _grant_credit(state, session, wanted)
    grown = lend_own(state, session, lacking[len(granted) :]) if len(granted) < wanted else []
    return Reported(news.replacements, news.refusals, granted, state.revision, news.kept, grown)


def _can_wait(state: CacheState, wanted: int) -> bool:
    """Whether what is left for later makes no difference to the rest of a report: no window passes over a block then,
    and what credit is wanted is free."""
    return not state.window_tokens and state.window_blocks is None and wanted <= state.pool.num_free


def credit(state: CacheState, session_id: SessionId, wanted: int) -> BlockArray:
    """See `CacheManager.credit`."""
    session = state.book.session(session_id)
    if wanted < 0:
        raise InvalidArgument("wanted_blocks", f"is {wanted}; allowed is 0 and more")
    state.revision += 1
    return _grant_credit(state, session, wanted)


def _grant_credit(state: CacheState, session: Session, wanted: int) -> BlockArray:
    """Up to `wanted` blocks for the session, evicting cached ones; int32, perhaps none."""
    if not wanted:
        return NOTHING_TAKEN
    room = state.room_for(NO_OWNER)
    if wanted > room and relieve(state, wanted - room, asking=NO_OWNER):
        room = state.room_for(NO_OWNER)
    count = groups.room(state, NO_OWNER, min(wanted, room))
    if not count:
        return np.zeros(0, np.int32)
    try:
        state.require(count, room)
    except ResourceExhausted:
        return np.zeros(0, np.int32)
    blocks = state.allocate(count, NO_OWNER)
    session.credit.update(blocks.tolist())
    return to_wire(blocks)


def _apply(
    state: CacheState, session: Session, sequence: SequenceReport, kept: list[Kept], now_ns: int
) -> Replacement | None:
    lease = session.lease(sequence.lease_id)
    taken = checked_credit(session, sequence.taken_blocks, "taken_blocks", lease.lease_id)
    sealed = checked_seal(state, lease, sequence, len(taken))
    if taken:
        within = min(len(taken), max(0, lease.prefix_blocks - lease.num_blocks))  # of a wider scope
        _require_quota(state, lease.owner, len(taken) - within)
        session.spend(taken)
        if within:
            wider = owner_at(lease, lease.num_blocks)
            state.keep_ceiling(wider, within)
            state.pool.ownership.give(taken[:within], wider)
        state.pool.ownership.give(taken[within:], lease.owner)
        lease.append(taken)
    lease.tokens += sequence.tokens
    if sequence.copied and lease.copy is not None:
        state.unpin(lease)
        state.counters.cow_copies += 1
        sealed = max(sealed, lease.granted)
    replacement = seal(state, session, lease, sealed)
    if state.window_tokens:
        drop_passed(state, lease)
    elif state.window_blocks is not None:
        groups.advance(state, lease)
    if not sequence.release:
        return replacement
    publish_tail(state, lease)
    if lease.num_published:
        last = state.index.cursor(lease.tree, lease.table, lease.num_published)
        state.index.touch(last, lease.priority, state.expiry(lease.ttl_ns))
    if sequence.keep is None:
        state.end_lease(session, lease)
    else:
        kept.append(keep(state, session, lease, sequence.keep, now_ns))
    return None


def _try(
    state: CacheState, session: Session, sequence: SequenceReport, news: _News, now_ns: int
) -> ResourceExhausted | None:
    """Takes the report of one sequence, or ends it; neither where its owner's ceiling has no room: then the error."""
    try:
        replacement = _apply(state, session, sequence, news.kept, now_ns)
    except ResourceExhausted as error:
        if error.reason == OVER_CEILING:
            return error
        _refuse(state, session, sequence, news, error)
    except TesseraError as error:
        _refuse(state, session, sequence, news, error)
    else:
        if replacement is not None:
            news.replacements.append(replacement)
    return None


def _refuse(state: CacheState, session: Session, sequence: SequenceReport, news: _News, error: TesseraError) -> None:
    end_refused(state, session, sequence)
    news.refusals.append(Refusal(sequence.lease_id, error))


def _queue_up(session: Session, sequence: SequenceReport, scarce: dict[int, list[SequenceReport]]) -> bool:
    """Puts what wants blocks behind those of its owner that found none; True where it did."""
    lease = session.leases.get(sequence.lease_id)
    ahead = None if lease is None else scarce.get(lease.owner)
    if ahead is None or not (len(sequence.taken_blocks) or any(sequence.lease_id == item.lease_id for item in ahead)):
        return False
    ahead.append(sequence)
    return True


def _share_ceiling(state: CacheState, session: Session, ranked: list[SequenceReport], news: _News, now_ns: int) -> None:
    """Takes the reports of one owner, best ranked first, that its ceiling had no room for, after those of all others.
    Where it still has none, one of them ends."""
    while ranked:
        first = ranked[0]
        error = _try(state, session, first, news, now_ns)
        if error is None:
            del ranked[0]
            continue
        behind = {item.lease_id: session.leases[item.lease_id] for item in ranked if item.lease_id in session.leases}
        lease = behind.pop(first.lease_id)
        ending = who_gives_way(state, lease, list(behind.values()), error.needed - error.usable)
        wanted = sum(len(item.taken_blocks) for item in ranked if item.lease_id != ending.lease_id)
        give(state, ending, wanted - error.usable)
        place = next(place for place, item in enumerate(ranked) if item.lease_id == ending.lease_id)
        _refuse(state, session, ranked.pop(place), news, error)


def _require_quota(state: CacheState, owner: int, count: int) -> None:
    """Makes room for `count` blocks of credit below an owner's ceiling, by what it holds idle. Raises
    ResourceExhausted where that is not enough."""
    left = state.quotas.left(owner)
    if count > left:
        relieve(state, count - left, asking=owner, own=True)
    state.quotas.check(owner, count)
    state.keep_ceiling(owner, count)


def end_refused(state: CacheState, session: Session, sequence: SequenceReport) -> None:
    """Ends a refused lease. The decoder may still use its blocks, so all of them wait for its acknowledgement: also the
    published ones, which what is pinned may hang below. The credit that it took waits with them."""
    taken = [block for block in set(sequence.taken_blocks.tolist()) if block in session.credit]
    session.spend(taken)
    runs = [_run(taken)]
    lease = session.leases.get(sequence.lease_id)
    if lease is not None:
        groups.end(state, lease)
        runs.append(lease.held)
        if lease.copy is not None:
            runs.append(_run([lease.copy.source]))
        state.forget(lease)
    for run in runs:
        if len(run):
            session.deferred.append(Deferred(state.revision, sequence.lease_id, run))


def _run(blocks: list[int]) -> BlockRun:
    return np.array(blocks, np.intp)
