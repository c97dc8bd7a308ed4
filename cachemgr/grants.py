"""Grants: short-lived signed bytes by which a decoder proves to the daemon for which tenant it asks.

    version u8 | length u8 | tenant | length u8 | key id | mark 8 bytes | expiry u64 ns | BLAKE2b-256 of it, keyed

Invariant: a grant is believed only if its signature, its version, its exact length and its expiry all hold; an expiry
further away than the longest validity is refused too, so that a clock that went back prolongs nothing. The clock is
passed in; it is the node's monotonic one, which daemon restarts do not reset. A request that runs already may outlive
its grant: a session may show a grant that it was leased blocks for once more after its expiry. The validity is no bound
on what a lost grant is worth (each use asks whether its key still counts) but on how long a request may wait for its
first lease. The mark tells which secret the tenant had and which groups it was in: what was computed for a grant before
a rotation, or the end of a group, is not shared after it, also by a daemon that knows of that from the database alone.
Called by the credential
service (issue) and the session service (verify). Revocation is the tenants' business, by the key id that a grant names.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cachemgr.ids import TenantId
from common.errors import Unauthenticated

GRANT_VALIDITY_NS: Final = 86_400 * 1_000_000_000
SIGNING_SECRET_BYTES: Final = 32
MAX_GRANT_BYTES: Final = 256
REMEMBERED_GRANTS: Final = 16_384  # of one session; a key brings at most one new grant a second

MARK_BYTES: Final = 8

_VERSION: Final = 2
_SIGNATURE_BYTES: Final = 32
_EXPIRY_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Grant:
    """What a verified grant says."""

    tenant: TenantId
    key_id: str
    mark: bytes
    expiry_ns: int


class GrantSigner:
    """Makes and checks grants under one 32-byte secret (ValueError on another length)."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != SIGNING_SECRET_BYTES:
            raise ValueError(f"the signing secret has {len(secret)} bytes; it needs {SIGNING_SECRET_BYTES}")
        self._secret = secret

    def issue(self, tenant: TenantId, key_id: str, mark: bytes, now_ns: int) -> bytes:
        """Grant bytes for `tenant`, good for GRANT_VALIDITY_NS from `now_ns`. `mark` has MARK_BYTES (ValueError)."""
        if len(mark) != MARK_BYTES:
            raise ValueError(f"the mark has {len(mark)} bytes; it needs {MARK_BYTES}")
        expiry = now_ns + GRANT_VALIDITY_NS
        parts = [bytes([_VERSION])]
        for text in (tenant, key_id):
            raw = text.encode()
            parts += [bytes([len(raw)]), raw]  # ValueError above 255 bytes; names are validated to be shorter
        parts += [mark, expiry.to_bytes(_EXPIRY_BYTES, "little")]
        body = b"".join(parts)
        return body + self._sign(body)

    def verify(self, grant: bytes, now_ns: int, *, accepted_before: bool = False) -> Grant:
        """The content of `grant`; one that was `accepted_before` may have expired since.

        Raises Unauthenticated without saying which check failed, but for an expiry.
        """
        if not _SIGNATURE_BYTES < len(grant) <= MAX_GRANT_BYTES:
            raise _bad_grant()
        body, signature = grant[:-_SIGNATURE_BYTES], grant[-_SIGNATURE_BYTES:]
        if not hmac.compare_digest(self._sign(body), signature):
            raise _bad_grant()
        found = _parse(body)
        expired = found.expiry_ns <= now_ns and not accepted_before
        if expired or found.expiry_ns > now_ns + GRANT_VALIDITY_NS:
            raise Unauthenticated("the grant has expired; authenticate again", reason="GRANT_EXPIRED")
        return found

    def _sign(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, digest_size=_SIGNATURE_BYTES, key=self._secret, person=b"tessera-grant").digest()


def mark_of(secret: bytes, group_ids: Sequence[str] = ()) -> bytes:
    """Tells one secret of a tenant from the next, the ids of its groups too, and nothing else of them."""
    groups = ",".join(group_ids).encode()
    return hashlib.blake2b(groups, digest_size=MARK_BYTES, key=secret, person=b"tessera-mark").digest()


class AcceptedGrants:
    """The grants that one session was leased blocks for: digests, the least recently used ones forgotten."""

    def __init__(self, limit: int = REMEMBERED_GRANTS) -> None:
        self._limit = limit
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, grant: bytes) -> bool:
        return _digest(grant) in self._digests

    def add(self, grant: bytes) -> None:
        """Remember a grant that was verified just now."""
        digest = _digest(grant)
        self._digests[digest] = None
        self._digests.move_to_end(digest)
        if len(self._digests) > self._limit:
            self._digests.popitem(last=False)


def _digest(grant: bytes) -> bytes:
    return hashlib.blake2b(grant, digest_size=16).digest()


def _parse(body: bytes) -> Grant:
    """Content of a body whose signature is right; another version or length is refused all the same."""
    try:
        if body[0] != _VERSION:
            raise _bad_grant()
        tenant, offset = _text(body, 1)
        key_id, offset = _text(body, offset)
    except (IndexError, UnicodeDecodeError):
        raise _bad_grant() from None
    end = offset + MARK_BYTES
    if len(body) - end != _EXPIRY_BYTES:
        raise _bad_grant()
    return Grant(TenantId(tenant), key_id, body[offset:end], int.from_bytes(body[end:], "little"))


def _text(body: bytes, offset: int) -> tuple[str, int]:
    end = offset + 1 + body[offset]
    if end > len(body):
        raise IndexError("the text ends beyond the grant")
    return body[offset + 1 : end].decode(), end


def _bad_grant() -> Unauthenticated:
    return Unauthenticated("the grant is not valid", reason="BAD_GRANT")
