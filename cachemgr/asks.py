"""What an acquire asks for, as one value, and the checks of its fields. Pure; `admission.py` answers it.

Invariant: a field that is out of range is refused by its name and with what is allowed, before anything is looked up.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from cachemgr.ids import TenantId
from cachemgr.keys import ROOT_BYTES
from cachemgr.results import ScopeSpan
from common.errors import InvalidArgument
from common.layout import TOKEN_BYTES

MAX_PRIORITY: Final = 100
MAX_REQUEST_ID: Final = 256


class Ask(NamedTuple):  # a third of the cost of a frozen dataclass
    """The arguments of `CacheManager.acquire`, which tells what they mean. `tokens` are all of the sequence's once the
    kept branch that it continues has been put before them."""

    tenant: TenantId
    root: bytes
    tokens: bytes
    request_id: str
    sample: int
    no_read: bool
    no_store: bool
    resumed: bool
    priority: int
    ttl_ns: int
    base: bytes
    base_tokens: int
    will_keep: bool
    prefix: ScopeSpan | None
    may_wait: bool
    now_ns: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return len(self.tokens) // TOKEN_BYTES

    def check(self) -> None:
        """Raises InvalidArgument at the first field that is out of range."""
        if not self.tenant:
            raise InvalidArgument("tenant", "is empty; a tenant is needed")
        if len(self.root) != ROOT_BYTES:
            raise InvalidArgument("root", f"has {len(self.root)} bytes; allowed is {ROOT_BYTES}")
        tokens = self.tokens
        if not tokens or len(tokens) % TOKEN_BYTES:
            raise InvalidArgument("tokens", f"{len(tokens)} bytes are no packed int32 tokens; at least one is needed")
        if not self.request_id or len(self.request_id) > MAX_REQUEST_ID:
            raise InvalidArgument("request_id", f"allowed are 1..{MAX_REQUEST_ID} characters")
        if self.sample < 0:
            raise InvalidArgument("sample", f"is {self.sample}; allowed is 0 and more")
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise InvalidArgument("priority", f"is {self.priority}; allowed is 0..{MAX_PRIORITY}")
        if self.ttl_ns < 0:
            raise InvalidArgument("ttl", "allowed is 0 and more")
        if self.prefix is not None:
            _check_prefix(self.prefix, self.num_tokens)


def _check_prefix(prefix: ScopeSpan, most: int) -> None:
    if len(prefix.root) != ROOT_BYTES:
        raise InvalidArgument("prefix.root", f"has {len(prefix.root)} bytes; allowed is {ROOT_BYTES}")
    if not prefix.owner or not 0 <= prefix.num_tokens <= most:
        raise InvalidArgument(
            "prefix.num_tokens", f"is {prefix.num_tokens}; allowed are 0..{most}, the prompt's tokens"
        )
