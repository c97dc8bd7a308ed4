"""What a report may say: its numbers, the credit that it takes or gives back, the sealed marks of its sequences.

Invariant: what passes here can be taken without a further look; a check changes nothing. Called by `reports.py`.
"""

from __future__ import annotations

from cachemgr.ids import BlockArray, LeaseId
from cachemgr.leases import NO_LEASE, Lease, Session
from cachemgr.results import SequenceReport
from cachemgr.state import CacheState
from common.errors import InvalidArgument
from common.layout import TOKEN_BYTES


def validate(
    state: CacheState, wanted: int, generated_tokens: int, preemptions: int, queued: int, applied_revision: int
) -> None:
    """The numbers of a whole report. Raises InvalidArgument."""
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


def checked_seal(state: CacheState, lease: Lease, sequence: SequenceReport, num_taken: int) -> int:
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


def checked_credit(session: Session, blocks: BlockArray, name: str, taker: LeaseId = NO_LEASE) -> list[int]:
    """Credit of the session that a report names, to take it (`taker`) or to give it back. Raises InvalidArgument."""
    numbers: list[int] = blocks.tolist() if len(blocks) else []
    if session.lent and taker and any(session.lent.get(block, taker) != taker for block in numbers):
        raise InvalidArgument(name, "holds blocks that were lent to another sequence")
    if len(numbers) == 1 and numbers[0] in session.credit:
        return numbers
    if numbers and not (len(set(numbers)) == len(numbers) and session.credit.issuperset(numbers)):
        raise InvalidArgument(name, "holds blocks twice, or blocks that are not the session's credit")
    return numbers
