"""What a decoder holds when its stream breaks: typed values, whole and not as a difference.

Invariant: a `Held` is everything that the engine did to a sequence up to a moment between two steps, told to the cache
manager or not; what it lists is computed and fenced. Made by the reporter on the engine's thread, turned into a
`SessionResume` by `resume_messages.py`. It holds no state.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from common.tokens import pack_tokens
from decoder.sequence import CopyPlan, IntArray, LeaseId, ScopePrefix, Sequence


@dataclass(frozen=True, slots=True)
class Held:
    """One sequence with a lease. `tokens` (packed) are those with a place in the table; `copy` has not run yet."""

    lease_id: LeaseId
    grant: bytes = field(repr=False)
    tokens: bytes = field(repr=False)
    blocks: IntArray = field(repr=False)
    sealed_tokens: int
    copy: CopyPlan | None
    request_id: str
    sample: int
    no_store: bool
    priority: int
    ttl_seconds: float
    scope: ScopePrefix | None = None
    adapter_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Holdings:
    """All sequences that hold blocks, and the credit that is in no table. `number` is that of the `Away` it answers.

    window_blocks: int32 [n, 2], pairs (block, its window block) of the credit, of the sources and targets of copies and
                   of what the window of each table has not passed; none without groups of layers
    """

    sequences: tuple[Held, ...]
    credit: IntArray = field(repr=False)
    number: int = 0
    window_blocks: IntArray = field(default_factory=lambda: np.empty((0, 2), np.int32), repr=False)


def held_of(sequence: Sequence, lease: LeaseId) -> Held:
    """All of a sequence that holds `lease`."""
    # Only computed tokens are told beyond what the daemon knows: the newest one has no block yet.
    known = max(sequence.num_computed, sequence.reported_tokens)
    request = sequence.request
    return Held(
        lease_id=lease,
        grant=request.grant,
        tokens=pack_tokens(sequence.tokens[:known]),
        blocks=sequence.table.copy(),
        sealed_tokens=sequence.num_computed,
        copy=sequence.copy,
        request_id=request.request_id,
        sample=sequence.sample,
        no_store=request.no_store,
        priority=request.cache_priority,
        ttl_seconds=request.cache_ttl_seconds,
        scope=request.scope,
        adapter_digest=request.adapter_digest,
    )
