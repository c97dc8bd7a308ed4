"""The admin service's part that explains: how far a prompt is resident, and why it stops there.

Invariant: it changes nothing, recency neither; tokens that stand where a prompt diverges are shown to operators alone,
and only of the tenant's own tree. Which other keys and scopes to look in is gathered here: their roots need secrets.
"""

from __future__ import annotations

from typing import Any, Final

from cachemgr.admin_base import AdminBase, tokens_asked
from cachemgr.explain import Elsewhere, Explanation, MissReason
from cachemgr.ids import TenantId
from cachemgr.key_book import NO_KEY
from cachemgr.keys import CacheKey, Scope, derive_root, differing_parts
from cachemgr.operations import cache_key_of
from cachemgr.results import ScopeSpan
from cachemgr.roles import is_reader
from cachemgr.scopes import group_span, longest_approved, public_span, resolve_prefix
from common.layout import TOKEN_BYTES
from tessera.admin.v1 import admin_pb2

SCOPE_NAMES: Final = {Scope.PRIVATE: "private", Scope.GROUP: "group", Scope.PUBLIC: "public"}

# Method names are those of the RPCs.
# ruff: noqa: N802


class ExplainAdmin(AdminBase):
    """ExplainPrefix."""

    async def ExplainPrefix(
        self, request: admin_pb2.ExplainPrefixRequest, _context: Any
    ) -> admin_pb2.ExplainPrefixResponse:
        """How far a prompt is resident for a tenant, and why no further."""
        tenant, tokens = self._known_tenant(request.tenant), tokens_asked(request.token_ids)
        given = request.HasField("key")
        key = cache_key_of(request.key, "key") if given else self._tenants.seen_keys.last(tenant)
        manager, now = self._manager_now(), self._clocks.steady_ns()
        if key is None or manager is None:
            nothing = "Nothing is resident: no decoder has attached yet"
            return admin_pb2.ExplainPrefixResponse(
                reason=f"{nothing if manager is None else f'Nothing is known: {NO_KEY}'}.",
                miss_reason=admin_pb2.MISS_REASON_NEVER_SEEN,
            )
        prefix = None
        if request.HasField("prefix"):
            prefix = resolve_prefix(self._tenants, tenant, key, request.prefix, tokens, "prefix")
        root = derive_root(self._tenants.secret(tenant), key)
        others = self._other_keys(tenant, key, request, tokens)
        others += self._other_scopes(tenant, key, root, prefix, tokens)
        found = manager.explain(tenant, root=root, tokens=tokens, prefix=prefix, others=others)
        ago = (now - found.evicted_ns) / 1e9 if found.reason is MissReason.EVICTED else 0.0
        return admin_pb2.ExplainPrefixResponse(
            resident_tokens=found.resident_tokens,
            reason=_sentence(found, len(tokens) // TOKEN_BYTES, ago),
            miss_reason=int(found.reason),  # type: ignore[arg-type]  # the numbers are the same
            other_token_ids=() if is_reader() else found.other_tokens,
            differing_key_parts=found.differing_parts,
            evicted_seconds_ago=ago,
            evicted_for=found.evicted_for,
            other_scope=None if found.other_scope is None else int(found.other_scope),  # type: ignore[arg-type]
            scope_tokens=found.scope_tokens,
            private_reason=self._why_private(request, prefix, tokens, manager.block_tokens),
        )

    def _why_private(
        self, request: admin_pb2.ExplainPrefixRequest, prefix: ScopeSpan | None, tokens: bytes, block_tokens: int
    ) -> str:
        """Why less of the prompt lies in the scope that was named than one might think; empty where it all does."""
        if not request.HasField("prefix"):
            return ""
        if prefix is not None:
            rest = prefix.num_tokens % block_tokens
            if not rest:
                return ""
            named = prefix.num_tokens
            return f"Whole blocks of {block_tokens} tokens are shared: {rest} of the prefix's {named} are private."
        near = self._tenants.approvals.nearest(tokens)
        if near is None:
            return "Nothing is shared: no approved prefix begins the prompt."
        row, count = near
        return (
            f"Nothing is shared: of the {row.num_tokens} tokens approved as {row.name} the prompt has {count}, and "
            "not all: another text, or the prefix does not end where a token of the prompt ends."
        )

    def _other_keys(
        self, tenant: TenantId, key: CacheKey, request: admin_pb2.ExplainPrefixRequest, tokens: bytes
    ) -> list[Elsewhere]:
        """The trees of the other keys that the tenant has acquired under."""
        secret = self._tenants.secret(tenant)
        places = []
        for other in self._tenants.seen_keys.keys(tenant):
            if other == key:
                continue
            prefix = None
            if request.HasField("prefix"):
                prefix = resolve_prefix(self._tenants, tenant, other, request.prefix, tokens, "prefix")
            places.append(Elsewhere(derive_root(secret, other), prefix, differing_parts(key, other)))
        return places

    def _other_scopes(
        self, tenant: TenantId, key: CacheKey, root: bytes, prefix: ScopeSpan | None, tokens: bytes
    ) -> list[Elsewhere]:
        """The scopes that a request of the tenant could have named, and did not."""
        places = []
        if prefix is not None:
            places.append(Elsewhere(root, None, scope=Scope.PRIVATE))
        for group in self._tenants.groups.groups_of(tenant):
            span = group_span(self._tenants, key, group, len(tokens) // TOKEN_BYTES)
            places.append(Elsewhere(root, span, scope=Scope.GROUP))
        approved = longest_approved(self._tenants, tokens)
        if approved:
            places.append(Elsewhere(root, public_span(self._tenants, key, approved), scope=Scope.PUBLIC))
        owner = None if prefix is None else prefix.owner
        return [place for place in places if place.prefix is None or place.prefix.owner != owner]


def _sentence(found: Explanation, num_tokens: int, ago_seconds: float) -> str:
    """Why a prompt is resident no further, for people."""
    count = found.resident_tokens
    match found.reason:
        case MissReason.RESIDENT:
            return f"All {num_tokens} tokens are resident; a request computes the last one all the same."
        case MissReason.DIVERGED:
            return f"The prompt diverges at token {count}: other tokens stand there."
        case MissReason.KEY_DIFFERS:
            parts = ", ".join(found.differing_parts)
            return f"{found.elsewhere_tokens} tokens are resident under another key; what differs: {parts}."
        case MissReason.EVICTED:
            by = _WHY.get(found.evicted_for, f"for {found.evicted_for}")
            return f"What follows token {count} was evicted {ago_seconds:.1f} s ago, {by}."
        case MissReason.COMPUTING:
            return f"A running sequence computes the prompt up to token {found.computing_tokens}."
        case MissReason.OTHER_SCOPE:
            scope = SCOPE_NAMES[found.other_scope or Scope.PRIVATE]
            return f"{found.elsewhere_tokens} tokens are resident in the {scope} scope, which the request did not name."
        case _:
            return f"Nothing is known to have gone on after token {count}."


_WHY: Final = {
    "expired": "because its time was over",
    "operator": "by an operator",
    "quota": "because the tenant's own ceiling asked for it",
    "credit": "for a decoder's reserve of blocks",
}
