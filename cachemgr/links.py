"""One stream of a decoder, and what is known of a session beyond the core. They hold no rule: `sessions.py` does."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Final

from cachemgr.grants import AcceptedGrants
from cachemgr.ids import LeaseId, SessionId
from tessera.cache.v1 import cache_pb2

OUTBOX_MESSAGES: Final = 256
RESUME_TOKEN_BYTES: Final = 16


@dataclass(eq=False, slots=True)
class Connection:
    """One stream. `outbox` has what waits for its turn to be sent, and ends with None: the stream closes then. Whoever
    sends holds `sending`, which is given in the order of asking."""

    outbox: asyncio.Queue[cache_pb2.SessionResponse | None] = field(
        default_factory=lambda: asyncio.Queue(OUTBOX_MESSAGES)
    )
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: SessionId | None = None
    attach_sent_ns: int = 0  # by its decoder's clock
    last_sequence: int = 0
    closed: bool = False

    def close(self) -> bool:
        """Nothing more is taken or sent; False where that was so already."""
        if self.closed:
            return False
        self.closed = True
        if self.outbox.full():
            self.outbox.get_nowait()  # nobody reads it; the end must still be seen
        self.outbox.put_nowait(None)
        return True

    def offer(self, message: cache_pb2.SessionResponse) -> bool:
        """Send a message without waiting. False where the stream is closed or its decoder does not read."""
        if self.closed or self.outbox.full():
            return False
        self.outbox.put_nowait(message)
        return True


@dataclass(frozen=True, slots=True)
class Origin:
    """The session of an older daemon that a session was claimed for, as its decoder proves it, and what each of its
    leases became (0: refused)."""

    epoch: int
    session: int
    resume_token: bytes = field(repr=False)
    leases: dict[LeaseId, LeaseId]


@dataclass(eq=False, slots=True)
class Link:
    """A session beyond the core; it outlives a broken stream.

    connection: the stream; None while it is away
    superseded: the same decoder of the same process has attached anew
    reclaiming: it was asked for credit and has not reported since
    origin: what it was claimed for, until its decoder has reported: the answer to the claim may have been lost
    """

    session: SessionId
    decoder_name: str
    process_id: int
    connection: Connection | None
    resume_token: bytes = field(default_factory=lambda: secrets.token_bytes(RESUME_TOKEN_BYTES), repr=False)
    accepted_grants: AcceptedGrants = field(default_factory=AcceptedGrants)
    superseded: bool = False
    reclaiming: bool = False
    origin: Origin | None = None
