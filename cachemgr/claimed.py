"""What decoders have claimed so far of a cache that is being adopted. Plain values; `claims.py` writes them."""

from __future__ import annotations

from dataclasses import dataclass, field

# Owner, place in the sequence, digests of the path before it and with it (`claim_plans.Path`).
Content = tuple[int, int, bytes, bytes]


@dataclass(slots=True)
class Claimed:
    """Blocks that were taken out of limbo.

    shared: sealed ones, with what is in them;  writable: of one sequence, or of a session's credit
    """

    shared: dict[int, Content] = field(default_factory=dict)
    writable: set[int] = field(default_factory=set)
