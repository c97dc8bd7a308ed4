"""Approved prefixes: what every tenant may share in the public scope, as the operator said.

Invariant: of a prefix only its length and a digest keyed by a secret of the node are kept, so that neither the database
nor memory tells what was approved; exactly the approved tokens match, no shorter or longer run of them. Called by
`tenants.py` (look-ups) and by the admin service.
"""

from __future__ import annotations

import hashlib
from typing import Final

from cachemgr.scope_store import ScopeStore
from cachemgr.tenant_keys import check_name
from cachemgr.tenant_rows import ApprovalRow
from common.errors import AlreadyExists, InvalidArgument, NotFound
from common.layout import TOKEN_BYTES

DIGEST_BYTES: Final = 32


class Approvals:
    """All approvals of a node. Tokens are packed little-endian int32."""

    def __init__(self, store: ScopeStore, digest_secret: bytes) -> None:
        self._store = store
        self._secret = digest_secret
        self._rows = {row.name: row for row in store.load_approvals()}
        self._index()

    def approve(self, name: str, tokens: bytes, now_ns: int) -> int:
        """Let every tenant share exactly these tokens; their number. Harmless when repeated.

        Raises InvalidArgument; AlreadyExists where the name stands for other tokens.
        """
        check_name(name, "name")
        if not tokens:
            raise InvalidArgument("token_ids", "is empty; a prefix has at least one token")
        row = ApprovalRow(name, len(tokens) // TOKEN_BYTES, self._digest(tokens), now_ns)
        known = self._rows.get(name)
        if known is not None:
            if known.digest != row.digest:
                raise AlreadyExists(f"approval {name} exists, for another prefix; withdraw it first")
            return known.num_tokens
        self._store.add_approval(row)
        self._rows[name] = row
        self._index()
        return row.num_tokens

    def withdraw(self, name: str) -> None:
        """End an approval. Raises InvalidArgument or NotFound."""
        if check_name(name, "name") not in self._rows:
            raise NotFound("there is no such approval")
        self._store.delete_approval(name)
        del self._rows[name]
        self._index()

    def lengths(self) -> tuple[int, ...]:
        """How many tokens approved prefixes have, each number once, the longest first."""
        return self._lengths

    def is_approved(self, tokens: bytes) -> bool:
        """Whether exactly these tokens are an approved prefix."""
        digests = self._digests.get(len(tokens))
        return digests is not None and self._digest(tokens) in digests

    def list_approvals(self, after: str, limit: int) -> list[ApprovalRow]:
        """At most `limit` approvals by name, those after `after` ("" = from the first)."""
        return [self._rows[name] for name in sorted(name for name in self._rows if name > after)[:limit]]

    def _digest(self, tokens: bytes) -> bytes:
        hashed = hashlib.blake2b(tokens, digest_size=DIGEST_BYTES, key=self._secret, person=b"tessera-approve")
        return hashed.digest()

    def _index(self) -> None:
        digests: dict[int, set[bytes]] = {}
        for row in self._rows.values():
            digests.setdefault(row.num_tokens * TOKEN_BYTES, set()).add(row.digest)
        self._digests = digests
        self._lengths = tuple(sorted({row.num_tokens for row in self._rows.values()}, reverse=True))
