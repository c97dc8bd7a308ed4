"""Reports: what the decoders' steps did, one batched message a step.

Invariants: a sequence is checked whole before it changes anything; a bad one refuses itself alone, and its lease is
over; blocks that a decoder might still write wait until it acknowledges. Called by `manager.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachemgr.blocks import NO_OWNER
from cachemgr.ids import BlockArray, BlockRun, SessionId
from cachemgr.kept import keep
from cachemgr.leases import Deferred, Lease, Session, to_wire
from cachemgr.relief import relieve
from cachemgr.results import Kept, Refusal, Replacement, Reported, SequenceReport
from cachemgr.sealing import publish_tail, seal
from cachemgr.state import CacheState
from common.errors import InvalidArgument, ResourceExhausted, TesseraError
from common.layout import TOKEN_BYTES


def report(
    state: CacheState,
    session_id: SessionId,
    sequences: Sequence[SequenceReport],
    *,
    returned: BlockArray,
    wanted: int,
    generated_tokens: int,
    preemptions: int,
    queued: int,
    applied_revision: int,
    now_ns: int,
) -> Reported:
    """See `CacheManager.report`."""
    session = state.book.session(session_id)
    _validate(state, wanted, generated_tokens, preemptions, queued, applied_revision)
    back = _checked_credit(session, returned, "returned_blocks")
    state.revision += 1
    for run in session.take_deferred(applied_revision=applied_revision):
        state.let_go(run)
    if back:
        session.credit.difference_update(back)
        state.pool.ownership.untouched(_run(back))
        state.pool.unhold(_run(back))
    replacements: list[Replacement] = []
    refusals: list[Refusal] = []
    kept: list[Kept] = []
    for sequence in sequences:
        if _extended(state, session, sequence):
            continue
        try:
            replacement = _apply(state, session, sequence, kept, now_ns)
        except TesseraError as error:
            end_refused(state, session, sequence)
            refusals.append(Refusal(sequence.lease_id, error))
        else:
            if replacement is not None:
                replacements.append(replacement)
    counters = state.counters
    counters.generated_tokens += generated_tokens
    counters.preemptions += preemptions
    session.queued_requests = queued
    if state.journal is not None:
        state.journal.flush()
    return Reported(replacements, refusals, _grant_credit(state, session, wanted), state.revision, kept)


def credit(state: CacheState, session_id: SessionId, wanted: int) -> BlockArray:
    """See `CacheManager.credit`."""
    session = state.book.session(session_id)
    if wanted < 0:
        raise InvalidArgument("wanted_blocks", f"is {wanted}; allowed is 0 and more")
    state.revision += 1
    return _grant_credit(state, session, wanted)


def _grant_credit(state: CacheState, session: Session, wanted: int) -> BlockArray:
    """Up to `wanted` blocks for the session, evicting cached ones; int32, perhaps none."""
    room = state.room_for(NO_OWNER)
    if wanted > room and relieve(state, wanted - room, asking=NO_OWNER):
        room = state.room_for(NO_OWNER)
    count = min(wanted, room)
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
    taken = _checked_credit(session, sequence.taken_blocks, "taken_blocks")
    sealed = _checked_seal(state, lease, sequence, len(taken))
    if taken:
        _require_quota(state, lease.owner, len(taken))
        session.credit.difference_update(taken)
        state.pool.ownership.give(taken, lease.owner)
        lease.append(taken)
    lease.tokens += sequence.tokens
    if sequence.copied and lease.copy is not None:
        state.unpin(lease)
        state.counters.cow_copies += 1
        sealed = max(sealed, lease.granted)
    replacement = seal(state, session, lease, sealed)
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


def _extended(state: CacheState, session: Session, sequence: SequenceReport) -> bool:
    """Takes the most frequent news of all, in a fifth of the time: computed tokens in a block that is not whole by
    them. False where it is anything else; then nothing was changed."""
    lease = session.leases.get(sequence.lease_id)
    if lease is None or sequence.release or sequence.copied or len(sequence.taken_blocks):
        return False
    tokens, sealed = sequence.tokens, sequence.sealed_tokens
    size, end = state.block_tokens, len(lease.tokens) + len(tokens)
    if (
        lease.copy is not None
        or lease.committed
        or end % TOKEN_BYTES
        or not lease.granted <= lease.sealed < sealed <= end // TOKEN_BYTES
        or sealed > lease.num_blocks * size
        or (lease.store and sealed // size > lease.num_published)
    ):
        return False
    lease.tokens += tokens
    lease.sealed = sealed
    return True


def _require_quota(state: CacheState, owner: int, count: int) -> None:
    """Makes room for `count` blocks of credit below an owner's ceiling, by what it holds idle. Raises
    ResourceExhausted where that is not enough."""
    left = state.quotas.left(owner)
    if count > left:
        relieve(state, count - left, asking=owner, own=True)
    state.quotas.check(owner, count)
    state.keep_ceiling(owner, count)


def _checked_seal(state: CacheState, lease: Lease, sequence: SequenceReport, num_taken: int) -> int:
    """The sealed mark that a report asks for. Raises InvalidArgument."""
    if len(sequence.tokens) % TOKEN_BYTES:
        raise InvalidArgument("tokens", "no packed int32 tokens")
    sealed = sequence.sealed_tokens
    if 0 <= sealed <= lease.granted and lease.sealed <= lease.granted:
        return lease.sealed  # no news: a decoder may count from nothing
    known = lease.num_tokens + len(sequence.tokens) // TOKEN_BYTES
    highest = min(known, (lease.num_blocks + num_taken) * state.block_tokens)
    if sealed == 0:
        return lease.sealed
    if not lease.sealed <= sealed <= highest:
        raise InvalidArgument("sealed_tokens", f"is {sealed}; allowed is {lease.sealed}..{highest}")
    if lease.committed and sealed > lease.sealed:
        raise InvalidArgument("sealed_tokens", "the block there is committed; make it writable before it is written")
    if lease.copy is not None and not sequence.copied:
        raise InvalidArgument("copied", "the copy of the lease must have run before tokens after it are sealed")
    return sealed


def _checked_credit(session: Session, blocks: BlockArray, name: str) -> list[int]:
    numbers: list[int] = blocks.tolist() if len(blocks) else []
    if numbers and not (len(set(numbers)) == len(numbers) and session.credit.issuperset(numbers)):
        raise InvalidArgument(name, "holds blocks twice, or blocks that are not the session's credit")
    return numbers


def end_refused(state: CacheState, session: Session, sequence: SequenceReport) -> None:
    """Ends a refused lease. The decoder may still use its blocks, so all of them wait for its acknowledgement: also the
    published ones, which what is pinned may hang below. The credit that it took waits with them."""
    taken = [block for block in set(sequence.taken_blocks.tolist()) if block in session.credit]
    session.credit.difference_update(taken)
    runs = [_run(taken)]
    lease = session.leases.get(sequence.lease_id)
    if lease is not None:
        runs.append(lease.blocks)
        if lease.copy is not None:
            runs.append(_run([lease.copy.source]))
        state.forget(lease)
    for run in runs:
        if len(run):
            session.deferred.append(Deferred(state.revision, sequence.lease_id, run))


def _run(blocks: list[int]) -> BlockRun:
    return np.array(blocks, np.intp)


def _validate(
    state: CacheState, wanted: int, generated_tokens: int, preemptions: int, queued: int, applied_revision: int
) -> None:
    if min(wanted, generated_tokens, preemptions, queued) >= 0 <= applied_revision <= state.revision:
        return
    numbers = (
        ("wanted_blocks", wanted),
        ("generated_tokens", generated_tokens),
        ("preemptions", preemptions),
        ("queued_requests", queued),
        ("applied_revision", applied_revision),
    )
    for name, value in numbers:
        if value < 0:
            raise InvalidArgument(name, f"is {value}; allowed is 0 and more")
    if applied_revision > state.revision:
        raise InvalidArgument("applied_revision", f"is {applied_revision}; the newest is {state.revision}")
