"""Session handles: 16 random bytes; whoever holds them, and a grant of their tenant, may continue a conversation.

Invariant: a handle leaves this process once, in the answer that makes it, and is kept nowhere: the core knows a branch
by its *name*, a digest of the handle under a key that is drawn at start. What a lookup costs thus says nothing about
handles, and neither a log nor a dump of the core holds one. Used by `operations.py` and `branch_service.py`.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

from common.errors import InvalidArgument, NotFound

HANDLE_BYTES: Final = 16
MAX_KEEP_SECONDS: Final = 3600.0
NS: Final = 1_000_000_000


class Handles:
    """Draws handles and names them."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def draw(self) -> tuple[bytes, bytes]:
        """A new handle and its name."""
        handle = secrets.token_bytes(HANDLE_BYTES)
        return handle, self._digest(handle)

    def name_of(self, handle: bytes) -> bytes:
        """The name of a handle. Raises NotFound for bytes that cannot be one, as for one that is not known."""
        if len(handle) != HANDLE_BYTES:
            raise NotFound("there is no such kept conversation; it may have expired", reason="BRANCH_NOT_FOUND")
        return self._digest(handle)

    def _digest(self, handle: bytes) -> bytes:
        return hashlib.blake2b(handle, key=self._key, digest_size=16, person=b"tessera-handle").digest()


def keep_ns(field: str, seconds: float) -> int:
    """How long a branch is kept: `seconds` > 0, cut to the server's limit. Raises InvalidArgument; NaN is refused."""
    if not seconds > 0:
        raise InvalidArgument(field, "allowed is a number of seconds > 0")
    return max(1, int(min(seconds, MAX_KEEP_SECONDS) * NS))
