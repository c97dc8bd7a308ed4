"""Approved prefixes: what every tenant may share in the public scope, as the operator said.

Invariant: of a prefix only its length and digests keyed by a secret of the node are kept, so that neither the database
nor memory tells what was approved; exactly the approved tokens match, no shorter or longer run of them. What blocks an
approval covers is told by digests of its first 16, 32, ... tokens: with smaller blocks up to 15 tokens go unlooked at,
and more is taken for covered. Called by `tenants.py` (look-ups) and by the admin service.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cachemgr.scope_store import ScopeStore
from cachemgr.tenant_keys import check_name
from cachemgr.tenant_rows import ApprovalRow
from common.errors import AlreadyExists, InvalidArgument, NotFound
from common.layout import TOKEN_BYTES

DIGEST_BYTES: Final = 32
STEP_TOKENS: Final = 16
STEP_BYTES: Final = 16  # of the digest of a step


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
        row = ApprovalRow(name, len(tokens) // TOKEN_BYTES, self._digest(tokens), now_ns, self._steps(tokens))
        known = self._rows.get(name)
        if known is not None:
            if known.digest != row.digest:
                raise AlreadyExists(f"approval {name} exists, for another prefix; withdraw it first")
            if known.steps == row.steps:
                return known.num_tokens
            row = replace(known, steps=row.steps)  # an older build approved it
        self._store.add_approval(row)
        self._rows[name] = row
        self._index()
        return row.num_tokens

    def withdraw(self, name: str) -> ApprovalRow:
        """End an approval; what it was. Raises InvalidArgument or NotFound."""
        if check_name(name, "name") not in self._rows:
            raise NotFound("there is no such approval", reason="APPROVAL_NOT_FOUND")
        self._store.delete_approval(name)
        row = self._rows.pop(name)
        self._index()
        return row

    def lengths(self) -> tuple[int, ...]:
        """How many tokens approved prefixes have, each number once, the longest first."""
        return self._lengths

    def is_approved(self, tokens: bytes) -> bool:
        """Whether exactly these tokens are an approved prefix."""
        digests = self._digests.get(len(tokens))
        return digests is not None and self._digest(tokens) in digests

    def nearest(self, tokens: bytes) -> tuple[ApprovalRow, int] | None:
        """The approval that most of a prompt is like, and of how many tokens that is known; None where none is."""
        best = None
        for row in self._rows.values():
            known = row.num_tokens // STEP_TOKENS if row.steps else 0
            count = min(known, len(tokens) // (STEP_TOKENS * TOKEN_BYTES))
            while count and not _begins_with(
                row, (head := tokens[: count * STEP_TOKENS * TOKEN_BYTES]), self._step(head)
            ):
                count -= 1
            if count and (best is None or count * STEP_TOKENS > best[1]):
                best = (row, count * STEP_TOKENS)
        return best

    def remaining(self, withdrawn: ApprovalRow, block_tokens: int) -> Remaining:
        """What of the public scope is left without `withdrawn`, in blocks of so many tokens."""
        return Remaining(tuple(self._rows.values()), withdrawn, block_tokens, self._step)

    def list_approvals(self, after: str, limit: int) -> list[ApprovalRow]:
        """At most `limit` approvals by name, those after `after` ("" = from the first)."""
        return [self._rows[name] for name in sorted(name for name in self._rows if name > after)[:limit]]

    def _digest(self, tokens: bytes) -> bytes:
        hashed = hashlib.blake2b(tokens, digest_size=DIGEST_BYTES, key=self._secret, person=b"tessera-approve")
        return hashed.digest()

    def _steps(self, tokens: bytes) -> bytes:
        size = STEP_TOKENS * TOKEN_BYTES
        return b"".join(self._step(tokens[:end]) for end in range(size, len(tokens) + 1, size))

    def _step(self, tokens: bytes) -> bytes:
        return hashlib.blake2b(tokens, digest_size=STEP_BYTES, key=self._secret, person=b"tessera-step").digest()

    def _index(self) -> None:
        digests: dict[int, set[bytes]] = {}
        for row in self._rows.values():
            digests.setdefault(row.num_tokens * TOKEN_BYTES, set()).add(row.digest)
        self._digests = digests
        self._lengths = tuple(sorted({row.num_tokens for row in self._rows.values()}, reverse=True))


@dataclass(frozen=True, slots=True)
class Remaining:
    """What of the public scope may still be named after a withdrawal: a `cachemgr.pruning.Reachable`."""

    rows: Sequence[ApprovalRow]
    withdrawn: ApprovalRow
    block_tokens: int
    step: Callable[[bytes], bytes]

    def covers(self, tokens: bytes) -> bool:
        """Whether an approved prefix begins with these packed tokens, whole blocks."""
        digest = self._digest(tokens)
        return any(_begins_with(row, tokens, digest) for row in self.rows)

    def ends(self, tokens: bytes) -> bool:
        """Whether tails may hang below these: an approved prefix has these whole blocks, or they are a part of one that
        the withdrawn one did not end at (where a sequence was cut back to)."""
        digest = self._digest(tokens)
        found = [row for row in self.rows if _begins_with(row, tokens, digest)]
        if any(self._has_end(row, tokens) for row in found):
            return True
        ended = not self.withdrawn.steps or _begins_with(self.withdrawn, tokens, digest)
        return bool(found) and not (ended and self._has_end(self.withdrawn, tokens))

    def _digest(self, tokens: bytes) -> bytes:
        looked_at = len(tokens) // TOKEN_BYTES // STEP_TOKENS * STEP_TOKENS
        return self.step(tokens[: looked_at * TOKEN_BYTES]) if looked_at else b""

    def _has_end(self, row: ApprovalRow, tokens: bytes) -> bool:
        return row.num_tokens // self.block_tokens == len(tokens) // TOKEN_BYTES // self.block_tokens


def _begins_with(row: ApprovalRow, tokens: bytes, digest: bytes) -> bool:
    """Whether an approved prefix begins with packed tokens; `digest` is of the last step that lies within them."""
    count = len(tokens) // TOKEN_BYTES
    end = count // STEP_TOKENS * STEP_BYTES
    return (
        0 < count <= row.num_tokens
        and row.steps[max(0, end - STEP_BYTES) : end] == digest
        and bool(row.steps or row.num_tokens < STEP_TOKENS)
    )
