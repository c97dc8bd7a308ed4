"""Which wider scope the first tokens of a request lie in, and whether its tenant may say so. Pure.

Invariants: a tenant that is no member of a group cannot tell it from one that does not exist; in the public scope lie
exactly the approved prefixes; a root is derived from the scope's own secret, so that nothing a tenant knows opens it;
a group is its id, and its name but a way to say it. Called by the operations of sessions, by the admin service and by
`tenants.py`. What the core does with a span is `layers.py`'s business.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol

from cachemgr.ids import TenantId
from cachemgr.keys import CacheKey, Scope, derive_root
from cachemgr.results import ScopeSpan
from common.errors import InvalidArgument, PermissionDenied
from common.layout import TOKEN_BYTES
from tessera.common.v1 import common_pb2

PUBLIC_OWNER: Final = TenantId("@public")  # no tenant's name begins so


_GROUP: Final = "@group:"


class ScopeRules(Protocol):
    """What has to be known of scopes; `cachemgr/tenants.py` knows it."""

    def scope_secret(self, scope: Scope, group: str = "") -> bytes:
        """The secret of a wider scope."""

    def group_id(self, group: str) -> str:
        """The id of the group that has this name now; "" where there is none."""

    def is_member(self, group: str, tenant: TenantId) -> bool:
        """Whether a tenant is a member of a group; False too where there is no such group."""

    def approved_lengths(self) -> tuple[int, ...]:
        """How many tokens approved prefixes have."""

    def is_approved(self, tokens: bytes) -> bool:
        """Whether exactly these packed tokens are an approved prefix."""


def group_owner(rules: ScopeRules, group: str) -> TenantId:
    """The name that owns a group's blocks: of this group, and of none that had its name before or gets it later."""
    return TenantId(f"{_GROUP}{group}:{rules.group_id(group)}")


def group_of(owner: TenantId) -> str:
    """The name of the group that owns blocks as `owner`; "" where it is no group."""
    return owner.removeprefix(_GROUP).partition(":")[0] if owner.startswith(_GROUP) else ""


def is_group_of(rules: ScopeRules, owner: TenantId) -> bool:
    """Whether `owner` is a group that is still there."""
    group = group_of(owner)
    return bool(group and rules.group_id(group)) and owner == group_owner(rules, group)


def resolve_prefix(
    rules: ScopeRules, tenant: TenantId, key: CacheKey, prefix: common_pb2.ScopePrefix, tokens: bytes, field: str
) -> ScopeSpan | None:
    """The span of a request with these packed `tokens` under the private `key`; None where no token lies in the scope.

    Raises InvalidArgument (below `field`), PermissionDenied (SCOPE_DENIED: no member, or no such group;
    PREFIX_NOT_APPROVED).
    """
    num_tokens, most = prefix.num_tokens, len(tokens) // TOKEN_BYTES
    if num_tokens > most:
        raise InvalidArgument(f"{field}.num_tokens", f"is {num_tokens}; allowed are 0..{most}, the prompt's tokens")
    if prefix.scope == common_pb2.SCOPE_GROUP:
        if not rules.is_member(prefix.group, tenant):
            raise _scope_denied()
        return group_span(rules, key, prefix.group, num_tokens or most)
    if prefix.scope != common_pb2.SCOPE_PUBLIC:
        raise InvalidArgument(f"{field}.scope", "allowed are the group and the public scope")
    if prefix.group:
        raise InvalidArgument(f"{field}.group", "is only allowed in the group scope")
    if not num_tokens:
        num_tokens = longest_approved(rules, tokens)
        return public_span(rules, key, num_tokens) if num_tokens else None
    if not rules.is_approved(tokens[: num_tokens * TOKEN_BYTES]):
        raise PermissionDenied(
            f"the first {num_tokens} tokens of the prompt are no approved prefix", reason="PREFIX_NOT_APPROVED"
        )
    return public_span(rules, key, num_tokens)


def check_owner(rules: ScopeRules, tenant: TenantId, owner: TenantId | None) -> None:
    """Whether a tenant may go on below blocks of a scope's `owner` (None: its own). Raises PermissionDenied."""
    if owner is None or owner == PUBLIC_OWNER:
        return
    if not (is_group_of(rules, owner) and rules.is_member(group_of(owner), tenant)):
        raise _scope_denied()


def longest_approved(rules: ScopeRules, tokens: bytes) -> int:
    """How many tokens the longest approved prefix that a prompt begins with has; 0 where there is none."""
    fitting = (length for length in rules.approved_lengths() if length * TOKEN_BYTES <= len(tokens))
    for length in sorted(fitting, reverse=True):
        if rules.is_approved(tokens[: length * TOKEN_BYTES]):
            return length
    return 0


def group_span(rules: ScopeRules, key: CacheKey, group: str, num_tokens: int) -> ScopeSpan:
    """The first tokens in a group's scope. The caller has checked the membership."""
    wider = replace(key, scope=Scope.GROUP, scope_name=rules.group_id(group))
    return ScopeSpan(group_owner(rules, group), derive_root(rules.scope_secret(Scope.GROUP, group), wider), num_tokens)


def public_span(rules: ScopeRules, key: CacheKey, num_tokens: int) -> ScopeSpan:
    """The first tokens in the public scope. The caller has checked the approval."""
    wider = replace(key, scope=Scope.PUBLIC, scope_name="")
    return ScopeSpan(PUBLIC_OWNER, derive_root(rules.scope_secret(Scope.PUBLIC), wider), num_tokens)


def prefix_naming(
    rules: ScopeRules, span: ScopeSpan, tokens: bytes, block_tokens: int
) -> common_pb2.ScopePrefix | None:
    """The prefix of which `resolve_prefix` makes the same whole blocks of these packed `tokens` as `span` has, at least
    one. None where none does: of an approved prefix a part is not approved."""
    num_blocks, group = span.num_tokens // block_tokens, group_of(span.owner)
    if group:
        return common_pb2.ScopePrefix(scope=common_pb2.SCOPE_GROUP, group=group, num_tokens=num_blocks * block_tokens)
    for length in rules.approved_lengths():
        end = length * TOKEN_BYTES
        if length // block_tokens == num_blocks and end <= len(tokens) and rules.is_approved(tokens[:end]):
            return common_pb2.ScopePrefix(scope=common_pb2.SCOPE_PUBLIC, num_tokens=length)
    return None


def _scope_denied() -> PermissionDenied:
    return PermissionDenied("there is no such group of this tenant", reason="SCOPE_DENIED")
