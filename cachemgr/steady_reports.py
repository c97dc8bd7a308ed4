"""The commonest news of a report: a running sequence computed tokens, took a block of credit, filled one.

It does what `reports.py` does with them, in a quarter of the time: a step of many sequences says little else.
Invariants: a sequence is taken whole here or not touched, and whatever is not plain is left to `reports.py`, in its
order: what might need room, split a node, replace a block, be refused. Blocks that lengthen leaves are listed together,
with their records in the journal, before anything else looks: mostly once the report is answered, since no answer tells
of them. Of a daemon that dies before that the next one hears of them from the decoder, which presents what it has
sealed, as it does where the report itself was lost. Called by `reports.py`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from cachemgr.groups import advance
from cachemgr.leases import Lease, Session
from cachemgr.results import SequenceFields, SequenceReport
from cachemgr.sealing import grow_each, leaf_to_grow
from cachemgr.state import CacheState
from cachemgr.windows import drop_passed
from common.layout import TOKEN_BYTES


def others(
    state: CacheState, session: Session, sequences: Iterable[SequenceFields], waiting: Container[int]
) -> Iterator[SequenceReport]:
    """Takes what is plain of `sequences`, and yields the rest, each before the next one is looked at. Owners in
    `waiting`, which may change meanwhile, have no room: of theirs nothing is plain. Blocks that lengthen a leaf are
    left in `state.late`: `list_late` comes before whatever else looks at the state."""
    find, size, late = session.leases.get, state.block_tokens, state.late
    windowed, grouped = state.window_tokens > 0, state.window_blocks is not None
    for lease_id, taken, tokens, sealed, copied, release, keep in sequences:
        lease = find(lease_id)
        if (
            lease is None
            or release
            or copied
            or lease.copy is not None
            or lease.committed
            or not lease.granted <= lease.sealed < sealed
            or (waiting and lease.owner in waiting)
        ):
            yield SequenceReport(lease_id, taken, tokens, sealed, copied, release, keep)
            continue
        record, num_bytes, published = lease.tokens, len(tokens), lease.num_published
        if num_bytes % TOKEN_BYTES or sealed * TOKEN_BYTES > len(record) + num_bytes:
            yield SequenceReport(lease_id, taken, tokens, sealed, copied, release, keep)
            continue
        border = size * (published + 1)
        if sealed < border and published < lease.num_blocks and not len(taken):
            record += tokens  # most of all: no block was taken, none is whole
            lease.sealed = sealed
            if windowed:
                drop_passed(state, lease)
            elif grouped:
                advance(state, lease)
            continue
        leaf = None
        is_plain = sealed <= size * (lease.num_blocks + len(taken))
        if is_plain and lease.store and sealed >= border:
            leaf = leaf_to_grow(state, lease) if sealed < border + size else None
            is_plain = leaf is not None
        if not is_plain or (len(taken) and not _took_one(state, session, lease, taken.tolist())):
            yield SequenceReport(lease_id, taken, tokens, sealed, copied, release, keep)
            continue
        record += tokens
        lease.sealed = sealed
        if leaf is not None:
            late[leaf] = lease
        elif windowed:
            drop_passed(state, lease)
        elif grouped:
            advance(state, lease)


def list_late(state: CacheState) -> None:
    """Lists the blocks that a report has left for later."""
    leaves = state.late.copy()
    state.late.clear()
    grow_each(state, leaves)
    if state.window_tokens or state.window_blocks is not None:
        for lease in leaves.values():
            if state.window_tokens:
                drop_passed(state, lease)
            else:
                advance(state, lease)


def _took_one(state: CacheState, session: Session, lease: Lease, blocks: list[int]) -> bool:
    """Moves one block of credit to a lease; False, and nothing was changed, where it is not that, the owner's ceiling
    asks for room or the block would be a wider scope's."""
    owner = lease.owner
    if len(blocks) != 1 or blocks[0] not in session.credit or session.lent or state.quotas.has_ceiling(owner):
        return False
    if lease.num_blocks < lease.prefix_blocks:
        return False
    session.credit.discard(blocks[0])
    state.pool.ownership.give(blocks, owner)
    lease.append(blocks)
    return True
